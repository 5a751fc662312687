"""What the gateway learns from an answer's bytes while it passes them on.

A :class:`Meter` watches one attempt's response body: when the first content
arrived, how many tokens it took by the backend's word, how fast it went, and
whether it came to a proper end. It changes nothing and never raises, whatever
the bytes are.

Known weaknesses:

1. Once content has been seen, every event that carries neither an end nor
   usage, timings or an error counts as content; a role-only chunk of a second
   choice is counted too.
2. One event may carry several tokens (llama-server holds text back while it
   might be a stop string), so ``content_events`` is a lower bound on tokens.
3. With several choices, the first one's end makes the stream ``finished``.
"""

from __future__ import annotations

from collections.abc import Callable

from llmgw.core.payload import Said, Timings, Tokens, plain_test, read, read_body, read_fragment
from llmgw.core.sse import EVENT_LIMIT, EventSplitter
from llmgw.values import Usage

_BODY_LIMIT = 1 << 20
_EDGE = 1 << 16
"""Bytes kept of each end of a body over the limit: llama-server writes the
usage of embeddings before the vectors, others write it last."""

_KINDS = {
    b"text/event-stream": "sse",
    b"application/x-ndjson": "ndjson",
    b"application/ndjson": "ndjson",
    b"application/jsonl": "ndjson",
    b"application/json": "json",
}


