"""Clients that stream all the time, and count what went wrong: for changes under load."""

from __future__ import annotations

import threading
import time
from collections import Counter

from harness import LAST_CHUNK, SSE_HEAD, Client, Line, Received, chat_body, chunk, event, post


def short_streams(ticks: int = 12, gap_s: float = 0.02) -> object:
    """A script: a stream of ``ticks`` events."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        for number in range(ticks):
            line.send(chunk(event(f"tick{number} ")))
            time.sleep(gap_s)
        line.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    return script


class StreamingLoad:
    """``clients`` threads, each with one stream after another, each on a connection of its own.

    :param keep: streams on one connection until the gateway says that it closes it.
    :ivar counts: ``done``, ``cut``, ``refused``, ``answered <status>``.
    :ivar told: what went wrong, in words.
    """

    def __init__(self, port: int, clients: int = 8, *, keep: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []
        self._port = port
        self._keep = keep
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]

    def __enter__(self) -> StreamingLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let every stream end, and begin no more."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a stream never ended"

    def wait_done(self, count: int, within_s: float = 30.0) -> None:
        """Until so many more streams have ended well."""
        wanted = self.counts["done"] + count
        end_s = time.monotonic() + within_s
        while self.counts["done"] < wanted:
            assert time.monotonic() < end_s, (self.counts, self.told)
            time.sleep(0.01)

    def check(self) -> None:
        """Nothing went wrong."""
        assert set(self.counts) == {"done"}, (self.counts, self.told)

    def _run(self) -> None:
        client: Client | None = None
        while not self._stop.is_set():
            if client is None:
                try:
                    client = Client(self._port, 30.0)
                except OSError as error:
                    self._count("refused", repr(error))
                    time.sleep(0.01)
                    continue
            try:
                client.send(post(body=chat_body(stream=True)))
                answer = client.read_answer()
            except (OSError, AssertionError) as error:
                self._count("cut", f"before the head: {error!r}")
                client = client.close()
                continue
            if answer.status != 200:
                self._count(f"answered {answer.status}", repr(answer.body[:200]))
            elif not answer.clean or b"[DONE]" not in answer.body:
                self._count("cut", repr(answer.body[-200:]))
            else:
                self.counts["done"] += 1
            if not self._keep or not answer.clean or answer.get("connection") == "close":
                client = client.close()
        if client is not None:
            client.close()

    def _count(self, what: str, words: str) -> None:
        self.counts[what] += 1
        self.told.append(f"{what}: {words}")
