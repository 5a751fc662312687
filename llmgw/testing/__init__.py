"""For plugin authors: contract tests and fakes. Public, and kept stable.

Each ``…_contract`` function takes a factory and returns a class of tests for
pytest. One line in your test file proves that your plugin keeps the contract::

    from llmgw.testing import router_contract
    from my_package import sticky

    TestSticky = router_contract(sticky, {"vnodes": 64})

Subclass instead of assigning to add your own tests or to override a hook (the
methods and attributes documented on the contract class). Our own plugins run
the same suite in ``tests/test_testing.py``.

Nothing here needs pytest itself, real time, a reactor or the network, but for
:class:`FaultProxy`, which stands before a server and breaks its connections.
"""

from llmgw.testing.access import CredentialsContract, credentials_contract
from llmgw.testing.discovery import DiscoveryContract, discovery_contract
from llmgw.testing.fakes import FakeHealthTarget, backends, candidate, request
from llmgw.testing.faults import FAULTS, Fault, FaultProxy
from llmgw.testing.filters import RequestFilterContract, request_filter_contract, submission
from llmgw.testing.health import HealthSourceContract, health_source_contract
from llmgw.testing.loading import ModelLoaderContract, model_loader_contract
from llmgw.testing.rate_limits import RateLimiterContract, rate_limiter_contract
from llmgw.testing.routers import RouterContract, router_contract

__all__ = [
    "FAULTS",
    "CredentialsContract",
    "DiscoveryContract",
    "FakeHealthTarget",
    "Fault",
    "FaultProxy",
    "HealthSourceContract",
    "ModelLoaderContract",
    "RateLimiterContract",
    "RequestFilterContract",
    "RouterContract",
    "backends",
    "candidate",
    "credentials_contract",
    "discovery_contract",
    "health_source_contract",
    "model_loader_contract",
    "rate_limiter_contract",
    "request",
    "request_filter_contract",
    "router_contract",
    "submission",
]
