Answers also report limits in the form of the IETF draft (`ratelimit`, `ratelimit-policy`), and a 429's `Retry-After` is no longer cut to a minute if the limit needs longer.
