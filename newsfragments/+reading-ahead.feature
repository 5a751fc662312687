`expected-ttft` learns how much of the prompts queued ahead really delays a prompt: servers that read several prompts at once seemed slower than they are.
