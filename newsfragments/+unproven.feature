A quarter of `limits.connections` (64 at least) may wait for their first request; above that, the oldest of these is closed, so that silent connections take no room from callers.
