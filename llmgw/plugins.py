"""Finds, verifies and builds plugins.

``twisted.plugin`` does the finding, in the package ``twisted.plugins``; our own
built-ins come through the same door. This module adds what it leaves out:

- a dropin that cannot be imported is only logged and skipped by Twisted; here
  its file and cause are kept and quoted when a configured name is missing;
- objects come in file-system order; here order never decides anything, two
  plugins of one kind and name are an error that tells both places;
- factories and what they build are verified against their interface, and a
  factory written for another contract number is refused.

One look at the plugin directories serves the whole process (Twisted imports
every broken dropin again, and logs its traceback again, at each look);
:func:`forget` makes the next call look anew.

Known weakness: a dropin that holds a factory's *class* instead of an instance
is not seen by Twisted and therefore not by us.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from twisted.cred.checkers import ICredentialsChecker
from twisted.cred.strcred import InvalidAuthArgumentString

from llmgw.dropins import (
    CREDENTIALS,
    KINDS,
    BrokenDropin,
    Found,
    not_plain,
    one_line,
    owners_of,
    survey,
    unverified,
)
from llmgw.errors import PLUGIN_FAULTS, ConfigError, ConfigFault, PluginError
from llmgw.interfaces import (
    IDiscovery,
    IHealthSource,
    IModelLoader,
    IOrderingRouter,
    IRateLimiter,
    IRequestFilter,
    IRouter,
)

__all__ = [
    "CREDENTIALS",
    "KINDS",
    "PRODUCTS",
    "BrokenDropin",
    "PluginInfo",
    "broken",
    "build",
    "describe",
    "find",
    "forget",
    "installed",
]

PRODUCTS: Mapping[str, Any] = {
    "router": IRouter,
    "health": IHealthSource,
    "filter": IRequestFilter,
    "rate-limiter": IRateLimiter,
    "discovery": IDiscovery,
    "model-loader": IModelLoader,
    CREDENTIALS: ICredentialsChecker,
}
"""What the factories of each kind must build."""

PLAIN: Mapping[Any, Sequence[str]] = {
    IRouter: ("choose", "observe", "adapt"),
    IOrderingRouter: ("order",),
    IHealthSource: ("start", "stop", "look_soon"),
    IRequestFilter: ("check",),
    IRateLimiter: ("admit", "settle", "top_up", "gauges", "use_store"),
    IDiscovery: ("start",),
    IModelLoader: ("start",),
}
"""Methods that do their work when they are called."""


class PluginInfo(Struct, frozen=True):
    """One plugin as told to people.

    :param module: the dropin it was found in.
    :param distribution: the installed distribution that owns the dropin, ``""`` if none does.
    :param fault: why it cannot be used, ``""`` if it can.
    """

    kind: str
    name: str
    description: str
    module: str
    file: str
    distribution: str = ""
    version: str = ""
    fault: str = ""


# --- what others call ---------------------------------------------------------


def installed(kind: str) -> dict[str, Any]:
    """Usable factories of ``kind`` by name, sorted; duplicate and faulty ones are left out.

    :raise PluginError: there is no such kind.
    """
    _interface(kind)
    candidates = [plugin for plugin in survey().found if plugin.kind == kind]
    names = [plugin.name for plugin in candidates]
    return {
        plugin.name: plugin.factory
        for plugin in candidates
        if not plugin.fault and names.count(plugin.name) == 1
    }


def find(kind: str, name: str) -> Any:
    """The factory that a configured name means.

    :raise PluginError: nobody has that name, two have it, or the one that has it is unfit.
    """
    _interface(kind)
    same = [plugin for plugin in survey().found if plugin.kind == kind and plugin.name == name]
    if not same:
        raise PluginError(_unknown(kind, name))
    if len(same) > 1:
        raise PluginError(f"{kind} {name!r} is {_clash(same)}")
    if same[0].fault:
        raise PluginError(f"{kind} {name!r} ({_place(same[0])}): {same[0].fault}")
    return same[0].factory


def build(kind: str, name: str, options: Mapping[str, Any] | str, *args: Any, where: str = "") -> Any:
    """Build and verify what the plugin makes.

    :param options: the plugin's table (the key ``plugin`` is taken out here); for
        ``credentials`` the text after the first colon of the ``auth`` entry.
    :param args: what ``build`` of that kind takes beside, such as the reactor.
    :param where: path of the table in the config, such as ``health[1]``; put before
        the path of each fault.
    :raise ConfigError: the plugin refused its options.
    :raise PluginError: no such plugin, it failed, or what it made lacks something.
    """
    try:
        factory = find(kind, name)
    except PluginError as error:
        at = f"{where}.plugin" if where and kind != CREDENTIALS else where
        raise PluginError(f"{at}: {error}" if at else str(error)) from None
    at = f"{where}: " if where else ""
    try:
        if isinstance(options, str):
            product = factory.generateChecker(options)
        else:
            product = factory.build({key: options[key] for key in options if key != "plugin"}, *args)
    except ConfigError as error:
        faults = [ConfigFault(_under(where, fault.where), fault.what) for fault in error.faults]
        raise ConfigError(faults, error.source) from error
    except InvalidAuthArgumentString as error:
        raise ConfigError([ConfigFault(where, f"{name}: {error}")]) from error
    except PluginError:
        raise
    except PLUGIN_FAULTS as error:
        raise PluginError(f"{at}{kind} {name!r} failed to build: {one_line(error)}") from error
    product_kinds = [PRODUCTS[kind]]
    if IOrderingRouter.providedBy(product):
        product_kinds.append(IOrderingRouter)
    for interface in product_kinds:
        fault = unverified(interface, product) or not_plain(product, PLAIN.get(interface, ()))
        if fault:
            raise PluginError(f"{at}{kind} {name!r} built something unfit: {fault}")
    return product


def describe() -> list[PluginInfo]:
    """Every plugin found, fit or not, by kind and name, with its distribution."""
    found = survey().found
    owners = owners_of({plugin.file for plugin in found})
    infos = []
    for plugin in found:
        same = [other for other in found if (other.kind, other.name) == (plugin.kind, plugin.name)]
        owned = owners.get(plugin.file, [])
        fault = _clash(same) if len(same) > 1 else plugin.fault
        if not fault and len(owned) > 1:
            fault = f"its file belongs to several distributions: {' and '.join(name for name, _ in owned)}"
        distribution, version = owned[0] if owned else ("", "")
        infos.append(
            PluginInfo(
                plugin.kind,
                plugin.name,
                plugin.description,
                plugin.module,
                plugin.file,
                distribution,
                version,
                fault,
            )
        )
    return infos


def broken() -> list[BrokenDropin]:
    """Dropins that could not be imported, by file; any package's, since nobody can know whose they are."""
    return list(survey().broken)


