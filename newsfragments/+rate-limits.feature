Limits of requests, tokens and concurrency, for each key and for all together (`[[rate_limits]]`), with `x-ratelimit-*` and `Retry-After` headers. They are counted in the one process.
