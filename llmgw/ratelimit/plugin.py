"""The plugin of the limiter ``redis``: its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.config import parse_store
from llmgw.errors import ConfigError, ConfigFault
from llmgw.interfaces import CONTRACT, IRateLimiterFactory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmgw.ratelimit.redis import RedisRateLimiter

ON_LOSS = ("local", "open", "closed")


@implementer(IPlugin, IRateLimiterFactory)
class RedisRateLimiterFactory:
    """Builds :class:`RedisRateLimiter`."""

    name = "redis"
    description = "One count for all gateways, through a shared Redis or Valkey."
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], reactor: Any) -> RedisRateLimiter:
        """With ``url`` or ``sentinels`` it brings its own store, else it gets that of ``[store]``.

        :param options: ``on_redis_loss``, and the keys of ``[store]``.
        :raise ConfigError: an option is wrong.
        """
        # Only where it is used: this module is imported by every Twisted program.
        from llmgw.ratelimit.redis import RedisRateLimiter
        from llmgw.store.store import Store

        faults: list[ConfigFault] = []
        rest = dict(options)
        on_loss = rest.pop("on_redis_loss", "local")
        if on_loss not in ON_LOSS:
            faults.append(ConfigFault("on_redis_loss", f"must be one of {', '.join(ON_LOSS)}"))
        store = None
        try:
            config = parse_store(rest)
        except ConfigError as error:
            faults += error.faults
        else:
            store = Store(config, reactor) if config else None
        if faults:
            raise ConfigError(faults)
        return RedisRateLimiter(reactor, on_loss=on_loss, store=store)
