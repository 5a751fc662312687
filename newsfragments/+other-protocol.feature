A PROXY header or TLS sent to a listener that accepts neither gets an error code of its own (400 `unexpected_proxy_header`, `unexpected_tls`), which the access log and `llmgw_refused` show too.
