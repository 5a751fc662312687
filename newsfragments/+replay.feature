`llmgw replay` shows what really happened to the requests of the log beside what other routers would have done.
