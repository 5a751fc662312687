"""llmgw: an inference gateway for fleets of self-hosted language models.

Importing this package imports nothing else; see ``docs/architecture.md`` for
the rooms of the house and the one way a request takes through them.
"""

__version__ = "0.1.0"
