"""Parse, call, show: the command line decides nothing."""
