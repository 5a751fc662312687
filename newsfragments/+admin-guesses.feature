Wrong tokens at the admin listener are counted: after ten a minute from one network it answers 429 with `Retry-After` and logs a line. The right token is never delayed.
