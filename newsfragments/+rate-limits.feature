Limits on requests, tokens and concurrency, for each key and for all together (`[[rate_limits]]`), with `x-ratelimit-*` and `Retry-After` headers, counted within one process.