def forget() -> None:
    """Look at the plugin directories again at the next call."""
    survey.cache_clear()


# --- words --------------------------------------------------------------------


def _interface(kind: str) -> Any:
    if kind not in KINDS:
        raise PluginError(f"no such kind of plugin: {kind!r}; kinds are {', '.join(KINDS)}")
    return KINDS[kind]


def _unknown(kind: str, name: str) -> str:
    names = list(installed(kind))
    parts = [f"no {kind} named {name!r} is installed"]
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        parts.append(f"did you mean {near[0]!r}?")
    parts.append(f"installed: {', '.join(names) or 'none'}")
    look = survey()
    parts += [f"unfit: {p.name} ({_place(p)}): {p.fault}" for p in look.found if p.kind == kind and p.fault]
    parts += [f"broken dropin {dropin.file}: {dropin.cause}" for dropin in look.broken]
    return "; ".join(parts)


def _clash(same: list[Found]) -> str:
    return f"installed twice, by {' and by '.join(_place(plugin) for plugin in same)}: uninstall one of them"


def _place(plugin: Found) -> str:
    owned = owners_of({plugin.file}).get(plugin.file, [])
    named = ", ".join(f"{name} {version}" for name, version in owned) or plugin.file or "no distribution"
    return f"{plugin.module} of {named}"


def _under(where: str, key: str) -> str:
    return f"{where}{'' if not where or not key or key.startswith('[') else '.'}{key}"
