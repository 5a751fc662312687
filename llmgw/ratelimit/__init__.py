"""Rate limiters: plugins that decide whether a request is within the limits (``docs/rate-limits.md``).

``local`` counts in this process alone. It keeps no state on disk and is exact
for one worker; several workers share their limits through ``redis``.
"""
