"""Values that cross the borders between rooms.

They are ``msgspec.Struct``: as readable as dataclasses, and made five times
faster, which counts where one is made per request. Frozen ones never change
after they were made; :class:`Profile` is live and is written by
``core.profile`` alone. :class:`Secret` is a plain class, as no struct can keep
its field from being encoded.

Units stand in the names: ``_s`` seconds, ``_at_s`` or ``now_s`` monotonic
seconds (never wall time), ``_tokens`` tokens, rates are tokens per second.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct, field


class Secret:
    """Text that must not be seen: it shows itself as ``***`` wherever it is printed.

    ``reveal()`` is the only way in, so that ``grep reveal`` finds every place
    where a secret is used. Structs may hold one: ``msgspec.structs.replace``
    hands the same object on; copying, pickling and encoding raise ``TypeError``.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself; for where it belongs and nowhere else."""
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        # Bytes, as compare_digest takes no text beyond ASCII; lone surrogates are no reason to fail.
        mine, theirs = (each._text.encode("utf-8", "surrogatepass") for each in (self, other))
        return hmac.compare_digest(mine, theirs)

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not to be pickled or copied")


class Request(Struct, frozen=True):
    """What a router may know about one request.

    :param id: the request id, unique per attempt chain, as logged.
    :param model: the name the backends know it by (aliases are resolved).
    :param prompt_tokens: an estimate before the answer, never exact.
    :param max_tokens: the caller's limit on output, ``None`` if it set none.
    :param prefix: hashes of the prompt's blocks, first block first.
    :param session: a caller-given conversation id.
    :param key: id of the caller's key, never the key.
    :param streaming: the caller asked for server-sent events.
    """

    id: str
    model: str
    prompt_tokens: int = 0
    max_tokens: int | None = None
    prefix: Sequence[int] = ()
    session: str | None = None
    key: str | None = None
    streaming: bool = False


class Profile(Struct):
    """One backend's live picture. Routers read it and never write it.

    ``None`` means "not known", never zero.

    :param in_flight: requests of this gateway that hold a lease now.
    :param ttft_s: mean time to first token over the window (the last 50).
    :param ttft_samples: how many samples stand behind ``ttft_s``.
    :param token_rate: output tokens per second of one stream.
    :param prefill_rate: prompt tokens per second while reading a prompt.
    :param failure_streak: failures since the last success.
    :param busy_slots: slots at work by the backend's own word.
    :param deferred: requests queued inside the backend by its own word.
    :param kv_use: share of KV cache in use, 0 to 1.
    :param gpu_use: share of GPU in use, 0 to 1.
    :param peers_in_flight: requests that other gateways have there.
    :param available: may be chosen now (breaker, health, drain).
    :param warmth: 0 to 1; below 1 while in slow start.
    :param updated_s: monotonic time of the last change.
    """

    in_flight: int = 0
    ttft_s: float | None = None
    ttft_samples: int = 0
    token_rate: float | None = None
    prefill_rate: float | None = None
    failure_streak: int = 0
    busy_slots: int | None = None
    deferred: int | None = None
    kv_use: float | None = None
    gpu_use: float | None = None
    peers_in_flight: int = 0
    available: bool = True
    warmth: float = 1.0
    updated_s: float = 0.0


class Backend(Struct, frozen=True):
    """One backend as routers see it.

    :param weight: static compute weight, the article's K.
    :param slots: parallel sequences it really has, if it told.
    :param max_connections: cap on this gateway's requests in flight there.
    :param context_length: tokens of context per slot, if known.
    :param profile: the live picture; the same object for the backend's life.
    """

    id: str
    weight: float = 1.0
    slots: int | None = None
    max_connections: int = 64
    context_length: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)


class Choice(Struct, frozen=True):
    """A router's answer with its reasons.

    :param slot: the server's slot to ask for (``id_slot``), if any.
    :param score: the figure the router compared, higher or lower is its own affair.
    :param why: one short phrase for the access log and ``explain``.
    """

    backend: Backend
    slot: int | None = None
    score: float = 0.0
    why: str = ""


class Started(Struct, frozen=True):
    """An attempt was sent to a backend."""

    request_id: str
    backend_id: str
    at_s: float


class FirstToken(Struct, frozen=True):
    """The first content-bearing event of an attempt arrived at the socket."""

    request_id: str
    backend_id: str
    at_s: float
    ttft_s: float


class Finished(Struct, frozen=True):
    """An attempt is over, one way or the other; exactly one per ``Started``.

    :param ok: the backend did its part. A client that left is ``ok=True``
        with ``reason="client_gone"``: no verdict about the backend.
    :param reason: ``done``, ``client_gone``, ``connect``, ``timeout``, ``reset``,
        ``cut``, ``status_500`` and so on, ``framing``, ``busy``, ``loading``.
    :param prompt_tokens: by the backend's word, cached ones included.
    :param cached_tokens: of these, read from the backend's prompt cache.
    :param prompt_s: time the backend spent reading the uncached part.
    """

    request_id: str
    backend_id: str
    at_s: float
    ok: bool
    reason: str
    duration_s: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    prompt_s: float | None = None


class HealthReport(Struct, frozen=True):
    """What a health source saw at one look; ``None`` means "did not tell".

    :param alive: it answered, if only to say that it is busy or loading.
    :param loading: it answers, and says that its model is not ready yet.
    :param refused: nobody listens there (connection refused, no route, bad TLS);
        the one kind of death that needs no second opinion.
    :param models: names it serves now.
    :param slots: parallel sequences.
    :param busy_slots: of these, at work.
    :param deferred: requests queued inside it.
    :param context_length: tokens per slot.
    :param kind: ``"llama-server"`` or ``"ollama"`` when it is certain to be one, else ``None``.
    :param detail: one short phrase for people.
    :param role: ``"router"`` for a llama-server that loads models by name (router mode).
    """

    alive: bool
    loading: bool = False
    refused: bool = False
    models: tuple[str, ...] | None = None
    slots: int | None = None
    busy_slots: int | None = None
    deferred: int | None = None
    kv_use: float | None = None
    gpu_use: float | None = None
    context_length: int | None = None
    kind: str | None = None
    detail: str = ""
    role: str | None = None


class HealthChanged(Struct, frozen=True):
    """A health source reported."""

    backend_id: str
    at_s: float
    report: HealthReport


Event = Started | FirstToken | Finished | HealthChanged


class Usage(Struct, frozen=True):
    """Tokens that one request really used."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def total(self) -> int:
        """Tokens that limits count."""
        return self.prompt_tokens + self.output_tokens


