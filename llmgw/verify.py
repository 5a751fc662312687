"""Whether a configuration would start: one gateway of it, or the parent of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmgw import writable
from llmgw.config import Config
from llmgw.errors import ConfigError


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


def _built(config: Config, reactor: Any) -> Sequence[str]:
    if config.workers > 1:
        from llmgw.workers import service

        return service.verify(config, reactor)[1]
    from llmgw.service import GatewayService

    return GatewayService(config, reactor).warnings
