"""The plugin contract. Read it from top to bottom: it is the specification.

What ``twisted.plugin`` finds is always a *factory*: a stateless object with a
``name``, a ``description``, a ``contract`` number and ``build(options, …)``.
Dropin modules are imported before any config or reactor exists (and by every
other Twisted program of the environment), so a factory holds no live state.

``options`` is the plugin's own table of the config file without the key
``plugin``: a mapping of plain TOML values. ``build`` checks it and raises
:class:`llmgw.errors.ConfigError` whose faults name keys of that table; it
touches neither network nor files that ``options`` does not name. Strings called
``…_file`` come to it as absolute paths.

Ship a plugin as a package with one module ``twisted/plugins/llmgw_<dist>.py``
that holds one line per factory, and prove it with the contract tests of
:mod:`llmgw.testing`. Values are in :mod:`llmgw.values`.
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
"""Version of this contract. A factory with another number is refused at start."""


class IFactory(IPlugin):
    """What every kind of factory has."""

    name: str = Attribute("Lower case with hyphens; unique within its kind.")
    description: str = Attribute("One line for ``llmgw plugins`` and ``--help``.")
    contract: int = Attribute("The value of ``llmgw.interfaces.CONTRACT`` it was written for.")


# --- routers ------------------------------------------------------------------


class IRouter(Interface):
    """Chooses a backend for each request.

    The gateway calls ``choose`` on its reactor thread once per attempt and takes
    a lease on the answer in the same turn, so counts seen are never stale. Calls
    come thousands of times a second: under 20 µs for 10 candidates, no I/O, no
    clock (``now_s`` is handed in), no logging, no Deferred.

    If a method raises, the fault is logged (rate limited), counted, and the
    gateway falls back to least connections for that request; nothing is lost.

    A router may have an attribute ``wants_prefix`` that is true: then
    ``Request.prefix`` is filled, with one hash for each 448 bytes of the prompt's
    JSON, of which each stands for all bytes up to its end (`llmgw.core.prompt`).
    Else it is empty, which saves about 7 µs per request, and more for long ones. It is
    empty, too, where nothing is to be chosen: only one backend serves the model, and
    the operator has switched on neither the choice of slots nor the bounded wait.

    A router may have a method ``adapt(*, slot_choice: bool, may_wait: bool)``. It is called
    before the first request and after each reload: whether slots that it names
    are asked for at all, and whether a request for which it answers ``None`` waits.

    A :class:`~llmgw.values.Choice` with a ``slot`` makes a llama-server wait for
    that very slot, busy or not, if the route obeys ``id_slot``; elsewhere it is ignored.
    """

    def choose(request: Request, candidates: Sequence[Backend], now_s: float) -> Choice | Backend | None:
        """Pick one of ``candidates``.

        Every candidate has met the hard constraints: it serves the model, is
        available, is under its cap and may be tried by this request. The
        sequence is never empty, has no stated order, and may be of another
        length and make-up at each call. Do not keep or change it.

        :param now_s: monotonic seconds; never runs backwards.
        :return: one of ``candidates``, bare or in a :class:`Choice`; ``None`` means
            "none of these now", which the client sees as 503 ``overloaded``, or,
            where waiting is allowed, as a wait: it is asked again when something
            changed, and four times a second.
        """

    def observe(event: Event) -> None:
        """Learn. Called for every attempt: ``Started``, then ``FirstToken`` if one
        came, then exactly one ``Finished``; and ``HealthChanged`` at each report.
        Not called at all if the router has an attribute ``observes`` that is false,
        which saves making the events.

        Events of different attempts interleave. ``Finished`` of an attempt to a
        backend that has been removed still comes.
        """


class IOrderingRouter(IRouter):
    """A router that also orders a bounded wait (``[admission] max_wait_s > 0``)."""

    def order(waiting: Sequence[Request], backend: Backend, now_s: float) -> int:
        """A slot of ``backend`` came free: which of ``waiting`` (oldest first, never
        empty, all fit for this backend) goes next.

        The one that is named is then given to ``choose`` with all backends that have
        room; if that declines, this is asked again without it, a few times.

        :param waiting: the 64 oldest at most, of all models that ``backend`` serves.
        :return: an index into ``waiting``; anything else is a fault, and the first goes.
        """


class IRouterFactory(IFactory):
    """Builds a router; called once at start and once per reload that changes its options."""

    def build(options: Mapping[str, Any]) -> IRouter:
        """:raise ConfigError: options are wrong. A router that wants dice takes a ``seed``."""


# --- health -------------------------------------------------------------------


class IHealthTarget(Interface):
    """The backend that a health source watches."""

    id: str = Attribute("The backend's id.")
    url: str = Attribute("Base URL, without a trailing slash and without ``/v1``.")
    headers: Mapping[str, str] = Attribute("Headers to send, such as the backend's own credential.")

    def get(path: str, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        """GET ``url + path`` on a connection of its own, verified as the data path would.

        :return: status and body (at most 1 MiB). Cancelling closes the connection.
        :raise twisted.internet.error.ConnectError: nobody there.
        :raise twisted.internet.defer.TimeoutError: ``timeout_s`` passed.
        """

    def post(path: str, body: bytes, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        """As ``get``, sending ``body``, which is JSON; for model loaders."""

    def watch(path: str, received: Callable[[bytes], None], connect_s: float) -> Deferred[int]:
        """GET an answer without end, such as a stream of events, piece by piece.

        :param connect_s: most time for the connection alone.
        :return: fires with the status when the answer has ended; ``received`` is called
            for a 200 only. Cancelling closes the connection. Errors as of ``get``.
        """


class IHealthSource(Interface):
    """Watches one backend and reports what it sees.

    The gateway owns the verdict (fall, rise, ejection, slow start); a source
    only tells facts. A slow answer is the sign of a busy backend: report it as
    ``alive`` unless nobody answered at all.

    One that raises, or reports anything else, leaves its backend as it was; the
    log tells.

    A source may have a method ``look_soon()``. It is called when a request has heard
    from the backend that its model is loading, and no report has said so: a look now,
    or two seconds after the last one, is worth more than one at its time.
    """

    def start(target: IHealthTarget, report: Callable[[HealthReport], None]) -> None:
        """Begin, and call ``report`` at each look, the first one soon. Called once.

        Never look more often than every 2 s: each question delays llama-server's
        noticing of closed requests.
        """

    def stop() -> None:
        """End; no ``report`` after this, nothing left in the reactor."""


class IHealthSourceFactory(IFactory):
    """Builds one source per backend."""

    def build(options: Mapping[str, Any], reactor: IReactorTime) -> IHealthSource:
        """:raise ConfigError: options are wrong. Starts nothing."""


# --- request filters ----------------------------------------------------------


class IRequestFilter(Interface):
    """Says whether a request may be asked at all.

    ``check`` is called on the reactor thread once per request that carries a
    body, after its model is known and allowed, before limits are charged and a
    backend is chosen. Everybody waits for it: under 1 ms for 100 kB, no I/O, no
    Deferred. What needs a service or a model of its own does not belong here.

    If it raises anything but a :class:`llmgw.errors.GatewayError`, or returns
    something, the fault is logged (rate limited) and counted, and the request gets
    500, or passes where its table says ``on_error = "pass"``.
    """

    def check(submission: Submission, caller: Caller) -> None:
        """Return, and the request goes on, unchanged.

        :raise llmgw.errors.RequestRefused: 403, with the message for the client; or
            any other ``GatewayError``, such as ``InvalidRequest``.
        """


class IRequestFilterFactory(IFactory):
    """Builds one filter per ``[[filters]]`` table, at start and at each reload."""

    def build(options: Mapping[str, Any]) -> IRequestFilter:
        """:raise ConfigError: options are wrong."""


# --- rate limits --------------------------------------------------------------


class IRateLimiter(Interface):
    """Says who may pass.

    Called once per request after its body was read, before routing. ``admit``
    may return a ``Decision`` at once (the usual case, < 10 µs) or a Deferred of
    one; the gateway waits 100 ms at most and then lets the request pass, counted
    as degraded; so does one whose ``admit`` raises, fails, or answers anything else.
    Cancelling that Deferred returns whatever was taken.

    What a limiter may have beside: ``use_store(store)``, called once before the
    reactor runs, gives it the shared store (:mod:`llmgw.store`); ``stop()``, called
    after the last request, may return a Deferred; ``gauges()`` gives figures for
    ``/metrics``, as a mapping of name to help text and value; ``top_up(reservation,
    tokens)`` charges a stream that has outgrown its reservation so many tokens more,
    at once and whatever there is: ``settle`` then corrects the whole.
    """

    def admit(subject: str, policies: Sequence[Policy], cost: Cost) -> Decision | Deferred[Decision]:
        """Charge ``cost`` to all policies, or to none of them.

        :param subject: the key's id; policies of scope ``global`` ignore it.
        :param cost: tokens are an estimate (prompt + allowed output).
        """

    def settle(reservation: Any, used: Usage | None) -> None:
        """The request is over: give back concurrency, and correct the tokens.

        Called exactly once for each reservation. ``used=None`` means the request
        never reached a backend: return all it was charged. A Deferred that it returns
        is not waited for; its failure is logged.
        """


class IRateLimiterFactory(IFactory):
    """Builds the limiter of this process."""

    def build(options: Mapping[str, Any], reactor: IReactorTime) -> IRateLimiter:
        """:raise ConfigError: options are wrong. No connection is made before the reactor runs."""


# --- discovery ----------------------------------------------------------------


class IDiscovery(Interface):
    """Adds, changes and removes backends while the gateway runs.

    It tells what its source says and judges nothing: the gateway refuses entries
    that are wrong or not allowed, holds those that vanish for a while, and lets
    the file's backends win where ids or URLs clash.

    It may have attributes that ``/api/state`` and metrics show: ``connected``
    (bool), ``contact_s`` (when the source answered last, by ``reactor.seconds()``)
    and ``error`` (one line; ``""`` while all is well).
    """

    def start(update: Callable[[Sequence[Mapping[str, Any]]], None]) -> None:
        """Begin, and call ``update`` with the *whole* set this source knows at each
        change; each entry has the form of a ``[[backends]]`` table, and may have
        ``key``, the source's own name for it, which is told when it is refused; one that
        the source itself cannot read has ``key`` and ``fault``, which says why.

        An empty set is one that the source *said* is empty. While the source is
        out of reach it calls nothing: the last set stays.
        """

    def stop() -> Deferred[None] | None:
        """End; no ``update`` after this."""


class IDiscoveryFactory(IFactory):
    """Builds one discovery per ``[[discovery]]`` table."""

    def build(options: Mapping[str, Any], reactor: IReactorTime) -> IDiscovery:
        """:raise ConfigError: options are wrong."""


# --- model loading ------------------------------------------------------------


class IModelLoader(Interface):
    """Loads, unloads and lists models on one backend.

    The gateway decides what is loaded where; a loader only does it, never evicts
    of its own will, and is asked for one load or unload at a time. Beside the
    methods it may have, each with the meaning that it has when it is missing:

    - ``capacity`` (``None``): models that the backend has in memory at a time at most.
    - ``slots`` (empty): mapping of loaded model to its parallel sequences.
    - ``aliases`` (empty): mapping of second names of a model to its first.
    - ``sizes`` (empty): mapping of model to the bytes of memory it takes.
    - ``starts_server`` (false): the backend need not be there before a load.
    - ``busy(model)``: Deferred of the requests at work on a loaded model by the
      backend's own word, or ``None``; asked before ``unload``, as other gateways
      may use the backend too.
    - ``start(changed)``: called once before anything is asked; ``changed()`` may then be
      called whenever ``models`` would tell something new, which spares the wait for
      the next look.
    - ``stop()``: the backend is not ours any more; nothing may be left in the
      reactor. May return a Deferred.
    """

    def models() -> Deferred[Mapping[str, str]]:
        """:return: name to state: ``loaded``, ``loading``, ``unloaded``, ``failed``.

        :raise llmgw.errors.ForeignServer: the server is none of this loader's; it is treated as one
            without a loader until it tells. Anything else: it cannot tell now.
        """

    def load(model: str) -> Deferred[None]:
        """Fires when ``model`` is ready. Cancelling forgets the wait; the load may go on.

        :raise llmgw.errors.LoadUndone: somebody undid it, or took the room; it may be tried at once.
        :raise llmgw.errors.ModelLoading: the load failed; the message says why.
        """

    def unload(model: str) -> Deferred[None]:
        """Fires when ``model`` is gone."""


class IModelLoaderFactory(IFactory):
    """Builds one loader per backend that asks for it."""

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
"""The kinds of plugin by the word the config and ``llmgw plugins`` use."""
