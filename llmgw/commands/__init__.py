"""The ``llmgw`` command line, one module per command."""
