"""``python -m kimigguf`` is the ``kimigguf`` command."""

from kimigguf.cli.app import main

main()