class Meter:
    """Watches one answer. ``begin`` once, ``feed`` per read, ``end`` if it ended cleanly.

    All times are monotonic seconds as given by the caller.

    :param dialect: ``chat``, ``completion``, ``native``, ``responses``,
        ``messages``, ``embedding`` or ``other``; a wrong one costs speed only.
    :param prompts: how many prompts the request held (``/v1/completions`` and
        ``/completion`` take a list), for adding up what each choice tells.
    """

    __slots__ = (
        "_alone",
        "_body",
        "_dialect",
        "_ends",
        "_head",
        "_lines",
        "_opening",
        "_plain",
        "_prefix",
        "_prompts",
        "_splitter",
        "_timed",
        "_timings",
        "_told",
        "content_events",
        "done_marker",
        "error",
        "events",
        "finished",
        "first_byte_s",
        "first_content_s",
        "head_s",
        "kind",
        "last_content_s",
        "last_s",
        "status",
    )

    def __init__(self, dialect: str, *, prompts: int = 1) -> None:
        self._dialect = dialect
        self._prompts = prompts
        self.kind = "other"
        """``sse``, ``ndjson``, ``json`` or ``other``, by the content type."""
        self.status = 0
        self.head_s: float | None = None
        self.first_byte_s: float | None = None
        self.first_content_s: float | None = None
        """Arrival of the first event that carries content; of the first body
        byte where the answer is no stream."""
        self.last_content_s: float | None = None
        self.last_s: float | None = None
        self.events = 0
        """Events with data, ``[DONE]`` included, or NDJSON lines."""
        self.content_events = 0
        self.finished = False
        """The answer said that it is complete: a finish reason, ``[DONE]``,
        ``message_stop``, ``response.completed``, ``stop`` or ``done``; for
        other bodies, it ended cleanly."""
        self.done_marker = False
        """``[DONE]`` was seen."""
        self.error: str | None = None
        """Short message of an error event or error body."""
        self._splitter = EventSplitter()
        self._lines = _Lines()
        self._plain: Callable[[bytes], bool] | None = None
        self._prefix = b"event: " if dialect in ("messages", "responses") else b"data: {"
        self._body = bytearray()
        self._head = b""
        self._opening = Tokens()
        self._told: Tokens | None = None
        self._alone = 0
        self._ends: dict[int, Tokens] = {}
        self._timed: Tokens | None = None
        self._timings: Timings | None = None

    # -- bytes in ---------------------------------------------------------

    def begin(self, status: int, content_type: bytes | None, now_s: float) -> None:
        """The response head arrived."""
        self.status = status
        self.head_s = now_s
        media_type = (content_type or b"").partition(b";")[0].strip().lower()
        self.kind = _KINDS.get(media_type, "json" if media_type.endswith(b"+json") else "other")

    def feed(self, data: bytes, now_s: float) -> None:
        """One read's bytes of the body, de-chunked; they may be cut anywhere."""
        self.last_s = now_s
        # The usual read of a running stream is one whole event that adds a
        # piece and says nothing else. JSON refuses a second event after it.
        if (
            self._plain is not None
            and data.startswith(self._prefix)
            and data.endswith(b"\n\n")
            and self._splitter.idle
            and self._plain(data[data.find(b"{") : -2])
        ):
            self.events += 1
            self.content_events += 1
            self.last_content_s = now_s
            return
        if not data:
            return
        if self.first_byte_s is None:
            self.first_byte_s = now_s
        if self.kind == "sse":
            for _, payload in self._splitter.feed(data):
                self._event(payload, now_s)
        elif self.kind == "ndjson":
            for line in self._lines.feed(data):
                self._event(line, now_s)
        else:
            if self.first_content_s is None:
                self.first_content_s = now_s
            self.last_content_s = now_s
            if self.kind == "json":
                self._keep(data)

    def end(self, now_s: float) -> None:
        """The body ended cleanly. A body that was cut must not come here."""
        self.last_s = now_s
        if self.kind == "sse":
            for _, payload in self._splitter.flush():
                self._event(payload, now_s)
        elif self.kind == "ndjson":
            for line in self._lines.flush():
                self._event(line, now_s)
        else:
            self.finished = True
            if self.kind == "json":
                self._read_kept()

    # -- what was learnt --------------------------------------------------

    @property
    def incomplete(self) -> bool:
        """A stream that has not said that it is complete; ask when it is over.

        An event too long to be looked at may have said it: no verdict then.
        """
        return self.kind in ("sse", "ndjson") and not (
            self.finished or self._splitter.oversize or self._lines.oversize
        )

    @property
    def closed(self) -> bool:
        """The stream has said its last event: nothing can follow but its end.

        A finish reason is not the last word of the OpenAI dialects, since usage
        and ``[DONE]`` follow.
        """
        return self.done_marker or (self.finished and self._dialect not in ("chat", "completion"))

    @property
    def cut_in_event(self) -> bool:
        """The bytes so far stop inside an event: a line of ours needs a blank line first."""
        return self._splitter.in_event or self._lines.in_line

    @property
    def at_line_start(self) -> bool:
        """The bytes so far stop at the start of a line."""
        return self._splitter.at_line_start and not self._lines.in_line

    @property
    def usage(self) -> Usage | None:
        """Tokens by the backend's word, once it has told.

        Running figures (``timings_per_token``) count as told.
        """
        told = self._told or self._timed
        if told is None:
            return None
        opening = self._opening
        prompt = opening.prompt if told.prompt is None else told.prompt
        cached = opening.cached if told.cached is None else told.cached
        if cached is None and self._timed is not None:
            cached = self._timed.cached
        return Usage(prompt or 0, cached or 0, told.output or 0)

    def estimated_usage(self, prompt_estimate: int) -> Usage:
        """The best figure there is: told, or the prompt's estimate and the events counted.

        :param prompt_estimate: tokens, used when the backend never told.
        """
        usage = self.usage
        if usage is not None and (self.finished or usage.output_tokens >= self.content_events):
            return usage
        if usage is not None:
            return Usage(usage.prompt_tokens, usage.cached_tokens, self.content_events)
        opening = self._opening
        prompt = prompt_estimate if opening.prompt is None else opening.prompt
        return Usage(prompt, opening.cached or 0, self.content_events)

    @property
    def timings_seen(self) -> bool:
        """The backend told its own timings."""
        return self._timings is not None

    @property
    def prompt_s(self) -> float | None:
        """Seconds the backend spent reading the uncached part of the prompt."""
        return self._timings.prompt_s if self._timings is not None else None

    @property
    def token_rate(self) -> float | None:
        """Output tokens per second: the backend's figure, else content events over time."""
        if self._timings is not None and self._timings.token_rate is not None:
            return self._timings.token_rate
        if self.content_events < 2 or self.first_content_s is None or self.last_content_s is None:
            return None
        span_s = self.last_content_s - self.first_content_s
        return (self.content_events - 1) / span_s if span_s > 0 else None

    # -- inside -----------------------------------------------------------

    def _event(self, payload: bytes, now_s: float) -> None:
        self.events += 1
        if self._plain is not None and self._plain(payload):
            self.content_events += 1
            self.last_content_s = now_s
            return
        if payload == b"[DONE]":
            self.done_marker = self.finished = True
            return
        said = read(payload)
        if said is None:
            return
        if said.content:
            self.content_events += 1
            self.last_content_s = now_s
            if self.first_content_s is None:
                self.first_content_s = now_s
                if self.kind == "sse":
                    self._plain = plain_test(self._dialect)
        self.finished = self.finished or said.finished
        self._learn(said)

    def _learn(self, said: Said) -> None:
        self.error = self.error or said.error
        self._opening = said.opening or self._opening
        self._timings = said.timings or self._timings
        self._timed = said.timed or self._timed
        if said.told is not None:
            self._told = self._add(said.told, said)

    def _add(self, told: Tokens, said: Said) -> Tokens:
        """llama-server tells each choice's tokens by itself; others tell the sum, last.

        Choices of one prompt share its tokens; each of several prompts has its own.
        """
        if said.alone:
            self._alone += 1
            if self._alone == 1:
                self._ends.clear()
        elif said.choice is None:
            return told
        key = said.choice if said.choice is not None else -self._alone
        self._ends[key] = told
        ends = self._ends.values()
        share = self._prompts / len(ends) if len(ends) > 1 else 1
        return Tokens(
            prompt=None if told.prompt is None else round(sum(end.prompt or 0 for end in ends) * share),
            cached=None if told.cached is None else round(sum(end.cached or 0 for end in ends) * share),
            output=sum(end.output or 0 for end in ends),
        )

    def _keep(self, data: bytes) -> None:
        body = self._body
        body += data
        if self._head:
            del body[:-_EDGE]
        elif len(body) > _BODY_LIMIT:
            self._head = bytes(body[:_EDGE])
            del body[:-_EDGE]

    def _read_kept(self) -> None:
        body = bytes(self._body)
        if self._head:
            said = [read_fragment(part) for part in (self._head, body)]
        else:
            said = read_body(body)
        for one in said:
            self._learn(one)
        self._body.clear()


class _Lines:
    """NDJSON: one object a line, as Ollama streams."""

    __slots__ = ("_dropping", "_pending", "oversize")

    def __init__(self) -> None:
        self._pending = b""
        self._dropping = False
        self.oversize = 0

    @property
    def in_line(self) -> bool:
        return bool(self._pending) or self._dropping

    def feed(self, data: bytes) -> list[bytes]:
        *lines, rest = data.split(b"\n")
        if not lines:
            rest = b"" if self._dropping else self._pending + rest
        elif self._dropping:
            self._dropping = False
            del lines[0]
        else:
            lines[0] = self._pending + lines[0]
        if len(rest) > EVENT_LIMIT:
            self.oversize += 1
            self._dropping = True
            rest = b""
        self._pending = rest
        self.oversize += sum(len(line) > EVENT_LIMIT for line in lines)
        return [line for line in lines if len(line) <= EVENT_LIMIT and line.strip()]

    def flush(self) -> list[bytes]:
        pending, self._pending = self._pending, b""
        return [pending] if pending.strip() else []
