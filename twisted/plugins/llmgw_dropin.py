"""What llmgw offers to Twisted: names only.

Every Twisted program of the environment may import this module, so it must stay
cheap and install no reactor. No ``__init__.py`` may ever stand beside it or one
level up: the wheel would overwrite Twisted's own (see ``docs/development.md``).
"""

from twisted.application.reactors import Reactor
from twisted.application.service import ServiceMaker

from llmgw.builtins import (
    adaptive,
    command_loader,
    deny_pattern,
    dns_discovery,
    etcd_discovery,
    expected_ttft,
    http_health,
    keys_checker,
    kubernetes_discovery,
    least_connections,
    llamacpp_health,
    llamacpp_router_loader,
    local_limiter,
    ollama_loader,
    peak_ewma,
    power_of_two,
    prefix_hash,
    prometheus_health,
    redis_limiter,
    round_robin,
    static_discovery,
    weighted_least_connections,
    weighted_round_robin,
)
from llmgw.listen.parsers import llmtls, proxied

__all__ = [
    "adaptive",
    "command_loader",
    "deny_pattern",
    "dns_discovery",
    "etcd_discovery",
    "expected_ttft",
    "gateway",
    "http_health",
    "keys_checker",
    "kubernetes_discovery",
    "least_connections",
    "llamacpp_health",
    "llamacpp_router_loader",
    "llmtls",
    "local_limiter",
    "ollama_loader",
    "peak_ewma",
    "power_of_two",
    "prefix_hash",
    "prometheus_health",
    "proxied",
    "redis_limiter",
    "round_robin",
    "static_discovery",
    "uvloop",
    "weighted_least_connections",
    "weighted_round_robin",
]

gateway = ServiceMaker("llmgw", "llmgw.tap", "LLM inference gateway", "llmgw")
uvloop = Reactor("uvloop", "llmgw.wire.reactor", "asyncio reactor on uvloop (extra: fast)")
