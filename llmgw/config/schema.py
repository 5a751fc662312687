"""What a configuration holds: a struct for each table, a field for each key.

A key of the file is a field of the struct of its table, its type and bounds
stand in the annotation, its default is the field's;
:mod:`llmgw.config.reader` reads any table against any struct. The prose for
each key is in ``etc/llmgw.example.toml``, which the tests hold to the same set
of keys and the same defaults.

Tables of plugins pass through unread, but for ``plugin``: their factories check
them. Units stand in the names: ``_s`` seconds, ``_bytes`` bytes; other integers
count things. The tables of backends and models: :mod:`llmgw.config.fleet_tables`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Struct, field

from llmgw.config.bounds import Count, Seconds, Share, Size, Word
from llmgw.config.files import auth_spec, existing_file, log_path, secret_file
from llmgw.config.fleet_tables import (
    BackendConfig,
    DiscoveryConfig,
    ModelConfig,
    PluginConfig,
)
from llmgw.config.places import (
    listener,
    network,
    origin,
    sentinel,
    store_url,
    web_url,
)
from llmgw.config.reader import Rule
from llmgw.values import Policy, Secret

ListenerSpec = Annotated[str, Rule(filled=True, convert=listener)]
AuthSpec = Annotated[str, Rule(filled=True, convert=auth_spec)]


class FilterConfig(PluginConfig, frozen=True):
    """A request filter. :param on_error: what becomes of a request when the filter fails."""

    on_error: Literal["refuse", "pass"] = "refuse"


class Timeouts(Struct, frozen=True):
    """How long each thing may take. Zero is refused: nothing waits for ever.

    :param keepalive_requests: a count: requests on one connection.
    :param body_rate: bytes per second that a body must keep up, after 5 s.
    :param heartbeat_s: 0 is off, and is spelt ``false`` in the file.
    """

    tls_handshake_s: Seconds = 10.0
    request_head_s: Seconds = 10.0
    keepalive_s: Seconds = 80.0
    keepalive_requests: Count = 1000
    keepalive_age_s: Seconds = 3600.0
    body_s: Seconds = 30.0
    body_rate: Count = 16_384
    connect_s: Seconds = 2.0
    response_head_s: Seconds = 960.0
    first_token_s: Seconds = 960.0
    stream_idle_s: Seconds = 300.0
    heartbeat_s: Annotated[float, Rule(least=1, most=3600, off=True)] = 0.0
    total_s: Seconds = 1800.0
    write_stall_s: Seconds = 30.0
    upstream_idle_s: Seconds = 4.0
    close_grace_s: Seconds = 5.0


class Limits(Struct, frozen=True):
    """How much of each thing there may be.

    ``request_line``, ``header_line``, ``headers`` and ``pipelined`` are bytes too.
    """

    request_line: Size = 4096
    header_line: Size = 8192
    headers: Size = 32_768
    header_count: Count = 100
    body_bytes: Size = 64 << 20
    body_total_bytes: Size = 512 << 20
    json_depth: Annotated[int, Rule(least=4, most=500)] = 64
    json_structural: Count = 100_000
    json_digits: Annotated[int, Rule(least=1, most=4000)] = 64
    messages: Count = 2048
    tools: Count = 256
    stop: Count = 16
    n: Count = 8
    connections: Count = 10_000
    connections_per_ip: Count = 256
    new_connections_per_ip_s: Count = 50
    in_flight: Count = 2000
    in_flight_per_key: Count = 64
    upstream_head_bytes: Size = 32_768
    pipelined: Size = 16_384
    backlog: Annotated[int, Rule(least=1, most=65_535)] = 1024
    trusted_networks: tuple[Annotated[str, Rule(convert=network)], ...] = ()


class Hold(Struct, frozen=True):
    """Requests that wait while their model is loaded: ``factor`` x the expected
    load time, but no less than ``min_s`` and no more than ``max_s``.

    :param max_requests: of this process together; the next one gets 503.
    :param max_per_model: of these for one model; ``None`` is as many.
    :param body_bytes: bodies of held requests together.
    :param interim_s: least time between two signs of life to a client that asked for them.
    """

    max_s: Seconds = 45.0
    min_s: Seconds = 15.0
    factor: Annotated[float, Rule(least=1, most=100)] = 1.5
    max_requests: Annotated[int, Rule(least=0, most=1_000_000)] = 64
    max_per_model: Annotated[int, Rule(least=1, most=1_000_000)] | None = None
    body_bytes: Size = 64 << 20
    interim_s: Annotated[float, Rule(least=0.1, most=3600)] = 2.0


class LoadingConfig(Struct, frozen=True):
    """Models that come and go.

    :param interval_s: between two looks at which models a backend has in memory.
    :param give_up_s: a load that takes longer has failed.
    :param backoff_s: a failed load is not tried again there for so long, doubled each time.
    :param min_stay_s: what was just loaded is not evicted before.
    :param idle_unload_s: what nobody asked for so long is unloaded; 0 is never.
    """

    interval_s: Annotated[float, Rule(least=0.5, most=3600)] = 2.0
    give_up_s: Seconds = 600.0
    backoff_s: Seconds = 10.0
    min_stay_s: Annotated[float, Rule(least=0, most=86_400)] = 10.0
    idle_unload_s: Annotated[float, Rule(least=1, most=604_800, off=True)] = 0.0


class BreakerConfig(Struct, frozen=True):
    """When a backend is taken out and how it comes back (``docs`` tell the whole machine).

    :param consecutive: failures in a row that open it.
    :param ratio: share of failures among at least ``ratio_min`` results in ``window_s``.
    :param open_s: doubled at each ejection up to ``open_cap_s``, spread by ``jitter``.
    :param decay_s: an ejection counts for so long.
    :param lone_open_s: in place of these for the only backend of a pool.
    :param fall: looks without an answer in a row until a backend is down; ``rise`` back up.
    """

    consecutive: Count = 5
    ratio: Annotated[float, Rule(above=0, most=1)] = 0.5
    ratio_min: Count = 20
    window_s: Seconds = 30.0
    open_s: Seconds = 5.0
    open_cap_s: Seconds = 60.0
    jitter: Annotated[float, Rule(least=0, most=0.9)] = 0.2
    decay_s: Seconds = 600.0
    successes: Count = 3
    slow_start_s: Seconds = 30.0
    slow_start_floor: Annotated[float, Rule(least=0.01, most=1)] = 0.1
    max_ejected: Share = 0.5
    panic: Share = 0.5
    lone_open_s: Seconds = 1.0
    fall: Count = 3
    rise: Count = 2


class RetryConfig(Struct, frozen=True):
    """Second chances elsewhere, and the budget that keeps them from piling up.

    :param attempts: after the first one.
    :param ratio: retries over requests of the last ``window_s``.
    :param floor: retries that may go beyond the share in one window, and as many at once.
    """

    attempts: Annotated[int, Rule(least=0, most=10)] = 2
    ratio: Share = 0.2
    window_s: Seconds = 10.0
    floor: Annotated[int, Rule(least=0, most=1000)] = 3
    backoff_min_s: Seconds = 0.025
    backoff_max_s: Seconds = 0.25


class LogConfig(Struct, frozen=True):
    """:param access: a path, ``-`` for standard output, empty for none.

    :param access_sample: share of answered requests that are logged; errors always are.
    """

    access: Annotated[str, Rule(convert=log_path)] = "-"
    access_sample: Share = 1.0


class StoreConfig(Struct, frozen=True):
    """The shared store: a Redis or Valkey, alone or found through Sentinel; none by default.

    :param sentinels: ``host:port`` of each; the host in ``url`` is not used then.
    :param master: the name that Sentinel has for it.
    :param ca_file: authorities for ``rediss``; ``None``: the system's.
    :param op_s: longest wait for an answer, ``connect_s`` for a connection.
    """

    url: Annotated[str | None, Rule(convert=store_url)] = None
    password: Annotated[Secret | None, Rule(convert=secret_file)] = field(default=None, name="password_file")
    sentinels: tuple[Annotated[str, Rule(convert=sentinel)], ...] = ()
    master: Annotated[str | None, Rule(shape=r"[A-Za-z0-9._-]{1,64}", meaning="letters, digits, . _ -")] = (
        None
    )
    sentinel_password: Annotated[Secret | None, Rule(convert=secret_file)] = field(
        default=None, name="sentinel_password_file"
    )
    ca_file: Annotated[str | None, Rule(filled=True, convert=existing_file)] = None
    op_s: Annotated[float, Rule(above=0, most=60)] = 0.05
    connect_s: Annotated[float, Rule(above=0, most=60)] = 0.25
    key_prefix: Annotated[
        str, Rule(shape=r"[A-Za-z0-9._:-]{1,64}", meaning="letters, digits, . _ : - (at most 64)")
    ] = "llmgw:"

    def __bool__(self) -> bool:
        """There is one."""
        return bool(self.url or self.sentinels)


class TracingConfig(Struct, frozen=True):
    """Traces for OpenTelemetry; none without an endpoint.

    :param endpoint: where spans go, OTLP over HTTP.
    :param sample: of requests whose caller has not decided.
    """

    endpoint: Annotated[str | None, Rule(convert=web_url)] = None
    sample: Share = 1.0
    service_name: Word = "llmgw"


class MetricsConfig(Struct, frozen=True):
    """:param exemplars: tell a request's id beside each bucket of the time to first token."""

    exemplars: bool = False


