"""What goes wrong in a run.

A fault is made from one line, as ``llmgw simulate --fault`` takes it: its name,
then ``key=value`` pairs (``restart node=best at=20 down=3 load=12``). ``best``
and ``worst`` are the nodes with the shortest and longest time to first token
when idle; ``all`` is every node, where that makes sense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from llmgw.errors import ConfigError, ConfigFault
from llmgw.simulation.run import World

MOST = 86_400.0
"""The largest number a fault may have; a run must come to an end."""

PROBE_TOKENS = 200
"""Prompt by which the best and the worst node are told."""


class Kind(Struct, frozen=True):
    """One kind of fault.

    :param book: books it; takes the world, the nodes and the numbers.
    :param node: the default for ``node``; ``""`` if there is no such key.
    :param numbers: the other keys with their defaults.
    """

    help: str
    book: Callable[[World, tuple[str, ...], Mapping[str, float]], object]
    node: str
    numbers: Mapping[str, float]


class Fault(Struct, frozen=True):
    """A fault with its values; calling it with a world books what it does."""

    kind: Kind
    text: str
    node: str
    numbers: Mapping[str, float]

    def __call__(self, world: World) -> None:
        """:raise ConfigError: there is no such node."""
        self.kind.book(world, _nodes(world, self.node, self.text), self.numbers)


def parse_fault(text: str) -> Fault:
    """A fault from its line.

    :raise ConfigError: no such fault or key, or no good value.
    """
    name, *pairs = text.split() or [""]
    kind = FAULTS.get(name)
    if kind is None:
        raise _error(text, f"no such fault; there are {', '.join(FAULTS)}")
    node = kind.node
    numbers = dict(kind.numbers)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key == "node" and kind.node and value:
            node = value
        elif key in numbers and equals:
            numbers[key] = _number(text, key, value)
        else:
            keys = [*(["node"] if kind.node else []), *numbers]
            raise _error(text, f"{pair!r} is not a key with a value; keys are {', '.join(keys) or 'none'}")
    return Fault(kind, text, node, numbers)


# --- what they do -------------------------------------------------------------


def _restart(world: World, nodes: tuple[str, ...], numbers: Mapping[str, float]) -> None:
    for node_id in nodes:
        world.clock.at(numbers["at"], _stop, world, node_id, numbers["down"], numbers["load"])


def _rolling_restart(world: World, nodes: tuple[str, ...], numbers: Mapping[str, float]) -> None:
    for index, node_id in enumerate(nodes):
        at_s = numbers["at"] + index * numbers["gap"]
        world.clock.at(at_s, _stop, world, node_id, numbers["down"], numbers["load"])


def _stop(world: World, node_id: str, down_s: float, load_s: float) -> None:
    place = world.site.places[node_id]
    now_s = world.clock.now_s
    place.refuses_until_s = now_s + down_s
    place.loads_until_s = now_s + down_s + load_s
    place.node.cut("reset")


def _partition(world: World, nodes: tuple[str, ...], numbers: Mapping[str, float]) -> None:
    def lose(node_id: str) -> None:
        world.site.places[node_id].lost_until_s = world.clock.now_s + numbers["for"]

    for node_id in nodes:
        world.clock.at(numbers["at"], lose, node_id)


def _fail_fast(world: World, nodes: tuple[str, ...], numbers: Mapping[str, float]) -> None:
    def turn(node_id: str, share: float) -> None:
        place = world.site.places[node_id]
        place.failing = share
        place.failure = f"status_{numbers['status']:.0f}"

    for node_id in nodes:
        world.clock.at(numbers["at"], turn, node_id, numbers["share"])
        world.clock.at(numbers["at"] + numbers["for"], turn, node_id, 0.0)


def _slow(world: World, nodes: tuple[str, ...], numbers: Mapping[str, float]) -> None:
    def turn(node_id: str, factor: float) -> None:
        node = world.site.places[node_id].node
        node.slowness = factor
        node.touch()

    for node_id in nodes:
        world.clock.at(numbers["at"], turn, node_id, numbers["factor"])
        world.clock.at(numbers["at"] + numbers["for"], turn, node_id, 1.0)


def _hang(world: World, nodes: tuple[str, ...], numbers: Mapping[str, float]) -> None:
    def hang(node_id: str) -> None:
        node = world.site.places[node_id].node
        node.hung_until_s = world.clock.now_s + numbers["for"]
        node.touch()

    for node_id in nodes:
        world.clock.at(numbers["at"], hang, node_id)


def _join(world: World, nodes: tuple[str, ...], numbers: Mapping[str, float]) -> None:
    for node_id in nodes:
        world.absent.add(node_id)
        world.clock.at(numbers["at"], world.meet, node_id)


def _reversed_weights(world: World, nodes: tuple[str, ...], numbers: Mapping[str, float]) -> None:
    ordered = sorted(world.fleet, key=lambda node: node.weight)
    for node, other in zip(ordered, reversed(ordered), strict=True):
        world.weights[node.id] = other.weight


def _equal_weights(world: World, nodes: tuple[str, ...], numbers: Mapping[str, float]) -> None:
    for node in world.fleet:
        world.weights[node.id] = 1.0


FAULTS: Mapping[str, Kind] = {
    "restart": Kind(
        "connections reset, refused for `down` s, then loading for `load` s; the cache is lost",
        _restart,
        "best",
        {"at": 20.0, "down": 3.0, "load": 12.0},
    ),
    "rolling-restart": Kind(
        "every node restarts, one each `gap` s",
        _rolling_restart,
        "all",
        {"at": 20.0, "gap": 20.0, "down": 3.0, "load": 12.0},
    ),
    "partition": Kind(
        "nothing passes the wires for `for` s",
        _partition,
        "all",
        {"at": 20.0, "for": 3.0},
    ),
    "fail-fast": Kind(
        "a `share` of its requests is answered `status` at once, for `for` s",
        _fail_fast,
        "best",
        {"at": 20.0, "for": 40.0, "share": 0.6, "status": 503.0},
    ),
    "slow": Kind(
        "everything takes `factor` times as long, for `for` s",
        _slow,
        "best",
        {"at": 20.0, "for": 10.0, "factor": 20.0},
    ),
    "hang": Kind(
        "it accepts requests and does nothing, for `for` s",
        _hang,
        "best",
        {"at": 20.0, "for": 20.0},
    ),
    "join": Kind(
        "gateways learn of it at `at` s",
        _join,
        "best",
        {"at": 20.0},
    ),
    "reversed-weights": Kind("gateways believe the slowest is the fastest", _reversed_weights, "", {}),
    "equal-weights": Kind("nobody told the gateways any weight", _equal_weights, "", {}),
}
"""Every kind of fault by its name."""


# --- inside -------------------------------------------------------------------


def _nodes(world: World, name: str, text: str) -> tuple[str, ...]:
    fleet = world.fleet
    ordered = sorted(fleet, key=lambda node: node.idle_ttft_s(PROBE_TOKENS))
    if name in ("", "all"):
        return tuple(node.id for node in fleet)
    if name == "best":
        return (ordered[0].id,)
    if name == "worst":
        return (ordered[-1].id,)
    if name in world.site.places:
        return (name,)
    raise _error(text, f"no such node {name!r}; there are {', '.join(node.id for node in fleet)}")


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    most = 1.0 if key == "share" else MOST
    if not 0.0 <= number <= most:
        raise _error(text, f"{key} must be a number from 0 to {most:g}")
    if key == "factor" and number == 0.0:
        raise _error(text, "factor must be above 0")
    return number


def _error(text: str, what: str) -> ConfigError:
    return ConfigError([ConfigFault(f"fault {text!r}", what)])
