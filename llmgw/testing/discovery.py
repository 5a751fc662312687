"""The contract of discoveries, as tests.

Where backends are learnt from is different for each, so the author's test says
how to bring one about: see the hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from llmgw.interfaces import IDiscovery, IDiscoveryFactory
from llmgw.testing.shared import FactoryContract, class_name, contract


class DiscoveryContract(FactoryContract):
    """What every discovery must keep. Hooks: :meth:`know` and :meth:`run`."""

    interface = IDiscoveryFactory
    product = IDiscovery

    def know(self, clock: Clock, entries: Sequence[Mapping[str, Any]]) -> None:
        """Override: make the source know exactly ``entries`` (``id`` and ``url`` each).

        Called before ``start`` and again while it runs. Without it, only what
        needs no backend is tested.
        """
        raise NotImplementedError

    def run(self, clock: Clock) -> None:
        """Let it notice; a minute of the clock here."""
        for _ in range(600):
            clock.advance(0.1)

    def test_it_tells_the_whole_set_at_each_change(self) -> None:
        """Added, changed and removed backends are all told by one whole set."""
        clock = Clock()
        first, second = {"id": "a", "url": "http://10.0.0.1:8080"}, {"id": "b", "url": "http://10.0.0.2:8080"}
        if not self._knows(clock, [first]):
            return
        updates: list[Sequence[Mapping[str, Any]]] = []
        discovery = self.build(self.options, clock)
        discovery.start(updates.append)
        for entries in ([first], [first, second], [second], []):
            self.know(clock, entries)
            self.run(clock)
            assert updates, "no update"
            told = {entry["id"]: entry["url"] for entry in updates[-1]}
            assert told == {entry["id"]: entry["url"] for entry in entries}, f"told {told}"
        self._stop(discovery, clock)

    def test_nothing_comes_after_stop(self) -> None:
        """No update, and nothing left in the reactor."""
        clock = Clock()
        knows = self._knows(clock, [{"id": "a", "url": "http://10.0.0.1:8080"}])
        updates: list[Sequence[Mapping[str, Any]]] = []
        discovery = self.build(self.options, clock)
        discovery.start(updates.append)
        self._stop(discovery, clock)
        seen = len(updates)
        if knows:
            self.know(clock, [])
        self.run(clock)
        assert len(updates) == seen, "an update came after stop"

    def _knows(self, clock: Clock, entries: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self.know(clock, entries)
        except NotImplementedError:
            return False
        return True

    def _stop(self, discovery: Any, clock: Clock) -> None:
        stopped = discovery.stop()
        if isinstance(stopped, Deferred):
            results: list[Any] = []
            stopped.addBoth(results.append)
            self.run(clock)
            assert results, "stop did not end"
            if isinstance(results[0], Failure):
                results[0].raiseException()
        calls = clock.getDelayedCalls()
        assert not calls, f"stop left calls behind: {calls}"


def discovery_contract(factory: Any, options: Mapping[str, Any] | None = None) -> type[DiscoveryContract]:
    """Tests for a discovery's factory; subclass the result to give :meth:`~DiscoveryContract.know`."""
    name = class_name(factory, DiscoveryContract)
    return contract(DiscoveryContract, name, factory=factory, options=options or {})
