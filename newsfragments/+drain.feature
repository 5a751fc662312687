SIGTERM drains: not ready, then no new connections, then streams may finish (`[drain]`). SIGHUP and `POST /api/reload` apply a changed configuration as a whole, or keep the old one and say why.
