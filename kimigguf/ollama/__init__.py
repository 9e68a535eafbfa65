"""Or register it: hand a quant to Ollama, and say when that is a bad idea."""