class PeersConfig(Struct, frozen=True):
    """What gateways tell each other through the shared store.

    :param refresh_s: how often; a gateway without work half as often.
    :param stale_s: who was not heard of for so long is not there any more.
    """

    refresh_s: Annotated[float, Rule(least=0.05, most=10)] = 0.25
    stale_s: Annotated[float, Rule(least=0.5, most=60)] = 2.0


class Answers(Struct, frozen=True):
    """What every answer tells of its way, beside what a key asks for.

    :param backend: ``x-llmgw-backend``; ``decision``: ``x-llmgw-decision``.
    """

    show_backend: bool = False
    show_decision: bool = False


class Cors(Struct, frozen=True):
    """Web pages that may call; none by default."""

    origins: tuple[Annotated[str, Rule(convert=origin)], ...] = ()


class DrainConfig(Struct, frozen=True):
    """Still accepting, not ready any more; then finishing streams; then cutting them."""

    lame_duck_s: Annotated[float, Rule(least=0, most=3600)] = 5.0
    finish_s: Seconds = 300.0
    abort_s: Seconds = 10.0


class OverloadConfig(Struct, frozen=True):
    """Where each level of the overload ladder begins (:mod:`llmgw.core.overload`).

    :param memory_bytes: of this process; ``None`` finds the limit of its control group or machine.
    """

    shed_lag_s: Seconds = 0.1
    refuse_lag_s: Seconds = 0.25
    close_lag_s: Seconds = 1.0
    shed_memory: Share = 0.85
    refuse_memory: Share = 0.92
    close_memory: Share = 0.95
    cut_memory: Share = 0.98
    memory_bytes: Size | None = None


