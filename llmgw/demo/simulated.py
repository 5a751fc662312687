"""A backend that only pretends: the shape and the timing of llama-server, no model.

Used where ``xllamacpp`` has no wheel. It answers ``/health``, ``/props``, ``/slots``,
``/metrics``, ``/v1/models`` and ``/v1/chat/completions``, and says that it is simulated in
``build_info``, in ``system_fingerprint`` and in the first word of every answer.

What it copies from the real one: each request takes a slot for its whole life and waits for
one without a word, not even headers; reading the prompt takes time before the first token;
``timings`` stand on the last event; a closed stream frees its slot.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, cast

import msgspec
from twisted.internet.interfaces import IReactorTime
from twisted.web.http import Request as HttpRequest
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from llmgw.demo.processes import end_with_parent
from llmgw.demo.tiny_gguf import PROSE

WORDS = PROSE.split()
ANSWER_TOKENS = 48
"""Length of an answer whose request sets no limit."""
CHARACTERS_PER_TOKEN = 4


class Model(msgspec.Struct, frozen=True):
    """What is pretended.

    :param prefill_rate: tokens of prompt read per second.
    :param decode_rate: tokens written per second, in each stream.
    """

    alias: str = "llmgw-tiny"
    slots: int = 2
    context_length: int = 2048
    prefill_rate: float = 1000.0
    decode_rate: float = 100.0


class Slots:
    """The slots, and who waits for one."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.busy = 0
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def deferred(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def take(self, start: Callable[[], None]) -> None:
        """Call ``start`` with a slot taken, now or when one comes free."""
        if self.busy < self.total:
            self.busy += 1
            start()
        else:
            self._waiting.append(start)

    def forget(self, start: Callable[[], None]) -> None:
        """``start`` does not wait any more."""
        if start in self._waiting:
            self._waiting.remove(start)

    def free(self) -> None:
        """Give a slot back."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self.busy -= 1


class Document(Resource):
    """A JSON document made anew for each GET."""

    isLeaf = True

    def __init__(self, make: Callable[[], object]) -> None:
        super().__init__()
        self._make = make

    def render_GET(self, request: Request) -> bytes:
        """The document; text if it is text."""
        content = self._make()
        if isinstance(content, str):
            request.setHeader("content-type", "text/plain; version=0.0.4")
            return content.encode()
        request.setHeader("content-type", "application/json; charset=utf-8")
        return msgspec.json.encode(content)


class Chat(Resource):
    """``POST /v1/chat/completions``."""

    isLeaf = True

    def __init__(self, model: Model, slots: Slots, reactor: IReactorTime) -> None:
        super().__init__()
        self._model = model
        self._slots = slots
        self._reactor = reactor
        self._numbers = count(1)

    def render_POST(self, request: Request) -> bytes | int:
        """Answer in the form that the body asks for."""
        try:
            raw = request.content.read() if request.content else b""
            body = msgspec.json.decode(raw, type=dict[str, Any])
            messages = [str(message.get("content") or "") for message in body["messages"]]
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            return _refuse(request, f"cannot read the request: {error}", "invalid_request_error")
        prompt_tokens = 4 * len(messages) + sum(map(len, messages)) // CHARACTERS_PER_TOKEN
        if prompt_tokens >= self._model.context_length:
            return _refuse(
                request,
                f"request ({prompt_tokens} tokens) exceeds the available context size "
                f"({self._model.context_length} tokens)",
                "exceed_context_size_error",
                n_prompt_tokens=prompt_tokens,
                n_ctx=self._model.context_length,
            )
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        answer_tokens = limit if isinstance(limit, int) and limit > 0 else ANSWER_TOKENS
        answer_tokens = min(answer_tokens, self._model.context_length - prompt_tokens)
        Answer(
            next(self._numbers),
            request,
            body,
            prompt_tokens,
            answer_tokens,
            self._model,
            self._slots,
            self._reactor,
        ).begin()
        return NOT_DONE_YET


def _refuse(request: HttpRequest, message: str, kind: str, **more: object) -> bytes:
    request.setResponseCode(400)
    request.setHeader(b"content-type", b"application/json; charset=utf-8")
    return msgspec.json.encode({"error": {"code": 400, "message": message, "type": kind, **more}})


class Answer:
    """One answer on its way, from the wait for a slot to the last byte."""

    def __init__(
        self,
        number: int,
        request: Request,
        body: Mapping[str, Any],
        prompt_tokens: int,
        answer_tokens: int,
        model: Model,
        slots: Slots,
        reactor: IReactorTime,
    ) -> None:
        self._request = request
        self._body = body
        self._prompt_tokens = prompt_tokens
        self._answer_tokens = answer_tokens
        self._model = model
        self._slots = slots
        self._reactor = reactor
        self._streaming = body.get("stream") is True
        self._written = 0
        self._timer: Any = None
        self._common = {
            "id": f"chatcmpl-simulated-{number}",
            "created": int(reactor.seconds()),
            "model": model.alias,
            "system_fingerprint": "llmgw-simulated",
        }

    def begin(self) -> None:
        """Wait for a slot."""
        self._request.notifyFinish().addErrback(lambda _: self._client_gone())
        self._slots.take(self._read_prompt)

    def _client_gone(self) -> None:
        if self._timer is None:
            self._slots.forget(self._read_prompt)
            return
        if self._timer.active():
            self._timer.cancel()
        self._slots.free()

    def _read_prompt(self) -> None:
        if self._streaming:
            self._request.setHeader("content-type", "text/event-stream")
            if self._body.get("return_progress"):
                self._progress(0)
        delay_s = self._prompt_tokens / self._model.prefill_rate
        self._timer = self._reactor.callLater(delay_s, self._next_token)

    def _progress(self, processed: int) -> None:
        total = self._prompt_tokens
        progress = {"total": total, "cache": 0, "processed": processed, "time_ms": 0}
        self._event([_delta({"role": "assistant", "content": None})], prompt_progress=progress)

    def _next_token(self) -> None:
        if self._written == self._answer_tokens:
            self._finish()
            return
        if self._streaming:
            if self._written == 0:
                self._event([_delta({"role": "assistant", "content": None})])
            self._event([_delta({"content": _word(self._written)})])
        self._written += 1
        self._timer = self._reactor.callLater(1 / self._model.decode_rate, self._next_token)

    def _finish(self) -> None:
        prompt_ms = 1000 * self._prompt_tokens / self._model.prefill_rate
        predicted_ms = 1000 * self._written / self._model.decode_rate
        timings = {
            "cache_n": 0,
            "prompt_n": self._prompt_tokens,
            "prompt_ms": prompt_ms,
            "prompt_per_second": self._model.prefill_rate,
            "predicted_n": self._written,
            "predicted_ms": predicted_ms,
            "predicted_per_second": self._model.decode_rate,
        }
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._written,
            "total_tokens": self._prompt_tokens + self._written,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if self._streaming:
            wants_usage = bool((self._body.get("stream_options") or {}).get("include_usage"))
            last = [_delta({}, "length")]
            if wants_usage:
                self._event(last)
                self._event([], usage=usage, timings=timings)
            else:
                self._event(last, timings=timings)
            self._request.write(b"data: [DONE]\n\n")
        else:
            text = "".join(map(_word, range(self._written)))
            choice = {
                "index": 0,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": text},
            }
            self._request.setHeader("content-type", "application/json; charset=utf-8")
            self._request.write(
                msgspec.json.encode(
                    {
                        **self._common,
                        "object": "chat.completion",
                        "choices": [choice],
                        "usage": usage,
                        "timings": timings,
                    }
                )
            )
        self._request.finish()
        self._slots.free()

    def _event(self, choices: Sequence[object], **more: object) -> None:
        content = {**self._common, "object": "chat.completion.chunk", "choices": choices, **more}
        self._request.write(b"data: " + msgspec.json.encode(content) + b"\n\n")


def _delta(delta: Mapping[str, object], finish_reason: str | None = None) -> object:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _word(at: int) -> str:
    return "Simulated:" if at == 0 else " " + WORDS[(at - 1) % len(WORDS)]


class SimulatedSite(Site):
    """The whole server.

    :param reactor: keeps the time.
    """

    def __init__(self, model: Model, reactor: IReactorTime) -> None:
        self.slots = Slots(model.slots)
        v1 = Resource()
        card = {
            "id": model.alias,
            "object": "model",
            "owned_by": "llmgw",
            "meta": {"n_ctx": model.context_length},
        }
        v1.putChild(b"models", Document(lambda: {"object": "list", "data": [card]}))
        chat = Resource()
        chat.putChild(b"completions", Chat(model, self.slots, reactor))
        v1.putChild(b"chat", chat)
        root = Resource()
        root.putChild(b"v1", v1)
        root.putChild(b"health", Document(lambda: {"status": "ok"}))
        root.putChild(
            b"props",
            Document(
                lambda: {
                    "total_slots": model.slots,
                    "model_alias": model.alias,
                    "model_path": "",
                    "default_generation_settings": {"n_ctx": model.context_length},
                    "build_info": "llmgw-simulated",
                }
            ),
        )
        root.putChild(
            b"slots",
            Document(
                lambda: [
                    {
                        "id": at,
                        "n_ctx": model.context_length,
                        "speculative": False,
                        "is_processing": at < self.slots.busy,
                    }
                    for at in range(model.slots)
                ]
            ),
        )
        root.putChild(
            b"metrics",
            Document(
                lambda: (
                    "# TYPE llamacpp:requests_processing gauge\n"
                    f"llamacpp:requests_processing {self.slots.busy}\n"
                    "# TYPE llamacpp:requests_deferred gauge\n"
                    f"llamacpp:requests_deferred {self.slots.deferred}\n"
                )
            ),
        )
        super().__init__(root, timeout=5)
        self.displayTracebacks = False


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m llmgw.demo.simulated [--port 0] [--parallel N] [--prefill RATE] [--decode RATE]``"""
    parent = os.getppid()
    parser = argparse.ArgumentParser(
        prog="python -m llmgw.demo.simulated", description="Pretend to be a llama-server."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--alias", default=Model.alias)
    parser.add_argument("--parallel", type=int, default=Model.slots, help="slots")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens, shared evenly by the slots")
    parser.add_argument("--prefill", type=float, default=1000.0, help="tokens of prompt read per second")
    parser.add_argument("--decode", type=float, default=100.0, help="tokens written per second and stream")
    options = parser.parse_args(arguments)
    if options.parallel < 1 or options.prefill <= 0 or options.decode <= 0:
        parser.error("--parallel, --prefill and --decode must be above 0")
    end_with_parent(parent)
    from twisted.internet import reactor as installed

    reactor = cast(Any, installed)
    model = Model(
        options.alias, options.parallel, options.ctx // options.parallel, options.prefill, options.decode
    )
    site = SimulatedSite(model, reactor)
    address = reactor.listenTCP(options.port, site, interface=options.host).getHost()
    print(f"listening http://{address.host}:{address.port}", flush=True)
    reactor.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
