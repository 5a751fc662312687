"""Values that are passed between the packages of llmgw, and to plugins.

They are ``msgspec.Struct``: as readable as dataclasses, and created five times faster, which
matters for those made per request. Frozen ones never change; :class:`Profile` is live and is
written by ``core.profile`` alone. :class:`Secret` is a plain class, as a struct could not
keep its field from being encoded.

Units are in the names: ``_s`` seconds, ``at_s`` and ``now_s`` monotonic seconds (never wall
time), ``_tokens`` tokens; rates are tokens per second.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct, field


class Secret:
    """Text that must not be seen: printed, it is ``***``.

    ``reveal()`` is the only access, so ``grep reveal`` finds every place where a secret is
    used. Structs may hold one: ``msgspec.structs.replace`` keeps the same object; copying,
    pickling and encoding raise ``TypeError``.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself, for its purpose only."""
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
        # Bytes, as compare_digest accepts only ASCII text; lone surrogates must not make it fail.
        mine, theirs = (each._text.encode("utf-8", "surrogatepass") for each in (self, other))
        return hmac.compare_digest(mine, theirs)

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not to be pickled or copied")


class Request(Struct, frozen=True):
    """What a router knows about a request.

    :param id: the request id, as logged; the same for all attempts of a request.
    :param model: the name by which backends know the model (aliases are resolved).
    :param prompt_tokens: an estimate, never exact.
    :param max_tokens: the caller's limit on output; ``None`` if it set none.
    :param prefix: hashes of the prompt's blocks, first block first; may be empty.
    :param session: a conversation id, if the caller sent one.
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
    """The live figures of one backend. Routers read them, and never write them.

    ``None`` means "not known", never zero.

    :param in_flight: requests of this gateway that hold a lease now.
    :param ttft_s: mean time to first token of the last 50 requests.
    :param ttft_samples: the number of samples behind ``ttft_s``.
    :param token_rate: output tokens per second of one stream.
    :param prefill_rate: prompt tokens per second while reading a prompt.
    :param failure_streak: failures since the last success.
    :param busy_slots: slots in use, as reported by the backend.
    :param deferred: requests queued in the backend, as reported by it.
    :param kv_use: share of the KV cache in use, 0 to 1.
    :param gpu_use: share of the GPU in use, 0 to 1.
    :param peers_in_flight: requests of other gateways in flight there.
    :param available: may be chosen now (by breaker, health and drain).
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
    :param slots: its number of parallel sequences, if it has reported it.
    :param max_connections: the cap on requests of this gateway in flight there.
    :param context_length: tokens of context per slot, if known.
    :param labels: the operator's, by name.
    :param profile: the live figures; the same object as long as the backend exists.
    """

    id: str
    weight: float = 1.0
    slots: int | None = None
    max_connections: int = 64
    context_length: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)


class Choice(Struct, frozen=True):
    """A router's choice with its reasons.

    :param backend: one of the candidates.
    :param slot: the slot of the server to ask for (``id_slot``), if any.
    :param score: the figure that the router compared; whether higher is better is up to it.
    :param why: one short phrase for the access log and ``explain``.
    """

    backend: Backend
    slot: int | None = None
    score: float = 0.0
    why: str = ""


class Started(Struct, frozen=True):
    """An attempt at a backend has begun."""

    request_id: str
    backend_id: str
    at_s: float


class FirstToken(Struct, frozen=True):
    """The first event with content arrived at our socket, ``ttft_s`` after the start of the attempt."""

    request_id: str
    backend_id: str
    at_s: float
    ttft_s: float


class Finished(Struct, frozen=True):
    """An attempt is over, however it ended; exactly one per ``Started``.

    :param ok: the backend has not failed. If the client left, it is true with the reason
        ``client_gone``, which says nothing about the backend.
    :param reason: ``done``, ``client_gone``, ``connect``, ``timeout``, ``reset``,
        ``cut``, ``status_500`` and so on, ``framing``, ``busy``, ``loading``.
    :param prompt_tokens: as reported by the backend, cached ones included.
    :param cached_tokens: of these, those read from the backend's prompt cache.
    :param prompt_s: seconds that the backend spent on the uncached part of the prompt.
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
    """The result of one health check; ``None`` means "not reported".

    :param alive: it answered, even if only that it is busy or loading.
    :param loading: it answered that its model is not ready yet.
    :param refused: nobody listens there (connection refused, no route, bad TLS); the only
        failure that needs no confirmation by requests.
    :param models: names of the models that it serves now.
    :param slots: its number of parallel sequences.
    :param busy_slots: of these, those in use.
    :param deferred: requests queued in it.
    :param context_length: tokens per slot.
    :param kind: ``"llama-server"`` or ``"ollama"`` if it certainly is one, else ``None``.
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
    """A health source has reported."""

    backend_id: str
    at_s: float
    report: HealthReport


