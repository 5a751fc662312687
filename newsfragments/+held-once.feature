A request is held in memory once while its answer is pending, not three times: long prompts that wait take a third of the memory.
