"""Whether a configuration would start: one gateway of it, or the parent of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmgw.config import Config


def verify(config: Config, reactor: Any) -> Sequence[str]:
    """Build what ``config`` says and throw it away; it touches no network.

    :return: what is worth a warning.
    :raise ConfigError: some part of it is wrong.
    :raise PluginError: a plugin is missing or unfit.
    """
    if config.workers > 1:
        from llmgw.workers import service

        return service.verify(config, reactor)[1]
    from llmgw.service import GatewayService

    return GatewayService(config, reactor).warnings
