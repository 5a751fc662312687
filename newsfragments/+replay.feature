`llmgw replay` shows what really happened to the requests of the log beside what routers would have made of them.
