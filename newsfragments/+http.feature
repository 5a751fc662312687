HTTP/1.1 from clients and backends is parsed strictly: a message whose end is ambiguous is refused and nothing after it is read. With `x-llmgw-timeout` a client can shorten the time it waits.
