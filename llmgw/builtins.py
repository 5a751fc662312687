"""The built-in plugins, offered through the same door as anybody's.

``twisted/plugins/llmgw_dropin.py`` names them. Routers are pure and do not know
the plugin contract; here they are declared to keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zope.interface import classImplements, implementer

from llmgw.interfaces import CONTRACT, IOrderingRouter, IRouter, IRouterFactory
from llmgw.routing.adaptive import Adaptive
from llmgw.routing.expected_ttft import ExpectedTtft
from llmgw.routing.least_connections import LeastConnections
from llmgw.routing.peak_ewma import PeakEwma
from llmgw.routing.power_of_two import PowerOfTwo
from llmgw.routing.prefix_hash import PrefixHash
from llmgw.routing.round_robin import RoundRobin
from llmgw.routing.weighted_least_connections import WeightedLeastConnections
from llmgw.routing.weighted_round_robin import WeightedRoundRobin

classImplements(Adaptive, IRouter)
classImplements(RoundRobin, IRouter)
classImplements(WeightedRoundRobin, IRouter)
classImplements(LeastConnections, IRouter)
classImplements(WeightedLeastConnections, IRouter)
classImplements(PowerOfTwo, IRouter)
classImplements(ExpectedTtft, IOrderingRouter)
classImplements(PeakEwma, IRouter)
classImplements(PrefixHash, IRouter)


@implementer(IRouterFactory)
class RouterFactory:
    """Offers a router class under a name.

    :param make: builds it from its options, raising ``ConfigError``.
    """

    contract = CONTRACT

    def __init__(self, name: str, description: str, make: Callable[[Mapping[str, Any]], Any]) -> None:
        self.name = name
        self.description = description
        self._make = make

    def build(self, options: Mapping[str, Any]) -> Any:
        """:raise ConfigError: options are wrong."""
        return self._make(options)


adaptive = RouterFactory(
    "adaptive",
    "highest weight over load and measured time to first token",
    Adaptive.from_options,
)
round_robin = RouterFactory(
    "round-robin",
    "everyone in turn",
    RoundRobin.from_options,
)
weighted_round_robin = RouterFactory(
    "weighted-round-robin",
    "turns in proportion to weight, smoothly mixed",
    WeightedRoundRobin.from_options,
)
least_connections = RouterFactory(
    "least-connections",
    "fewest requests in flight",
    LeastConnections.from_options,
)
weighted_least_connections = RouterFactory(
    "weighted-least-connections",
    "fewest requests in flight for its weight",
    WeightedLeastConnections.from_options,
)
power_of_two = RouterFactory(
    "power-of-two",
    "the less loaded of two drawn at random",
    PowerOfTwo.from_options,
)
expected_ttft = RouterFactory(
    "expected-ttft",
    "least expected time to first token, learned, with cached prefixes",
    ExpectedTtft.from_options,
)
peak_ewma = RouterFactory(
    "peak-ewma",
    "lowest recent duration times load, quick to believe bad news",
    PeakEwma.from_options,
)
prefix_hash = RouterFactory(
    "prefix-hash",
    "equal beginnings to equal backends, within bounds of load",
    PrefixHash.from_options,
)

from llmgw.access.keys import KeysCheckerFactory  # noqa: E402
from llmgw.discovery.dns import DnsDiscoveryFactory  # noqa: E402
from llmgw.discovery.etcd import EtcdDiscoveryFactory  # noqa: E402
from llmgw.discovery.kubernetes import KubernetesDiscoveryFactory  # noqa: E402
from llmgw.discovery.static import StaticDiscoveryFactory  # noqa: E402
from llmgw.filters.deny_pattern import DenyPatternFactory  # noqa: E402
from llmgw.health.http import HttpHealthFactory  # noqa: E402
from llmgw.health.llamacpp import LlamaCppHealthFactory  # noqa: E402
from llmgw.health.prometheus import PrometheusHealthFactory  # noqa: E402
from llmgw.loading.command import CommandFactory  # noqa: E402
from llmgw.loading.llamacpp_router import LlamaCppRouterFactory  # noqa: E402
from llmgw.loading.ollama import OllamaFactory  # noqa: E402
from llmgw.ratelimit.local import LocalRateLimiterFactory  # noqa: E402
from llmgw.ratelimit.plugin import RedisRateLimiterFactory  # noqa: E402

deny_pattern = DenyPatternFactory()
llamacpp_health = LlamaCppHealthFactory()
http_health = HttpHealthFactory()
prometheus_health = PrometheusHealthFactory()
llamacpp_router_loader = LlamaCppRouterFactory()
ollama_loader = OllamaFactory()
command_loader = CommandFactory()
local_limiter = LocalRateLimiterFactory()
redis_limiter = RedisRateLimiterFactory()
keys_checker = KeysCheckerFactory()
static_discovery = StaticDiscoveryFactory()
etcd_discovery = EtcdDiscoveryFactory()
dns_discovery = DnsDiscoveryFactory()
kubernetes_discovery = KubernetesDiscoveryFactory()
