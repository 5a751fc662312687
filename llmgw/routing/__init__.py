"""Routers: one file each, pure. The factories that offer them as plugins are in ``llmgw.builtins``."""
