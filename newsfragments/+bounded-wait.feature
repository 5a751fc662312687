`[admission] max_wait_s`: a request may wait for a slot, for so long and in so great a number, in place of 503 at once. `slot_choice` lets a router choose llama-server's slot.
