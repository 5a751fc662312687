Backends are asked for life, models, slots, load and context length (`llamacpp`, `http`). No backend gets more requests than it has slots; a full fleet answers 503 with `Retry-After` at once.
