"""Is it still K3? Sends the same questions to a quant and to a reference, and says what the answers can bear."""