class Policy(Struct, frozen=True):
    """One limit. A ``None`` dimension is not limited.

    :param name: unique among the configured policies; logged and told.
    :param scope: ``"key"`` (each key by itself) or ``"global"`` (all together).
    :param burst_s: how many seconds of rate the bucket holds.
    :param enforce: ``False`` only counts what it would have refused.
    :param on_redis_loss: ``"local"``, ``"open"`` or ``"closed"`` while the store of a
        limiter that shares its counts is away; ``None``: as the limiter's own option says.
    """

    name: str
    scope: str = "key"
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None
    burst_s: float = 60.0
    enforce: bool = True
    on_redis_loss: str | None = None


class Cost(Struct, frozen=True):
    """What a request asks of the limiter before it runs."""

    requests: int = 1
    tokens: int = 0


class LimitState(Struct, frozen=True):
    """One dimension's state for the ``x-ratelimit-*`` headers."""

    limit: int
    remaining: int
    reset_s: float


class Decision(Struct, frozen=True):
    """A limiter's answer.

    :param allowed: all policies let it pass, or none was charged.
    :param reservation: opaque; given back to ``settle`` exactly once. ``None`` when refused.
    :param retry_after_s: seconds until it could pass, when refused.
    :param policy: name of the policy that refused.
    :param unit: ``"requests"``, ``"tokens"`` or ``"concurrent"``, what ran out.
    :param requests: the tightest request limit, for the headers.
    :param tokens: the tightest token limit, for the headers.
    """

    allowed: bool
    reservation: object | None = None
    retry_after_s: float = 0.0
    policy: str = ""
    unit: str = ""
    requests: LimitState | None = None
    tokens: LimitState | None = None


class Caps(Struct, frozen=True):
    """What requests of one key, or for one model, may ask. ``None``: nothing beyond ``[limits]``.

    :param max_prompt_tokens: by estimate, before the backend has counted.
    :param max_tokens: of output; requests that want more are cut down to it, the others refused.
    :param max_n: choices.
    :param max_stop: stop sequences.
    :param max_tools: tools and functions.
    :param max_logprobs: alternatives for each token; 0 allows no logprobs at all.
    :param grammar: ``False``: no grammar, regular expression or JSON schema.
    :param max_response_bytes: of an answer's body; a longer one is refused or broken off.
    """

    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_n: int | None = None
    max_stop: int | None = None
    max_tools: int | None = None
    max_logprobs: int | None = None
    grammar: bool | None = None
    max_response_bytes: int | None = None

    @classmethod
    def tightest(cls, caps: Iterable[Caps]) -> Caps | None:
        """One that keeps all of them; ``None`` when nothing is capped."""
        least: dict[str, Any] = {}
        for each in caps:
            for name in cls.__struct_fields__:
                value = getattr(each, name)
                if value is not None and (name not in least or value < least[name]):
                    least[name] = value
        return cls(**least) if least else None


class Submission(Struct, frozen=True):
    """What a request filter sees of a request: all that was sent, and what was understood of it.

    :param id: the request id, as logged.
    :param route: the path's template, such as ``/v1/chat/completions``.
    :param model: the name the caller used.
    :param target: the name that backends know it by.
    :param body: as it came; JSON of one object unless ``content_type`` says otherwise.
    :param content_type: ``application/json``, or ``multipart/form-data; boundary=…``.
    :param prompt_tokens: an estimate.
    :param max_tokens: the limit on output that will hold, ``None`` for none.
    """

    id: str
    route: str
    model: str
    target: str
    body: bytes
    content_type: str = "application/json"
    prompt_tokens: int = 0
    max_tokens: int | None = None
    streaming: bool = False


class Caller(Struct, frozen=True):
    """Who is calling, and what they may do.

    :param id: id of the key, safe to log; ``"anonymous"`` without keys.
    :param models: names (after aliases) and alias names it may use; ``None`` = all.
    :param policies: the key's own limits, beside the configured ones.
    :param show_backend: answers carry ``x-llmgw-backend``.
    :param show_decision: answers carry ``x-llmgw-decision``.
    :param interim: may be sent 102 Processing while it waits.
    :param loaded_only: never cause a model load.
    :param criticality: ``"sheddable"``, ``"standard"`` or ``"critical"``: who is
        refused first, and who last, when the gateway is overloaded.
    :param caps: what it may ask for.
    """

    id: str
    models: frozenset[str] | None = None
    policies: tuple[Policy, ...] = ()
    show_backend: bool = False
    show_decision: bool = False
    interim: bool = False
    loaded_only: bool = False
    criticality: str = "standard"
    caps: Caps | None = None
