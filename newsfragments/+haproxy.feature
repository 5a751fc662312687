`etc/haproxy/haproxy.cfg`: HAProxy before several gateways, as the tests run it; `docs/load-balancers.md` for it, NLB, DNS and nginx.
