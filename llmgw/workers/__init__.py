"""``workers = N``: a parent that holds the sockets, and gateways that serve them (``docs/workers.md``)."""
