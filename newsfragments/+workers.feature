`workers = N`: a parent holds the listening sockets and N gateways serve them, supervised, replaced one after another by `POST /api/restart`
without a cut stream or a refused connection, and shown to the operator as one gateway.
