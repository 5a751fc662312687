"""A proxy that breaks connections on purpose, to stand before a backend.

For tests of plugins that talk to servers, and for operators who want to see what
their fleet does before it happens by itself::

    with FaultProxy("127.0.0.1", 8080) as proxy:      # before the real server
        proxy.play(Fault("stall", at=300))            # stalls after 300 bytes of an answer
        ... ask proxy.url ...
        proxy.play(Fault())                           # well again

    python -m llmgw.testing 127.0.0.1:9000 127.0.0.1:8080 stall --at 300

It works below HTTP, on the bytes of each connection from the server to the client;
what the client sends passes untouched. It runs in threads of its own, so it
serves blocking tests as well as a reactor in the same process, and is meant for
some hundred connections, not for load.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from types import TracebackType

from msgspec import Struct

FAULTS = {
    "none": "passes everything",
    "refuse": "nobody listens: the connection is refused",
    "unreachable": "the connection comes about never: no answer to SYN",
    "reject": "accepts, and resets at once",
    "black_hole": "accepts, reads nothing, says nothing",
    "stall": "passes AT bytes, then nothing, and stays open",
    "cut": "passes AT bytes, then closes in good order",
    "reset": "passes AT bytes, then resets",
    "garbage": "passes AT bytes, then 4 KiB of noise, then closes",
    "truncate": "passes AT bytes, then a chunk that is longer than what follows, then closes",
    "corrupt": "changes the byte at AT and passes the rest",
    "drip": "passes AT bytes, then the rest at RATE bytes a second",
    "delay": "holds every piece back for DELAY seconds",
}
"""Kinds of faults by name."""

_PIECE_BYTES = 65_536
_NOISE = random.Random(0).randbytes(4096)
_BROKEN_CHUNK = b"ffff\r\ndata: {"
_STEP_S = 0.02
_NEVER = 1 << 62


class Fault(Struct, frozen=True):
    """What goes wrong.

    :param kind: a name of :data:`FAULTS`.
    :param at: bytes of each connection from the server that pass before it begins.
        At 0 the fault waits for the first byte of an answer, so the request was read.
    :param only: it befalls only connections whose first request begins with
        this, such as ``b"POST"``, so that health checks pass. Without meaning
        for ``refuse``, ``unreachable`` and ``reject``, which see no request.
    :param rate: bytes per second of ``drip``.
    :param delay_s: of ``delay``.
    """

    kind: str = "none"
    at: int = 0
    only: bytes = b""
    rate: float = 100.0
    delay_s: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ValueError(f"no such fault: {self.kind!r}; there are {', '.join(FAULTS)}")


class FaultProxy:
    """Listens, and passes connections on to ``host`` and ``port`` with a fault.

    :param listen: address and port to listen on; port 0 takes a free one.
    :ivar port: where it listens; the same through all faults.
    :ivar accepted: connections so far.
    """

    def __init__(
        self, host: str, port: int, fault: Fault | None = None, *, listen: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        self._target = (host, port)
        self._fault = Fault()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._fillers: list[socket.socket] = []
        self._closed = False
        self.accepted = 0
        self._host = listen[0]
        self._listener: socket.socket | None = socket.create_server(listen, backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{self._host}:{self.port}"
        self._serve(self._listener)
        self.play(fault or Fault())

    @property
    def fault(self) -> Fault:
        """What holds for new connections."""
        return self._fault

    @property
    def open(self) -> int:
        """Sockets that are open now, of both sides."""
        with self._lock:
            return len(self._sockets)

    def play(self, fault: Fault) -> None:
        """From now on connections have this fault. Open ones are closed first, so that
        none from before carries a next request."""
        self.drop()
        self._fault = fault
        if fault.kind == "refuse":
            self._stop_listening()
        elif fault.kind == "unreachable":
            self._stop_listening()
            self._listen_with_a_full_queue()
        elif self._listener is None or self._fillers:
            self._stop_listening()
            self._listener = self._bound()
            self._listener.listen(512)
            self._serve(self._listener)

    def drop(self) -> None:
        """Close every connection, in good order."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for sock in sockets:
            _shut(sock)

    def close(self) -> None:
        """Listen no more, and close everything."""
        self._closed = True
        self._stop_listening()
        self.drop()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- listening ---

    def _bound(self) -> socket.socket:
        """A socket on our port; whoever was cut lately may still hold it for a moment."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for _ in range(200):
            with contextlib.suppress(OSError):
                sock.bind((self._host, self.port))
                return sock
            time.sleep(_STEP_S)
        sock.bind((self._host, self.port))
        return sock

    def _listen_with_a_full_queue(self) -> None:
        """The kernel drops the SYN of whoever comes when a listener's queue is full."""
        self._listener = self._bound()
        self._listener.listen(0)
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex((self._host, self.port))
            self._fillers.append(filler)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            _shut(listener)
        fillers, self._fillers = self._fillers, []
        for filler in fillers:
            filler.close()

    def _serve(self, listener: socket.socket) -> None:
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            fault = self._fault
            self.accepted += 1
            if self._closed or fault.kind == "reject":
                _reset(client)
                continue
            self._keep(client)
            threading.Thread(target=self._carry, args=(client, fault), daemon=True).start()

    # --- one connection ---

    def _carry(self, client: socket.socket, fault: Fault) -> None:
        server: socket.socket | None = None
        try:
            first = b""
            if fault.only:
                first = client.recv(_PIECE_BYTES)
                if not first.startswith(fault.only):
                    fault = Fault()
            if fault.kind == "black_hole":
                self._wait_dropped(client)
                return
            server = socket.create_connection(self._target, 10.0)
            server.settimeout(None)
            self._keep(server)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if first:
                server.sendall(first)
            threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
            self._answers(server, client, fault)
        except OSError:
            pass
        finally:
            for each in (client, server):
                if each is not None:
                    self._end(each)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        """What the client sends, and its leaving, pass as they are."""
        with contextlib.suppress(OSError):
            while data := client.recv(_PIECE_BYTES):
                server.sendall(data)
        with self._lock:
            if client not in self._sockets:
                return  # it is being reset, and must not end in good order
        for sock in (client, server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _answers(self, server: socket.socket, client: socket.socket, fault: Fault) -> None:
        left = fault.at if fault.kind not in ("none", "delay") else _NEVER
        while data := server.recv(_PIECE_BYTES):
            if fault.kind == "delay":
                time.sleep(fault.delay_s)
            client.sendall(data[:left])
            if len(data) < left:
                left -= len(data)
                continue
            rest = data[left:]
            left = _NEVER
            if not self._break(server, client, fault, rest):
                return

    def _break(self, server: socket.socket, client: socket.socket, fault: Fault, rest: bytes) -> bool:
        """The fault befalls the connection, after which ``rest`` was to come.
        :return: whether it goes on."""
        kind = fault.kind
        if kind == "stall":
            self._wait_dropped(client)
        elif kind == "reset":
            self._forget(client)
            _reset(client)
        elif kind == "garbage":
            client.sendall(_NOISE)
        elif kind == "truncate":
            client.sendall(_BROKEN_CHUNK)
        elif kind == "corrupt":
            if rest:
                client.sendall(bytes((rest[0] ^ 0x15,)) + rest[1:])
            return True
        elif kind == "drip":
            while rest:
                for byte in rest:
                    client.sendall(bytes((byte,)))
                    time.sleep(1 / fault.rate)
                rest = server.recv(_PIECE_BYTES)
        return False

    def _wait_dropped(self, client: socket.socket) -> None:
        """Until the client leaves, or we drop it; nothing is read meanwhile."""
        poll = select.poll()
        # What it sends is not looked for, so only its leaving wakes us.
        poll.register(client, getattr(select, "POLLRDHUP", 0))
        while not poll.poll(100):
            with self._lock:
                if client not in self._sockets:
                    return

    def _keep(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._closed:
                self._sockets.add(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)

    def _end(self, sock: socket.socket) -> None:
        self._forget(sock)
        _shut(sock)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # A thread that waits in accept() or recv() would keep it open.
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # A thread in recv() holds it; this sends nothing.
        sock.shutdown(socket.SHUT_RD)
    sock.close()


def main(arguments: list[str] | None = None) -> None:
    """The command line: one fault until Ctrl-C."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m llmgw.testing",
        description="Stand before a server and break its connections on purpose.",
        epilog="\n".join(f"{name:12}{what}" for name, what in FAULTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("listen", help="HOST:PORT to listen on")
    parser.add_argument("target", help="HOST:PORT of the server")
    parser.add_argument("fault", choices=list(FAULTS))
    parser.add_argument("--at", type=int, default=0, help="bytes of each connection that pass first")
    parser.add_argument("--only", default="", help="only connections that begin with this, such as POST")
    parser.add_argument("--rate", type=float, default=100.0, help="bytes per second of drip")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds of delay")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end by itself")
    given = parser.parse_args(arguments)
    fault = Fault(given.fault, at=given.at, only=given.only.encode(), rate=given.rate, delay_s=given.delay)
    host, _, port = given.target.rpartition(":")
    listen_host, _, listen_port = given.listen.rpartition(":")
    with FaultProxy(host, int(port), fault, listen=(listen_host, int(listen_port))) as proxy:
        print(f"{proxy.url} -> {given.target}: {FAULTS[given.fault]}", flush=True)
        end_s = time.monotonic() + given.seconds
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < end_s:
                time.sleep(min(0.2, given.seconds))
