A quarter of `limits.connections` (64 at least) may wait for their first request; when there are more, the oldest of these is closed, so that connections which say nothing take no place from callers.
