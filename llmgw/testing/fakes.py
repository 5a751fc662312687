"""Plain values with sensible defaults, and a backend that answers from a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from zope.interface import implementer

from llmgw.interfaces import IHealthTarget
from llmgw.values import Backend, Profile, Request

_PROFILE_FIELDS = frozenset(Profile.__struct_fields__)

Answer = tuple[int, bytes] | Exception | None
"""Status and body; or what ``get`` fails with; or ``None``: silence until the timeout."""


def request(**fields: Any) -> Request:
    """A :class:`llmgw.values.Request` of a small chat, changed by ``fields``."""
    return Request(**{"id": "req-1", "model": "m", "prompt_tokens": 100, "streaming": True, **fields})


def candidate(id: str = "b0", **fields: Any) -> Backend:
    """A :class:`llmgw.values.Backend`; fields of its ``Profile`` may be given beside its own.

    ``candidate("gpu-0", weight=4.0, in_flight=2, ttft_s=0.3)``
    """
    profile = {name: fields.pop(name) for name in list(fields) if name in _PROFILE_FIELDS}
    return Backend(id=id, profile=Profile(**profile), **fields)


def backends(dice: random.Random, count: int) -> list[Backend]:
    """``count`` lawful candidates, with unknowns and extremes among them.

    All are available and under their cap, as the gateway guarantees.
    """
    return [_backend(dice, f"b{number}") for number in range(count)]


def _backend(dice: random.Random, id: str) -> Backend:
    cap = dice.choice((1, 2, 4, 64, 1000))
    slots = dice.choice((None, 1, 4, cap))
    share = (None, 0.0, 0.5, 1.0, dice.random())
    rate = (None, 0.0, 1e-9, 35.0, 1e6, dice.uniform(1, 200))
    return candidate(
        id,
        weight=dice.choice((1e-3, 1.0, 10.0, 1e3, dice.uniform(0.1, 20))),
        slots=slots,
        max_connections=cap,
        context_length=dice.choice((None, 512, 8192, 1_000_000)),
        labels=dice.choice(({}, {"zone": "a"}, {"zone": "b", "gpu": "l4"})),
        in_flight=dice.randrange(cap),
        ttft_s=dice.choice((None, 0.0, 1e-9, 0.2, 900.0, dice.uniform(0.01, 5))),
        ttft_samples=dice.choice((0, 1, 50)),
        token_rate=dice.choice(rate),
        prefill_rate=dice.choice(rate),
        failure_streak=dice.choice((0, 0, 0, 1, 3, 100)),
        busy_slots=None if slots is None else dice.choice((None, 0, slots)),
        deferred=dice.choice((None, 0, 7)),
        kv_use=dice.choice(share),
        gpu_use=dice.choice(share),
        peers_in_flight=dice.choice((0, 0, 5, 500)),
        warmth=dice.choice((1.0, 1.0, 0.0, 0.1, dice.random())),
        updated_s=dice.uniform(0, 1000),
    )


@implementer(IHealthTarget)
class FakeHealthTarget:
    """A backend that answers ``get`` from a table, under a clock of the test's.

    :param answers: path to :data:`Answer`; a path not in it gives ``otherwise``.
    :ivar asked: ``(at_s, path)`` of every question, in order.
    :ivar posted: path and body of what was sent.
    :ivar waiting: questions that have no answer yet.
    """

    def __init__(
        self,
        clock: IReactorTime,
        answers: Mapping[str, Answer] | None = None,
        *,
        otherwise: Answer = (404, b"{}"),
        id: str = "b0",
        url: str = "http://127.0.0.1:8080",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.id = id
        self.url = url
        self.headers: Mapping[str, str] = headers or {}
        self.answers: dict[str, Answer] = dict(answers or {})
        self.otherwise = otherwise
        self.asked: list[tuple[float, str]] = []
        self.posted: list[tuple[str, bytes]] = []
        self.waiting: list[Deferred[Any]] = []
        self._clock = clock

    def get(self, path: str, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        """Answer in a later turn, as a socket would; after ``timeout_s`` when told to keep silent."""
        assert path.startswith("/"), f"path {path!r} does not begin with /"
        assert timeout_s > 0, f"timeout_s is {timeout_s!r}"
        self.asked.append((self._clock.seconds(), path))
        return self._answered(path, self.answers.get(path, self.otherwise), timeout_s)

    def post(self, path: str, body: bytes, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        """As :meth:`get`, with the answer of ``"POST path"``."""
        assert path.startswith("/"), f"path {path!r} does not begin with /"
        self.asked.append((self._clock.seconds(), f"POST {path}"))
        self.posted.append((path, body))
        return self._answered(path, self.answers.get(f"POST {path}", self.otherwise), timeout_s)

    def watch(self, path: str, received: Callable[[bytes], None], connect_s: float) -> Deferred[int]:
        """The status of the path's answer; a 200's body as one piece, and then no end."""
        self.asked.append((self._clock.seconds(), f"WATCH {path}"))
        answer = self.answers.get(f"WATCH {path}", self.otherwise)
        if not isinstance(answer, tuple) or answer[0] != 200:
            asking: Deferred[Any] = self._answered(path, answer, connect_s)
            return asking.addCallback(lambda told: told[0])
        watching: Deferred[int] = Deferred(self._forget)
        self.waiting.append(watching)
        received(answer[1])
        return watching

    def _answered(self, path: str, answer: Answer, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        result: Deferred[tuple[int, bytes]] = Deferred(self._forget)
        self.waiting.append(result)
        delay_s = timeout_s if answer is None else 0.0
        if answer is None:
            answer = TimeoutError(f"{self.url}{path}: no answer in {timeout_s} s")
        call = self._clock.callLater(delay_s, self._answer, result, answer)

        def stop_waiting(outcome: Any) -> Any:
            if call.active():  # the question was cancelled
                call.cancel()
            return outcome

        result.addBoth(stop_waiting)
        return result

    def gaps(self) -> Iterator[tuple[str, float]]:
        """Path and seconds between two questions for it in a row."""
        last: dict[str, float] = {}
        for at_s, path in self.asked:
            if path in last:
                yield path, at_s - last[path]
            last[path] = at_s

    def _answer(self, result: Deferred[tuple[int, bytes]], answer: tuple[int, bytes] | Exception) -> None:
        self._forget(result)
        if isinstance(answer, Exception):
            result.errback(Failure(answer))
        else:
            result.callback(answer)

    def _forget(self, result: Deferred[Any]) -> None:
        if result in self.waiting:
            self.waiting.remove(result)
