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
        updates = _Updates()
        discovery = self.build(self.options, clock)
        discovery.start(updates.take)
        for entries in ([first], [first, second], [second], []):
            self.know(clock, entries)
            self.run(clock)
            assert updates, "no update"
            _check_shown(discovery)
            told = {entry["id"]: entry["url"] for entry in updates[-1]}
            assert told == {entry["id"]: entry["url"] for entry in entries}, f"told {told}"
        self._stop(discovery, clock)

    def test_nothing_comes_after_stop(self) -> None:
        """No update, and nothing left in the reactor."""
        clock = Clock()
        knows = self._knows(clock, [{"id": "a", "url": "http://10.0.0.1:8080"}])
        updates = _Updates()
        discovery = self.build(self.options, clock)
        discovery.start(updates.take)
        _check_shown(discovery)
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


class _Updates(list[Sequence[Mapping[str, Any]]]):
    """What was told, each looked at as it came."""

    def take(self, entries: Any) -> None:
        lawful = isinstance(entries, Sequence) and not isinstance(entries, str)
        assert lawful, f"told {entries!r}, which is no sequence"
        for entry in entries:
            assert isinstance(entry, Mapping), f"told of {entry!r}, which is no table"
            told = ("key", "fault") if "fault" in entry else ("id", "url")
            for name in told:
                assert isinstance(entry.get(name), str), f"{name!r} of {dict(entry)} is no text"
        self.append(entries)


def _check_shown(discovery: Any) -> None:
    """What operators are shown, where it is there."""
    connected, error = getattr(discovery, "connected", True), getattr(discovery, "error", "")
    contact_s = getattr(discovery, "contact_s", None)
    assert isinstance(connected, bool), f"connected is {connected!r}"
    assert isinstance(error, str), f"error is {error!r}"
    assert "\n" not in error, "error is more than one line"
    assert contact_s is None or isinstance(contact_s, (float, int)), f"contact_s is {contact_s!r}"


def discovery_contract(factory: Any, options: Mapping[str, Any] | None = None) -> type[DiscoveryContract]:
    """Tests for a discovery's factory; subclass the result to give :meth:`~DiscoveryContract.know`."""
    name = class_name(factory, DiscoveryContract)
    return contract(DiscoveryContract, name, factory=factory, options=options or {})
