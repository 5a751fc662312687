"""The contract of model loaders, as tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from llmgw.errors import ModelLoading
from llmgw.interfaces import IModelLoader, IModelLoaderFactory
from llmgw.testing.fakes import Answer, FakeHealthTarget
from llmgw.testing.shared import FactoryContract, class_name, contract

STATES = frozenset({"loaded", "loading", "unloaded", "failed"})


class ModelLoaderContract(FactoryContract):
    """What every model loader must keep.

    Hooks, since each talks to a server of its own kind: :meth:`make` gives a
    loader before a server that has :attr:`model` and not :attr:`unknown`;
    :meth:`run` lets time pass there.

    :cvar answers: the fake backend's answers, for loaders that only ``get``.
    """

    interface = IModelLoaderFactory
    product = IModelLoader
    answers: Mapping[str, Answer] = {}
    model = ""
    unknown = "no-such-model"

    def build(self, options: Mapping[str, Any], clock: Clock) -> Any:
        """Loaders get the backend, too."""
        return self.factory.build(options, FakeHealthTarget(clock, self.answers), clock)

    def make(self, clock: Clock) -> Any:
        """A loader that has its server."""
        return self.build(self.options, clock)

    def run(self, clock: Clock) -> None:
        """Ten minutes of the clock, in steps."""
        for _ in range(1200):
            clock.advance(0.5)

    def test_models_have_known_states(self) -> None:
        """Names to one of four words."""
        if not self.model:
            return
        models = self._result(lambda loader: loader.models())
        assert self.model in models, f"{self.model!r} is not among {sorted(models)}"
        strange = set(models.values()) - STATES
        assert not strange, f"unknown states: {strange}"

    def test_a_load_that_cannot_be_fails_clearly(self) -> None:
        """``ModelLoading``, with the reason in words."""
        if not self.model:
            return
        try:
            self._result(lambda loader: loader.load(self.unknown))
        except ModelLoading as error:
            reason = error.message
        else:
            raise AssertionError("an unknown model was loaded")
        assert reason, "the failure says nothing"

    def test_loading_and_unloading_end(self) -> None:
        """Loading what is loaded is no error."""
        if not self.model:
            return
        clock = Clock()
        loader = self.make(clock)
        for step in (loader.load, loader.load, loader.unload):
            self._wait(step(self.model), clock)

    def test_a_wait_can_be_given_up(self) -> None:
        """Cancelling leaves nothing in the reactor."""
        if not self.model:
            return
        clock = Clock()
        waiting = self.make(clock).load(self.model)
        waiting.addErrback(lambda failure: None)
        waiting.cancel()
        calls = clock.getDelayedCalls()
        assert not calls, f"cancelling left calls behind: {calls}"

    def _result(self, ask: Any) -> Any:
        clock = Clock()
        return self._wait(ask(self.make(clock)), clock)

    def _wait(self, answer: Deferred[Any], clock: Clock) -> Any:
        results: list[Any] = []
        answer.addBoth(results.append)
        if not results:
            self.run(clock)
        assert results, "no answer in ten minutes"
        if isinstance(results[0], Failure):
            results[0].raiseException()
        return results[0]


def model_loader_contract(
    factory: Any,
    options: Mapping[str, Any] | None = None,
    answers: Mapping[str, Answer] | None = None,
    model: str = "",
) -> type[ModelLoaderContract]:
    """Tests for a model loader's factory.

    :param model: a model its server has; without one only the factory is tested.
    """
    return contract(
        ModelLoaderContract,
        class_name(factory, ModelLoaderContract),
        factory=factory,
        options=options or {},
        answers=answers or {},
        model=model,
    )
