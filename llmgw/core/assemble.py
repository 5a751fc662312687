"""Assembles a stream into the JSON body that the server would have sent without streaming.

llama-server notices quickly that a client has left only while it streams, so the gateway asks
it for a stream even if its own client wants a single object. :class:`Assembler` makes that
object.

Checked against build b11549 of the real server, stream against non-stream, at temperature 0.
These differences are made up for here:

* ``/v1/chat/completions``: the first chunk has ``"content":null``; the object has ``""`` if
  nothing was written, even with tool calls. ``object`` is ``chat.completion``. Tool calls have
  no ``index``. With ``n`` > 1 each choice has its own usage and timings, while the object has
  those of the first choice.
* ``/v1/completions``: usage and timings are in the chunk with the finish reason; ``logprobs``
  is always present, ``null`` if it was not requested.
* ``/completion``: there is no ``[DONE]``; ``tokens`` is in every event, but in the object only
  if ``return_tokens`` was requested; the last event has all other fields, and
  ``response_fields`` selects from that one only; with several prompts, or ``n_cmpl``, the
  answer is a list.

Known weaknesses:

1. What a stream does not contain cannot be assembled: a call that needs such a thing is not
   sent as a stream (:mod:`llmgw.core.unstreamed`).
2. With ``response_fields`` and several prompts the last events have no ``index``: they are
   taken in the order of their prompts. Of the fields that have to be collected only
   ``content`` and ``tokens`` can be selected.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from llmgw.core.choices import Choice, fields_of, items_of, value_of
from llmgw.core.sse import EventSplitter

SIZE_LIMIT = 64 << 20
"""Bytes of stream for one answer."""

_OPENAI_FIELDS = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier"}
)
_OBJECTS = {"chat": b'"chat.completion"', "completion": b'"text_completion"'}

_any = msgspec.json.Decoder()


class Assembler:
    """Collects one streamed answer.

    Never raises. After the end of the stream check ``error``, then ``fault``, then ``complete``;
    only if all is well, ``result()`` is the answer.

    :param dialect: ``chat``, ``completion`` or ``native``.
    :param include_extras: keep top-level fields that are not in OpenAI's schema (``timings``,
        ``__verbose``, …); has no meaning for ``native``.
    :param return_tokens: the client requested ``return_tokens`` from ``/completion``.
    """

    def __init__(self, dialect: str, *, include_extras: bool = True, return_tokens: bool = False) -> None:
        self._native = dialect == "native"
        self._object = Raw(_OBJECTS.get(dialect, b"null"))
        self._include_extras = include_extras
        self._return_tokens = return_tokens
        self._splitter = EventSplitter(limit=SIZE_LIMIT)
        self._size = 0
        self._done = False
        self._top: dict[str, Raw] = {}
        self._choices: dict[int, Choice] = {}
        self._generations: dict[int, _Generation] = {}
        self._speaker = 0
        self.error: tuple[int, bytes] | None = None
        """Status and JSON body of an error within the stream."""
        self.fault: str | None = None
        """Why this stream cannot be assembled; short, for people."""

    @property
    def complete(self) -> bool:
        """The stream has declared its answer complete: ``[DONE]``, or an end of each choice."""
        if self.error is not None or self.fault is not None:
            return False
        if self._native:
            return bool(self._generations) and all(one.last for one in self._generations.values())
        return bool(self._choices) and (
            self._done or all(choice.finished for choice in self._choices.values())
        )

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream, without chunked framing, cut anywhere."""
        self._size += len(data)
        if self._size > SIZE_LIMIT:
            self._give_up(f"the answer is larger than {SIZE_LIMIT >> 20} MiB")
        for _, payload in [] if self._is_over() else self._splitter.feed(data):
            self._event(payload)

    def end(self) -> None:
        """The stream has ended cleanly: the blank line after its last event may be missing."""
        for _, payload in [] if self._is_over() else self._splitter.flush():
            self._event(payload)

    def result(self) -> bytes:
        """The JSON body."""
        if self._native:
            found = [one.result(self._return_tokens) for _, one in sorted(self._generations.items())]
            return msgspec.json.encode(found[0] if len(found) == 1 else found)
        body: dict[str, Any] = {
            "choices": [choice.result() for _, choice in sorted(self._choices.items())],
            **self._top,
            "object": self._object,
        }
        if not self._include_extras:
            body = {name: value for name, value in body.items() if name in _OPENAI_FIELDS}
        return msgspec.json.encode(body)

    def _is_over(self) -> bool:
        return self.error is not None or self.fault is not None

    def _give_up(self, why: str) -> None:
        self.fault = self.fault or why
        self._choices.clear()
        self._generations.clear()

    def _event(self, payload: bytes) -> None:
        if payload.strip() == b"[DONE]":
            self._done = True
            return
        try:
            _any.decode(payload)  # checks all of it: slices are trusted below
        except (ValueError, RecursionError):
            self._give_up("the backend sent an event that is not JSON")
            return
        fields = fields_of(Raw(payload))
        if value_of(fields.get("error")):
            self.error = _error(fields["error"])
        elif self._native:
            self._take_native(fields)
        else:
            self._take_chunk(fields)

    def _take_chunk(self, fields: dict[str, Raw]) -> None:
        fields.pop("prompt_progress", None)
        for raw in items_of(fields.pop("choices", None)):
            choice = fields_of(raw)
            if not choice:
                continue
            self._speaker = _index(choice.pop("index", None))
            known = self._choices.get(self._speaker)
            if known is None:
                known = self._choices[self._speaker] = Choice(self._speaker)
            known.add(choice)
        # The first choice stands for the whole; a chunk without choices belongs to the choice
        # before it.
        told = {name: raw for name, raw in fields.items() if bytes(raw) != b"null"}
        if self._speaker <= min(self._choices, default=self._speaker):
            self._top.update(told)
        else:
            self._top = {**told, **self._top}

    def _take_native(self, fields: dict[str, Raw]) -> None:
        if "index" in fields or not self._generations:
            index = _index(fields.get("index"))
        else:
            index = next((i for i, one in sorted(self._generations.items()) if not one.last), 0)
        generation = self._generations.setdefault(index, _Generation())
        if "prompt_progress" not in fields:
            generation.add(fields)


