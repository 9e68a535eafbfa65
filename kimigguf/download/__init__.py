"""Get it, whole."""
