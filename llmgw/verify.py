"""Whether a configuration would start: one gateway of it, or the parent of several."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from llmgw import writable
from llmgw.config import BackendConfig, Config, Misread, PluginConfig
from llmgw.errors import ConfigError, ConfigFault
from llmgw.gathering import Faults

GOOD: Mapping[str, Any] = {
    "listen": "tcp:0:interface=127.0.0.1",
    "admin": "tcp:0:interface=127.0.0.1",
    "auth": "anonymous",
    "backends": BackendConfig(id="good", url="http://localhost"),
    "health": PluginConfig("llamacpp"),
    "discovery": None,
    "filters": None,
}
"""Arrays whose entries name plugins, endpoints or files, and an entry in which nothing can be
wrong; ``None`` where there is none, and then one wrong entry hides the others."""


def verify(config: Config, reactor: Any, user: writable.User = writable.OURSELVES) -> Sequence[str]:
    """Build what ``config`` says and throw it away, and look at the places where it writes; it
    touches no network.

    :param user: who the daemon will become.
    :return: what is worth a warning.
    :raise ConfigError: some part of it is wrong.
    :raise PluginError: a plugin is missing or unfit.
    """
    faults = writable.cannot_start(config, user)
    try:
        warnings = _built(config, reactor)
    except ConfigError as error:
        raise ConfigError([*error.faults, *faults], config.source) from None
    if faults:
        raise ConfigError(faults, config.source)
    return [*warnings, *writable.cannot_keep(config, user)]


def with_what_else(error: ConfigError, reactor: Any) -> ConfigError:
    """``error`` of reading a configuration, and what is wrong with the plugins, endpoints and files
    that its good keys name, so that all faults are told at once."""
    if not isinstance(error, Misread):
        return error
    from llmgw import assembly
    from llmgw.backends import verify_backends

    rest, wrong = _made_good(error.rest, error.faults)
    faults = Faults(error.source)
    faults.of(assembly.check_discoveries, rest, reactor)
    if "rate_limiter" not in wrong:
        faults.of(assembly.build_limiter, rest, reactor)
    if "router" not in wrong:
        faults.of(assembly.build_router, rest)
    faults.of(assembly.build_callers, rest, random.Random())
    faults.of(assembly.build_filters, rest, float)
    faults.of(verify_backends, rest, reactor)
    faults.of(assembly.check_listeners, rest, reactor)
    return ConfigError([*error.faults, *faults.told(), *writable.cannot_start(rest)], error.source)


def _made_good(config: Config, faults: Sequence[ConfigFault]) -> tuple[Config, set[str]]:
    """``config`` with a good entry for each wrong one, and the keys below which something is wrong."""
    wrong: set[str] = set()
    arrays: dict[str, Any] = {}
    for fault in faults:
        place = re.match(r"(--)?(\w+)(?:\[(\d+)\])?", fault.where)
        if place is None:
            continue
        option, key, index = place.groups()
        key = "backends" if option and key == "backend" else key
        wrong.add(key)
        if key in GOOD and index is not None:
            entries = arrays.get(key, getattr(config, key))
            number = int(index)
            arrays[key] = () if GOOD[key] is None else (*entries[:number], GOOD[key], *entries[number + 1 :])
    return replace(config, **arrays), wrong


def _built(config: Config, reactor: Any) -> Sequence[str]:
    if config.workers > 1:
        from llmgw.workers import service

        return service.verify(config, reactor)[1]
    from llmgw.service import GatewayService

    return GatewayService(config, reactor).warnings
