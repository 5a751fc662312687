HTTP/1.1 is read strictly from clients and backends: a message whose end is not beyond doubt is refused and nothing behind it is read. A client may shorten the time it waits with `x-llmgw-timeout`.
