`expected-ttft` learns how much of the reading ahead of it a prompt really waits for: servers that read several prompts at once were taken for slower than they are.
