Failures of backends are told: the access log has `failed`, each backend that gave a request nothing and why; the log says when a breaker takes a backend out, with the
reason, and when it is back; `detail` of `/api/state` and `explain` say why one is ejected.
