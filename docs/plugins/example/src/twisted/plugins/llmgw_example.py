"""One line per factory, and instances, not classes. No ``__init__.py`` beside this file."""

from llmgw_example.health import plain
from llmgw_example.router import sticky

__all__ = ["plain", "sticky"]
