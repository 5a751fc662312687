`[store]`: a Redis or Valkey that gateways share, over TCP, TLS, a Unix socket or found through Sentinel. Every wait for it is bounded, and a gateway that has lost it works on by itself.
