Wrong tokens at the admin listener are counted: ten a minute from one network, then 429 with `Retry-After` and a line in the log. The right token is never held up.
