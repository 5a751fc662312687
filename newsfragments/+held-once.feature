A request is held once while its answer is waited for, not three times: long prompts that wait take a third of the memory.
