`[admission] max_wait_s`: a request may wait for a slot instead of getting 503 at once, for a limited time and in a limited number. `slot_choice` lets a router choose llama-server's slot.
