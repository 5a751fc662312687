"""From a checked configuration to the parts it names, each built and verified.

Whatever a part finds wrong comes out as :class:`~llmgw.errors.ConfigError` or
:class:`~llmgw.errors.PluginError` with the key's path; nothing is started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.application import strports
from twisted.cred import strcred

from llmgw import plugins
from llmgw.access.flood import FailureFlood
from llmgw.certificates import BadPair
from llmgw.config import is_loopback_endpoint
from llmgw.core.body import BodyLimits
from llmgw.errors import ConfigError, ConfigFault, PluginError
from llmgw.gateway.caller import Callers
from llmgw.gateway.filtering import Filter, Filters
from llmgw.gathering import Faults
from llmgw.listen.parsers import own_haproxy
from llmgw.listening import Sockets
from llmgw.store.store import Store
from llmgw.systemd import why_not_activated
from llmgw.tracing import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from llmgw.config import Config


def check_discoveries(config: Config, reactor: Any) -> None:
    """Build every discovery once and throw it away.

    :raise ConfigError: some of them are not there, or their options are wrong; every fault.
    :raise PluginError: the only fault: one that is not there.
    """
    faults = Faults(config.source)
    for index, table in enumerate(config.discovery):
        where = f"discovery[{index}]"
        faults.of(plugins.build, "discovery", table.plugin, table.options, reactor, where=where)
    faults.tell()


def check_listeners(config: Config, reactor: Any) -> None:
    """Build every listener once, with nobody to serve, and throw it away.

    :raise ConfigError: some of them cannot be made; every fault.
    """
    faults = Faults(config.source)
    for key, descriptions in (("listen", config.listen), ("admin", config.admin)):
        faults.of(build_listeners, key, descriptions, None, Sockets(reactor))
    faults.tell()


def check_listeners_are_guarded(listen: Sequence[str], config: Config) -> None:
    """Refuse to open to everybody a listener that strangers can reach.

    :param listen: the listeners that are really open, which a reload cannot change.
    :raise ConfigError: ``auth`` is empty and one of them is not on loopback.
    """
    if config.auth:
        return
    for text in listen:
        if not is_loopback_endpoint(text):
            why = f"must not be empty while {text} is open to others than this machine"
            fault = ConfigFault("auth", why)
            raise ConfigError([fault], config.source)


def build_listeners(
    key: str, descriptions: Sequence[str], factory: Any, sockets: Sockets
) -> list[tuple[str, Any]]:
    """Services for endpoint descriptions, each beside its description; nothing is bound yet.

    :param key: ``listen`` or ``admin``, for the faults.
    :param sockets: what opens them, or has them already.
    :raise ConfigError: no such endpoint, or its parameters are wrong.
    """
    listeners: list[tuple[str, Any]] = []
    faults: list[ConfigFault] = []
    for index, text in enumerate(descriptions):
        try:
            listeners.append((text, strports.service(own_haproxy(text), factory, sockets.reactor_for(text))))
        except Exception as error:  # each endpoint parser has errors of its own
            activation = "" if isinstance(error, BadPair) else why_not_activated(text)
            why = activation or " ".join(str(error).split()) or type(error).__name__
            faults.append(ConfigFault(f"{key}[{index}]", f"{text}: {why}"))
    if faults:
        raise ConfigError(faults)
    return listeners


def build_limiter(config: Config, reactor: Any) -> Any:
    """The configured rate limiter."""
    table = config.rate_limiter
    return plugins.build("rate-limiter", table.plugin, table.options, reactor, where="rate_limiter")


def build_store(config: Config, limiter: Any, reactor: Any) -> Store | None:
    """The shared store: that of ``[store]``, or else the one that the limiter brought along.

    A limiter that has none, and wants one (``use_store``), gets it.

    :raise ConfigError: it wants one, and there is none.
    """
    brought: Store | None = getattr(limiter, "store", None)
    store = Store(config.store, reactor) if config.store else brought
    if brought is None and hasattr(limiter, "use_store"):
        if store is None:
            fault = ConfigFault("rate_limiter.url", "missing: give it here or in [store]")
            raise ConfigError([fault], config.source)
        limiter.use_store(store)
    return store


def build_tracer(config: Config, reactor: Any) -> Tracer | None:
    """Who makes traces, if they are wanted.

    :raise ConfigError: the SDK is missing.
    """
    return Tracer(config.tracing, reactor) if config.tracing.endpoint is not None else None


def build_router(config: Config) -> Any:
    """The configured router."""
    return plugins.build("router", config.router.plugin, config.router.options, where="router")


def build_filters(config: Config, clock: Callable[[], float]) -> Filters:
    """The configured request filters, in their order.

    :raise ConfigError: some of them are not there, or their options are wrong; every fault.
    :raise PluginError: the only fault: one that is not there.
    """
    faults = Faults(config.source)
    made = [
        Filter(
            table.plugin,
            faults.of(plugins.build, "filter", table.plugin, table.options, where=f"filters[{index}]"),
            lenient=table.on_error == "pass",
        )
        for index, table in enumerate(config.filters)
    ]
    faults.tell()
    return Filters(made, clock)


def build_callers(config: Config, dice: Random) -> Callers:
    """The configured checkers; none at all means anybody, on loopback only.

    :raise ConfigError: an ``auth`` entry is wrong.
    """
    checkers = []
    faults: list[ConfigFault] = []
    for index, text in enumerate(config.auth or ("anonymous",)):
        name, _, argument = text.partition(":")
        try:
            checkers.append(plugins.build("credentials", name, argument, where=f"auth[{index}]"))
        except ConfigError as error:
            # A key file has faults of its own: say which file.
            file = f"{error.source}: " if error.source else ""
            faults += [ConfigFault(fault.where, file + fault.what) for fault in error.faults]
        except PluginError as error:
            faults.append(ConfigFault("", str(error)))
        except strcred.StrcredException as error:
            faults.append(ConfigFault(f"auth[{index}]", str(error)))
    if faults:
        raise ConfigError(faults, config.source)
    return Callers(checkers, FailureFlood(), dice)


def body_limits(config: Config) -> BodyLimits:
    """The part of ``[limits]`` that request bodies are read with."""
    limits = config.limits
    return BodyLimits(
        depth=limits.json_depth,
        structural=limits.json_structural,
        number_digits=limits.json_digits,
        messages=limits.messages,
        tools=limits.tools,
        stop=limits.stop,
        n=limits.n,
    )