class Admission(Struct, frozen=True):
    """The bounded wait for a slot.

    :param max_wait_s: 0: a full fleet answers 503 at once.
    :param max_waiting: per model; ``None`` is twice the capacity.
    :param slot_choice: ask a llama-server for the slot that the router chose.
    """

    max_wait_s: Annotated[float, Rule(least=0, most=3600)] = 0.0
    max_waiting: Annotated[int, Rule(least=1, most=1_000_000)] | None = None
    slot_choice: bool = False


class Config(Struct, frozen=True, kw_only=True):
    """All of it, checked.

    :param listen: with :attr:`Limits.backlog` written into each that names none.
    :param health: never empty.
    :param source: absolute path of the file, ``""`` if there is none.
    :param base_dir: where relative paths counted from.
    :param warnings: allowed, and worth a line in the log; each begins with a key path.
    """

    not_keys: ClassVar[tuple[str, ...]] = ("source", "base_dir", "warnings")

    listen: tuple[ListenerSpec, ...] = ("tcp:8000:interface=127.0.0.1",)
    admin: tuple[ListenerSpec, ...] = ()
    admin_token: Annotated[Secret | None, Rule(convert=secret_file)] = field(
        default=None, name="admin_token_file"
    )
    auth: tuple[AuthSpec, ...] = ()
    workers: Annotated[int, Rule(least=1, most=1024)] = 1
    router: PluginConfig = PluginConfig("expected-ttft")
    health: tuple[PluginConfig, ...] = (PluginConfig("llamacpp"),)
    filters: tuple[FilterConfig, ...] = ()
    rate_limiter: PluginConfig = PluginConfig("local")
    rate_limits: tuple[Policy, ...] = ()
    store: StoreConfig = StoreConfig()
    peers: PeersConfig = PeersConfig()
    discovery: tuple[DiscoveryConfig, ...] = ()
    backends: tuple[BackendConfig, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    admission: Admission = Admission()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    hold: Hold = Hold()
    loading: LoadingConfig = LoadingConfig()
    breaker: BreakerConfig = BreakerConfig()
    retry: RetryConfig = RetryConfig()
    overload: OverloadConfig = OverloadConfig()
    drain: DrainConfig = DrainConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    metrics: MetricsConfig = MetricsConfig()
    answers: Answers = Answers()
    cors: Cors = Cors()
    source: str = ""
    base_dir: str = ""
    warnings: tuple[str, ...] = ()
