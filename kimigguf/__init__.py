"""kimigguf: run a quantized Kimi K3 on the machine you have, and prove that it is still K3."""

__version__ = "0.1.0"
