"""What the gateway learns from the bytes of a response while it forwards them.

A :class:`Meter` watches one attempt's response body: when the first content arrived, how
many tokens were used according to the backend, how fast they came, and whether the response
was complete. It changes nothing and never raises, whatever the bytes are.

Known weaknesses:

1. After the first content, every event without an end, usage, timings or an error counts as
   content; so does a role-only chunk of a second choice.
2. One event may carry several tokens (llama-server holds back text that might be a stop
   string), so ``content_events`` is a lower bound of the tokens.
3. With several choices, the end of the first one makes the stream ``finished``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from llmgw.core.ndjson import LineSplitter
from llmgw.core.payload import UNREADABLE, Said, Timings, Tokens, read, read_body, read_fragment
from llmgw.core.sse import EventSplitter
from llmgw.core.usual import plain_test, read_chunk, read_completion
from llmgw.values import Usage

_BODY_LIMIT = 1 << 20
_EDGE = 1 << 16
"""Bytes kept of the beginning and of the end of a body over the limit: llama-server writes
the usage of embeddings before the vectors, others write it last."""

_KINDS = {
    b"text/event-stream": "sse",
    b"application/x-ndjson": "ndjson",
    b"application/ndjson": "ndjson",
    b"application/jsonl": "ndjson",
    b"application/json": "json",
}


_OPENAI = frozenset(("chat", "completion"))
"""Dialects with ``choices``, in which usage and ``[DONE]`` follow a finish reason."""
_NAMED = frozenset(("messages", "responses"))
"""Dialects whose events have names."""


@lru_cache(maxsize=64)
def _kind(content_type: bytes | None) -> str:
    media_type = (content_type or b"").partition(b";")[0].strip().lower()
    return _KINDS.get(media_type, "json" if media_type.endswith(b"+json") else "other")


class Meter:
    """Watches one response: ``begin`` once, ``feed`` per read, ``end`` if it ended cleanly.

    All times are monotonic seconds, given by the caller. To save memory, fields that most
    responses do not set are class attributes until they are set.

    :param dialect: ``chat``, ``completion``, ``native``, ``responses``,
        ``messages``, ``embedding`` or ``other``; a wrong one costs speed only.
    :param prompts: the number of prompts in the request (``/v1/completions`` and
        ``/completion`` take a list), for adding up the usage of single choices.
    :param n: the number of choices requested for each prompt.
    """

    kind = "other"
    """``sse``, ``ndjson``, ``json`` or ``other``, from the content type."""
    status = 0
    head_s: float | None = None
    first_byte_s: float | None = None
    first_content_s: float | None = None
    """Arrival of the first event with content; of the first body byte if the response is
    not a stream."""
    last_content_s: float | None = None
    last_s: float | None = None
    events = 0
    """Events with data, ``[DONE]`` included, or NDJSON lines."""
    content_events = 0
    finished = False
    """The stream has declared itself complete: a finish reason, ``[DONE]``, ``message_stop``,
    ``response.completed``, ``stop`` or ``done``. Other bodies: it ended cleanly."""
    closed = False
    """The stream's last event has come: only the end of the body can follow. In the OpenAI
    dialects a finish reason is not the last event, since usage and ``[DONE]`` follow."""
    done_marker = False
    """``[DONE]`` was seen."""
    error: str | None = None
    """A short message from an error event or error body."""
    prompt_s: float | None = None
    """Seconds that the backend spent on the uncached part of the prompt."""
    """The backend has reported its own timings."""

    _reader: EventSplitter | LineSplitter | None = None  # for streams
    _plain: Callable[[bytes], object] | None = None
    _ready: Callable[[bytes], object] | None = None  # ``_plain`` while between two events
    _prefix = b"data: {"  # the first seven bytes of a plain event,
    _start = 6  # and the offset of its data; 0: to be searched for
    _body: bytes | bytearray = b""
    _head = b""
    _opening: Tokens | None = None
    _told: Tokens | None = None
    _timed: Tokens | None = None
    _rate: float | None = None
    _alone = 0
    _ends: dict[int, Tokens] | None = None
    _timed_ends: dict[int, Tokens] | None = None
    _prompts = 1
    _n = 1

    def __init__(self, dialect: str, *, prompts: int = 1, n: int = 1) -> None:
        self._dialect = dialect
        if prompts != 1 or n != 1:
            self._prompts, self._n = prompts, n

    # -- bytes in ---------------------------------------------------------

    def begin(self, status: int, content_type: bytes | None, now_s: float) -> None:
        """The response head has arrived."""
        self.status = status
        self.head_s = now_s
        self.kind = kind = _kind(content_type)
        if kind == "sse":
            self._reader = EventSplitter()
        elif kind == "ndjson":
            self._reader = LineSplitter()

    def feed(self, data: bytes, now_s: float) -> None:
        """Take the body bytes of one read, without their framing; they may be cut anywhere."""
        if self._ready is not None and self.takes_plain(data, 0, len(data), now_s):
            return
        self.last_s = now_s
        if not data:
            return
        if self.first_byte_s is None:
            self.first_byte_s = now_s
        reader = self._reader
        if reader is not None:
            for _, payload in reader.feed(data):
                self._event(payload, now_s)
            self._ready = self._plain if reader.idle else None
            return
        if self.first_content_s is None:
            self.first_content_s = now_s
        self.last_content_s = now_s
        if self.kind == "json":
            self._keep(data)

    def takes_plain(self, data: bytes, start: int, stop: int, now_s: float) -> bool:
        """Take the bytes of one read, ``data[start:stop]``, if they are what most reads of a
        running stream are: one whole event that adds a piece of content and nothing else.

        :return: whether they were taken; if not, the caller hands them to :meth:`feed`.
        """
        plain = self._ready
        # With a second event behind the first the data would not parse as JSON. Slices are
        # quicker here than startswith() and endswith().
        if plain is None or data[start : start + 7] != self._prefix or data[stop - 2 : stop] != b"\n\n":
            return False
        try:
            if not plain(data[start + self._start if self._start else data.find(b"{", start) : stop - 2]):
                return False
        except UNREADABLE:
            return False
        self.events += 1
        self.content_events += 1
        self.last_s = self.last_content_s = now_s
        return True

    def end(self, now_s: float) -> None:
        """The body ended cleanly. Not to be called for one that was cut off."""
        self.last_s = now_s
        if self._reader is not None:
            for _, payload in self._reader.flush():
                self._event(payload, now_s)
            return
        self._finish()
        if self.kind == "json":
            self._read_kept()

    # -- what was found ---------------------------------------------------

    @property
    def incomplete(self) -> bool:
        """A stream has ended without declaring itself complete; only meaningful at its end.

        ``False`` also after an event too long to be read, which may have declared it.
        """
        reader = self._reader
        return reader is not None and not (self.finished or reader.oversize)

    @property
    def cut_in_event(self) -> bool:
        """The bytes so far stop inside an event: an event of our own needs a blank line first."""
        return self._reader is not None and self._reader.in_event

    @property
    def at_line_start(self) -> bool:
        """The bytes so far stop at the start of a line."""
        return self._reader is None or self._reader.at_line_start

    @property
    def usage(self) -> Usage | None:
        """Tokens according to the backend; ``None`` until it reports some.

        Running figures (``timings_per_token``) count as well.
        """
        timed = self._timed
        told = self._told or timed
        if told is None:
            return None
        prompt, cached = told.prompt, told.cached
        opening = self._opening
        if opening is not None:
            prompt = opening.prompt if prompt is None else prompt
            cached = opening.cached if cached is None else cached
        if cached is None and timed is not None:
            cached = timed.cached
        return Usage(prompt or 0, cached or 0, told.output or 0)

    def estimated_usage(self, prompt_estimate: int) -> Usage:
        """The best figure there is: the reported usage, or the estimate of the prompt and the
        number of content events.

        :param prompt_estimate: tokens of the prompt, used if the backend reports none.
        """
        usage = self.usage
        if usage is not None and (self.finished or usage.output_tokens >= self.content_events):
            return usage
        if usage is not None:
            return Usage(usage.prompt_tokens, usage.cached_tokens, self.content_events)
        opening = self._opening
        if opening is None:
            if self.status >= 400:
                return Usage()  # refused: no prompt was read
            return Usage(prompt_estimate, 0, self.content_events)
        prompt = prompt_estimate if opening.prompt is None else opening.prompt
        return Usage(prompt, opening.cached or 0, self.content_events)

    @property
    def token_rate(self) -> float | None:
        """Output tokens per second: the backend's figure, or else content events over time."""
        if self._rate is not None:
            return self._rate
        if self.content_events < 2 or self.first_content_s is None or self.last_content_s is None:
            return None
        span_s = self.last_content_s - self.first_content_s
        return (self.content_events - 1) / span_s if span_s > 0 else None

    # -- inside -----------------------------------------------------------

    def _event(self, payload: bytes, now_s: float) -> None:
        self.events += 1
        plain = self._plain
        if plain is None:
            adds = read_chunk(payload) if self._dialect in _OPENAI else None
            if adds is not None:
                if adds:
                    self._content(now_s)
                return
        else:
            try:
                adds = bool(plain(payload))
            except UNREADABLE:
                adds = False
            if adds:
                self.content_events += 1
                self.last_content_s = now_s
                return
        if payload == b"[DONE]":
            self.done_marker = True
            self._finish()
            return
        said = read(payload)
        if said is None:
            return
        if said.content:
            self._content(now_s)
        if said.finished:
            self._finish()
        self._learn(said)

    def _content(self, now_s: float) -> None:
        self.content_events += 1
        self.last_content_s = now_s
        if self.first_content_s is None:
            self.first_content_s = now_s
            if self.kind == "sse":
                self._plain = plain_test(self._dialect)
                if self._dialect in _NAMED:
                    self._prefix, self._start = b"event: ", 0

    def _finish(self) -> None:
        self.finished = True
        self.closed = self.done_marker or self._dialect not in _OPENAI

    def _learn(self, said: Said) -> None:
        self.error = self.error or said.error
        self._opening = said.opening or self._opening
        if said.timings is not None:
            self._time(said.timings, said)
        if said.told is not None:
            self._told = self._add(said.told, said)

    def _time(self, timings: Timings, said: Said) -> None:
        self.prompt_s = timings.prompt_s
        self._rate = timings.token_rate
        timed = said.timed
        if timed is None:
            return
        if said.choice is None:
            self._timed = self._timed if self._timed_ends else timed
            return
        if self._timed_ends is None:
            self._timed_ends = {}
        self._timed_ends[said.choice] = timed
        self._timed = self._sum(self._timed_ends)

    def _add(self, told: Tokens, said: Said) -> Tokens:
        """The usage so far. llama-server reports it for each choice, others the sum at the end.

        Choices of one prompt share its tokens; each of several prompts has its own.
        """
        if said.alone:
            self._alone += 1
            if self._alone == 1:
                self._ends = None
        elif said.choice is None:
            return told
        if self._ends is None:
            self._ends = {}
        key = said.choice if said.choice is not None else -self._alone
        self._ends[key] = told
        return self._sum(self._ends)

    def _sum(self, ends: dict[int, Tokens]) -> Tokens:
        """The sum over choices that were reported one by one."""
        if len(ends) == 1:
            return next(iter(ends.values()))
        share = self._prompts / len(ends)
        prompts = [end.prompt for end in ends.values() if end.prompt is not None]
        cached = [end.cached for end in ends.values() if end.cached is not None]
        return Tokens(
            prompt=round(sum(prompts) * share) if prompts else None,
            cached=round(sum(cached) * share) if cached else None,
            output=sum(end.output or 0 for end in ends.values()),
        )

    def _multiply(self, said: Said) -> None:
        """In a response that is not streamed llama-server reports the tokens of the first choice
        only. The best guess is that the others are like it."""
        told = said.told
        if told is None or said.choice is not None or said.timings is None:
            return
        said.told = Tokens(
            prompt=None if told.prompt is None else told.prompt * self._prompts,
            cached=None if told.cached is None else told.cached * self._prompts,
            output=None if told.output is None else told.output * self._prompts * self._n,
        )

    def _keep(self, data: bytes) -> None:
        body = self._body
        if not body and len(data) <= _BODY_LIMIT:
            self._body = data  # usually all of it
            return
        if isinstance(body, bytes):
            self._body = body = bytearray(body)
        body += data
        if self._head:
            del body[:-_EDGE]
        elif len(body) > _BODY_LIMIT:
            self._head = bytes(body[:_EDGE])
            del body[:-_EDGE]

    def _read_kept(self) -> None:
        body = bytes(self._body)
        self._body = b""
        if self._head:
            said = [read_fragment(part) for part in (self._head, body)]
        else:
            usual = read_completion(body) if self._dialect in _OPENAI else None
            said = read_body(body) if usual is None else [usual]
        for one in said:
            self._multiply(one)
            self._learn(one)