Event = Started | FirstToken | Finished | HealthChanged


class Usage(Struct, frozen=True):
    """Tokens that a request has used."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def total(self) -> int:
        """The tokens that count against limits."""
        return self.prompt_tokens + self.output_tokens


class Policy(Struct, frozen=True):
    """One limit. A ``None`` dimension is not limited.

    :param name: unique among the configured policies; it is logged, and named in refusals.
    :param scope: ``"key"`` (each key by itself) or ``"global"`` (all together).
    :param burst_s: the size of the bucket, in seconds of its rate.
    :param enforce: if ``False``, what it would refuse is only counted.
    :param on_redis_loss: ``"local"``, ``"open"`` or ``"closed"`` while the shared store of the
        limiter is away; ``None``: by the limiter's own option.
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
    """What a request is charged before it runs."""

    requests: int = 1
    tokens: int = 0


class LimitState(Struct, frozen=True):
    """The state of a request or token limit, for the ``x-ratelimit-*`` headers.

    :param reset_s: seconds until all of ``limit`` is available again.
    """

    limit: int
    remaining: int
    reset_s: float


class Decision(Struct, frozen=True):
    """A limiter's answer.

    :param allowed: all policies have been charged; if false, none has.
    :param reservation: opaque; passed to ``settle`` exactly once. ``None`` if refused.
    :param retry_after_s: if refused, seconds until it could pass.
    :param policy: the name of the policy that refused.
    :param unit: what ran out: ``"requests"``, ``"tokens"`` or ``"concurrent"``.
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
    """What requests of one key, or for one model, may ask for. ``None``: no cap beyond ``[limits]``.

    Requests beyond ``max_tokens`` are cut down to it, those beyond other caps are refused.

    :param max_prompt_tokens: by estimate, before a backend has counted.
    :param max_tokens: tokens of output.
    :param max_n: choices.
    :param max_stop: stop sequences.
    :param max_tools: tools and functions.
    :param max_logprobs: alternatives for each token; 0 allows no logprobs at all.
    :param grammar: ``False``: no grammar, regular expression or JSON schema.
    :param max_response_bytes: bytes of an answer's body; a longer answer is refused or cut off.
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
        """The tightest cap of each kind; ``None`` if nothing is capped."""
        least: dict[str, Any] = {}
        for each in caps:
            for name in cls.__struct_fields__:
                value = getattr(each, name)
                if value is not None and (name not in least or value < least[name]):
                    least[name] = value
        return cls(**least) if least else None


class Submission(Struct, frozen=True):
    """A request as filters see it: its body, and what was read from it.

    :param id: the request id, as logged.
    :param route: the path, such as ``/v1/chat/completions``.
    :param model: the name that the caller used.
    :param target: the name by which backends know the model.
    :param body: as it came: one JSON object, unless ``content_type`` says otherwise.
    :param content_type: ``application/json``, or ``multipart/form-data; boundary=…``.
    :param prompt_tokens: an estimate.
    :param max_tokens: the limit on output that applies; ``None`` for none.
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
    :param models: models and aliases that it may use; ``None``: all.
    :param policies: the key's own limits, besides the configured ones.
    :param show_backend: answers carry ``x-llmgw-backend``.
    :param show_decision: answers carry ``x-llmgw-decision``.
    :param interim: may be sent 102 Processing while it waits.
    :param loaded_only: its requests never cause a model to be loaded.
    :param criticality: ``"sheddable"`` is refused first when the gateway is overloaded, then
        ``"standard"``; ``"critical"`` is not.
    :param caps: what it may ask for; ``None``: no caps.
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
