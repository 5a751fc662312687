`twistd --reactor=lean` runs the gateway on a leaner form of Twisted's epoll reactor; the systemd unit, the container and `llmgw demo` use it.