class _Generation:
    """One prompt's text of ``/completion``."""

    def __init__(self) -> None:
        self.last: dict[str, Raw] = {}
        self._content: list[str] = []
        self._tokens: list[Raw] = []
        self._probabilities: list[Raw] = []

    def add(self, fields: dict[str, Raw]) -> None:
        content = value_of(fields.get("content"))
        if isinstance(content, str):
            self._content.append(content)
        for name, kept in (("tokens", self._tokens), ("completion_probabilities", self._probabilities)):
            kept += items_of(fields.get(name))
        # Only the last event can lack "stop", if response_fields omits it.
        if value_of(fields.get("stop", Raw(b"true"))):
            self.last = fields

    def result(self, return_tokens: bool) -> dict[str, Any]:
        result: dict[str, Any] = dict(self.last)
        if "content" in result:
            result["content"] = "".join(self._content)
        if "tokens" in result and return_tokens:
            result["tokens"] = self._tokens
        if self._probabilities and "stop" in result:
            result["completion_probabilities"] = self._probabilities
        settings = result.get("generation_settings")
        if settings is not None:
            asked = value_of(settings)
            if isinstance(asked, dict) and "stream" in asked:
                result["generation_settings"] = {**fields_of(settings), "stream": False}
        return result


def _error(raw: Raw) -> tuple[int, bytes]:
    error = value_of(raw)
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return status, b'{"error":' + bytes(raw) + b"}"


def _index(raw: Raw | None) -> int:
    value = value_of(raw)
    return value if isinstance(value, int) else 0
