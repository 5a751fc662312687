Answers tell of limits in the form of the IETF's draft too (`ratelimit`, `ratelimit-policy`), and a 429's `Retry-After` is no more cut to a minute where the limit needs longer.
