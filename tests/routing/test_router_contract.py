"""The plugin contract, run on every built-in router, and options of the plain ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from llmgw import builtins
from llmgw.errors import ConfigError
from llmgw.testing import router_contract

FACTORIES = [
    builtins.adaptive,
    builtins.round_robin,
    builtins.weighted_round_robin,
    builtins.least_connections,
    builtins.weighted_least_connections,
    builtins.power_of_two,
]

TestAdaptive = router_contract(builtins.adaptive)
TestAdaptiveWithOptions = router_contract(builtins.adaptive, {"alpha": 0.5, "streak": 1, "trial_s": 0.1})
TestRoundRobin = router_contract(builtins.round_robin)
TestWeightedRoundRobin = router_contract(builtins.weighted_round_robin)
TestLeastConnections = router_contract(builtins.least_connections)
TestWeightedLeastConnections = router_contract(builtins.weighted_least_connections)
TestPowerOfTwo = router_contract(builtins.power_of_two)


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda each: each.name)
@pytest.mark.parametrize("options", [{"weight": 1}, {"seed": "x"}, {"": None}])
def test_wrong_options_are_named(factory: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        factory.build(options)
    assert [fault.where for fault in caught.value.faults] == list(options)


def test_names_are_those_of_the_manual() -> None:
    assert [factory.name for factory in FACTORIES] == [
        "adaptive",
        "round-robin",
        "weighted-round-robin",
        "least-connections",
        "weighted-least-connections",
        "power-of-two",
    ]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda each: each.name)
def test_none_of_them_wants_events(factory: Any) -> None:
    assert factory.build({}).observes is False


def test_routers_do_not_load_twisted() -> None:
    names = ("adaptive", "round_robin", "weighted_round_robin", "weighted_least_connections", "power_of_two")
    code = "".join(f"import llmgw.routing.{name}\n" for name in names)
    code += "import llmgw.core.fleet, sys\nsys.exit('twisted' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
