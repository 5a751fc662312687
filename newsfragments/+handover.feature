SIGUSR2 starts a successor that takes over the listening sockets: a new version without a refused connection or a cut stream. systemd is told of
start, reload, end and a new main process, its watchdog is satisfied from the event loop, and sockets that it passed wrongly are explained.
