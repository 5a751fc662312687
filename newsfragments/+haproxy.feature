`etc/haproxy/haproxy.cfg`: HAProxy in front of several gateways, as the tests run it; `docs/load-balancers.md` covers it, NLB, DNS and nginx.
