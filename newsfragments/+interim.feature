Clients held for their model may ask for signs of life: `x-llmgw-interim: 102` for 102 Processing, `sse` for a stream with comments or pings.
