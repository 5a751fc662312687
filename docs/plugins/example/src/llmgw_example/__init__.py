"""Example plugins for llmgw; see README.md for how they came about."""
