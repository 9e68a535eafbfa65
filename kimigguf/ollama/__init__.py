"""Or register it."""
