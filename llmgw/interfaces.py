"""The plugin contract. It is the specification, to be read from top to bottom.

What ``twisted.plugin`` finds is always a *factory*: a stateless object with a
``name``, a ``description``, a ``contract`` number and ``build(options, …)``.
Dropin modules are imported before any configuration or reactor exists (and by every
other Twisted program in the environment), so a factory must not hold live state.

``options`` is the plugin's own table of the configuration file, without the key
``plugin``: a mapping of plain TOML values. ``build`` checks it and raises
:class:`llmgw.errors.ConfigError`, whose faults name keys of that table; it uses neither the
network nor files that ``options`` does not name. Strings called ``…_file`` are absolute
paths when ``build`` gets them.

Ship a plugin as a package with one module ``twisted/plugins/llmgw_<dist>.py`` that has one
line per factory, and test it with the contract tests of :mod:`llmgw.testing`. Values are in
:mod:`llmgw.values`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.plugin import IPlugin
from zope.interface import Attribute, Interface

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IReactorTime

    from llmgw.values import (
        Backend,
        Caller,
        Choice,
        Cost,
        Decision,
        Event,
        HealthReport,
        Policy,
        Request,
        Submission,
        Usage,
    )

CONTRACT = 1
"""The version of this contract. A factory with another number is refused at start."""


class IFactory(IPlugin):
    """The attributes of every kind of factory."""

    name: str = Attribute("Lower case with hyphens; unique within its kind.")
    description: str = Attribute("One line for ``llmgw plugins`` and ``--help``.")
    contract: int = Attribute("The value of ``llmgw.interfaces.CONTRACT`` it was written for.")


# --- routers ------------------------------------------------------------------


class IRouter(Interface):
    """Chooses a backend for each request.

    The gateway calls ``choose`` in the reactor thread once per attempt and takes a lease on
    the answer in the same turn, so the counts that it sees are never stale. It is called
    thousands of times a second and must take less than 20 µs for 10 candidates: no I/O, no
    clock (``now_s`` is an argument), no logging, no Deferred.

    If a method raises, the fault is logged (rate limited) and counted, and the backend for that
    request is chosen by least connections; the request is not lost.

    Optional attribute ``wants_prefix``: if true, ``Request.prefix`` is filled with one hash for
    each 448 bytes of the prompt's JSON, each of which covers all bytes up to its end
    (``llmgw.core.prompt``). If not, it is empty, which saves about 7 µs per request, and more
    for long ones. It is also empty if there is nothing to choose: only one backend serves the
    model, and neither the choice of slots nor the bounded wait is enabled.

    Optional method ``adapt(*, slot_choice: bool, may_wait: bool)``: called before the first
    request and after each reload, to tell whether slots that the router names are asked for,
    and whether a request for which it returns ``None`` waits.

    A :class:`~llmgw.values.Choice` with a ``slot`` makes a llama-server wait for that slot, even
    if another one is free, on routes that obey ``id_slot``; elsewhere it is ignored.
    """

    def choose(request: Request, candidates: Sequence[Backend], now_s: float) -> Choice | Backend | None:
        """Pick one of ``candidates``.

        Every candidate meets the hard constraints: it serves the model, is available, is below
        its cap, and may be tried by this request. The sequence is never empty, has no defined
        order, and may differ from call to call. Do not keep or change it.

        :param now_s: monotonic seconds; never runs backwards.
        :return: one of ``candidates``, bare or in a :class:`Choice`; ``None`` for "none of these
            now". The client then gets 503 ``overloaded``; or, where waiting is allowed, the
            request waits, and this is called again when something has changed, and four times
            a second.
        """

    def observe(event: Event) -> None:
        """Learn from an event. Every attempt causes ``Started``, then ``FirstToken`` if one came,
        then exactly one ``Finished``; every health report causes ``HealthChanged``. Not called if
        the router has an attribute ``observes`` that is false; then no events are made.

        Events of different attempts interleave. ``Finished`` also comes for an attempt at a
        backend that has been removed meanwhile.
        """


class IOrderingRouter(IRouter):
    """A router that also orders a bounded wait (``[admission] max_wait_s > 0``)."""

    def order(waiting: Sequence[Request], backend: Backend, now_s: float) -> int:
        """Decide which waiting request goes next, since a slot of ``backend`` is free.

        The request is then passed to ``choose`` with all backends that have room; if that
        declines, this is called again without it, a few times.

        :param waiting: requests that ``backend`` can take, oldest first, never empty: at most the
            64 oldest, of all models that it serves.
        :return: an index into ``waiting``; anything else is a fault, and the first one goes.
        """


class IRouterFactory(IFactory):
    """Builds a router: once at start, and at each reload that changes its options."""

    def build(options: Mapping[str, Any]) -> IRouter:
        """:raise ConfigError: options are wrong. A router that uses random numbers takes a ``seed``."""


# --- health -------------------------------------------------------------------


class IHealthTarget(Interface):
    """The backend that a health source watches."""

    id: str = Attribute("The backend's id.")
    url: str = Attribute("Base URL, without a trailing slash and without ``/v1``.")
    headers: Mapping[str, str] = Attribute("Headers to send, such as the backend's own credential.")

    def get(path: str, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        """GET ``url + path`` on a connection of its own; TLS is verified as on the data path.
        Cancelling closes the connection.

        :return: fires with status and body (at most 1 MiB).
        :raise twisted.internet.error.ConnectError: nobody listens there.
        :raise twisted.internet.defer.TimeoutError: it took longer than ``timeout_s``.
        """

    def post(path: str, body: bytes, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        """As ``get``, with a ``body`` of JSON; for model loaders."""

    def watch(path: str, received: Callable[[bytes], None], connect_s: float) -> Deferred[int]:
        """GET an answer that does not end, such as a stream of events, piece by piece.
        Cancelling closes the connection. Errors are those of ``get``.

        :param received: called with each piece, for a 200 only.
        :param connect_s: longest time for connecting.
        :return: fires with the status when the answer has ended.
        """


class IHealthSource(Interface):
    """Watches one backend and reports what it sees.

    The gateway judges (fall, rise, ejection, slow start); a source only reports facts. A slow
    answer is a sign of a busy backend: report it as ``alive`` unless there was no answer at all.

    If a source raises, or reports anything but a ``HealthReport``, that is logged, and its
    backend stays as it was.

    Optional method ``look_soon()``: called when a backend has told a request that its model is
    loading, and no report has said so. The source should then check at once, or two seconds
    after its last check, instead of at the next interval.
    """

    def start(target: IHealthTarget, report: Callable[[HealthReport], None]) -> None:
        """Begin, and call ``report`` after each check, the first one soon. Called once.

        Do not check more often than every 2 s: each check delays the moment at which a
        llama-server notices that clients have left.
        """

    def stop() -> None:
        """End. No ``report`` after this; nothing may be left in the reactor."""


class IHealthSourceFactory(IFactory):
    """Builds one source per backend."""

    def build(options: Mapping[str, Any], reactor: IReactorTime) -> IHealthSource:
        """:raise ConfigError: options are wrong. Starts nothing."""


# --- request filters ----------------------------------------------------------


class IRequestFilter(Interface):
    """Decides whether a request is allowed by its content.

    ``check`` is called in the reactor thread once per request with a body, after its model is
    known and allowed, and before limits are charged and a backend is chosen. All other requests
    wait for it: it must take less than 1 ms for 100 kB, without I/O and without a Deferred. A
    check that needs a service or a model of its own does not belong here.

    If it raises anything but a :class:`llmgw.errors.GatewayError`, or returns anything, the
    fault is logged (rate limited) and counted, and the request gets a 500, or passes if the
    filter's table says ``on_error = "pass"``.
    """

    def check(submission: Submission, caller: Caller) -> None:
        """Return to let the request pass, unchanged.

        :raise llmgw.errors.RequestRefused: 403, with a message for the client; or any other
            ``GatewayError``, such as ``InvalidRequest``.
        """


class IRequestFilterFactory(IFactory):
    """Builds one filter per ``[[filters]]`` table, at start and at each reload."""

    def build(options: Mapping[str, Any]) -> IRequestFilter:
        """:raise ConfigError: options are wrong."""


# --- rate limits --------------------------------------------------------------


class IRateLimiter(Interface):
    """Decides whether a request is within the limits.

    Called once per request after its body was read, before routing. ``admit`` returns a
    ``Decision`` at once (the common case, < 10 µs) or a Deferred of one. The gateway waits for
    that for 100 ms at most; then the request passes and is counted as degraded, as it is if
    ``admit`` raises, fails, or returns anything else. Cancelling the Deferred must give back
    whatever was taken.

    Optional methods:

    - ``use_store(store)``: called once before the reactor runs, with the shared store
      (:mod:`llmgw.store`).
    - ``stop()``: called after the last request; may return a Deferred.
    - ``gauges()``: figures for ``/metrics``, a mapping of name to help text and value. Names that
      the gateway uses itself are left out.
    - ``top_up(reservation, tokens)``: charge a stream that has exceeded its reservation so many
      tokens more, at once and even if they are not there; ``settle`` corrects the sum.
    """

    def admit(subject: str, policies: Sequence[Policy], cost: Cost) -> Decision | Deferred[Decision]:
        """Charge ``cost`` to all policies, or, if one of them refuses, to none.

        :param subject: the id of the key; policies of scope ``global`` ignore it.
        :param cost: its tokens are an estimate (prompt + allowed output).
        """

    def settle(reservation: Any, used: Usage | None) -> None:
        """The request is over: release its concurrency, and correct its tokens.

        Called exactly once for each reservation. A Deferred that it returns is not waited for;
        its failure is logged.

        :param used: ``None`` if the request did not reach a backend: give back all of its charge.
        """


class IRateLimiterFactory(IFactory):
    """Builds the limiter of this process."""

    def build(options: Mapping[str, Any], reactor: IReactorTime) -> IRateLimiter:
        """:raise ConfigError: options are wrong. No connection is made before the reactor runs."""


# --- discovery ----------------------------------------------------------------


class IDiscovery(Interface):
    """Adds, changes and removes backends while the gateway runs.

    It reports what its source says, without judging: the gateway refuses entries that are wrong
    or not allowed, keeps those that vanish for a while, and prefers the backends of the
    configuration file where ids or URLs clash.

    Optional attributes, shown in ``/api/state`` and metrics: ``connected`` (bool), ``contact_s``
    (when the source last answered, by ``reactor.seconds()``) and ``error`` (one line; ``""``
    while all is well).
    """

    def start(update: Callable[[Sequence[Mapping[str, Any]]], None]) -> None:
        """Begin, and call ``update`` at each change, with *all* backends that the source knows.

        Each entry has the form of a ``[[backends]]`` table. It may have ``key``, the source's own
        name for it, which is reported if the entry is refused. An entry that cannot be read
        consists of ``key`` and ``fault``, which says why.

        Pass an empty sequence only if the source *said* that there is nothing. While it cannot be
        reached, do not call ``update``: the last set stays.
        """

    def stop() -> Deferred[None] | None:
        """End. No ``update`` after this."""


class IDiscoveryFactory(IFactory):
    """Builds one discovery per ``[[discovery]]`` table."""

    def build(options: Mapping[str, Any], reactor: IReactorTime) -> IDiscovery:
        """:raise ConfigError: options are wrong."""


# --- model loading ------------------------------------------------------------


class IModelLoader(Interface):
    """Loads, unloads and lists models on one backend.

    The gateway decides what is loaded where; a loader only carries it out, never evicts on its
    own, and is asked for one load or unload at a time. Optional attributes and methods, with
    their defaults:

    - ``capacity`` (``None``): how many models the backend can have in memory at a time.
    - ``slots`` (empty): mapping of loaded model to its number of parallel sequences.
    - ``aliases`` (empty): mapping of other names of a model to its first name.
    - ``sizes`` (empty): mapping of model to the bytes of memory it takes.
    - ``starts_server`` (false): the backend need not be running before a load.
    - ``busy(model)``: a Deferred of the number of requests running on a loaded model as
      reported by the backend, or of ``None``; called before ``unload``, as other gateways may
      use the backend, too.
    - ``start(changed)``: called once before anything else; the loader may call ``changed()``
      when ``models`` would return something new, instead of waiting for the next check.
    - ``stop()``: the backend is no longer ours; nothing may be left in the reactor. May return
      a Deferred.
    """

    def models() -> Deferred[Mapping[str, str]]:
        """The models that the backend could serve.

        :return: fires with a mapping of name to ``loaded``, ``loading``, ``unloaded`` or ``failed``.
        :raise llmgw.errors.ForeignServer: the server is not of this loader's kind; it is treated as
            one without a loader until this changes. Any other error: the states are not known now.
        """

    def load(model: str) -> Deferred[None]:
        """Load ``model``; fires when it is ready. Cancelling only ends the wait; the load may go on.

        :raise llmgw.errors.LoadUndone: somebody undid it, or took the room; it may be tried again at
            once.
        :raise llmgw.errors.ModelLoading: the load failed; the message says why.
        """

    def unload(model: str) -> Deferred[None]:
        """Unload ``model``; fires when it is no longer in memory."""


class IModelLoaderFactory(IFactory):
    """Builds one loader per backend that is configured with one."""

    def build(options: Mapping[str, Any], target: IHealthTarget, reactor: IReactorTime) -> IModelLoader:
        """:raise ConfigError: options are wrong."""


FACTORIES: Mapping[str, Any] = {
    "router": IRouterFactory,
    "health": IHealthSourceFactory,
    "filter": IRequestFilterFactory,
    "rate-limiter": IRateLimiterFactory,
    "discovery": IDiscoveryFactory,
    "model-loader": IModelLoaderFactory,
}
"""The kinds of plugins, by their names in the configuration and in ``llmgw plugins``."""
