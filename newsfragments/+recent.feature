`/api/decisions` and `/api/history` tell the last requests and the last ten minutes; access lines have `waited_s`.
With workers, decisions, history, counts, callers and limits are those of all workers together.
