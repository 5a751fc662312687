"""The metrics that requests report, as an interface: ``admin.metrics`` counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmgw.values import Usage


class Gap(Protocol):
    """A histogram of the seconds between two pieces of a stream."""

    def observe(self, value: float) -> None:
        """Add one value."""


class IMetrics(Protocol):
    """What requests report to the metrics; ``admin.metrics`` implements it."""

    def request(
        self,
        route: str,
        model: str | None,
        backend: str | None,
        status: int,
        duration_s: float,
        ttft_s: float | None,
        overhead_s: float | None,
        used: Usage | None,
    ) -> None:
        """A request is over. Times are seconds; what was not reached is ``None``."""

    def gaps(self, model: str | None, backend: str) -> Gap:
        """The histogram of a stream's gaps, looked up once per stream."""

    def rejected(self, reason: str) -> None:
        """A request was refused; ``reason`` is an error's code."""

    def no_request(self, status: int) -> None:
        """Bytes that were no request were answered."""

    def retried(self, reason: str) -> None:
        """An attempt failed, and another follows."""

    def exemplify(
        self, model: str | None, backend: str | None, ttft_s: float, label: tuple[str, str], at: float
    ) -> None:
        """A request that may become an exemplar; only called where exemplars are on."""

    def client_abort(self) -> None:
        """A client left."""

    def waited(self, seconds: float) -> None:
        """A request has waited for a slot, with whatever outcome."""

    def held(self, model: str, outcome: str, seconds: float | None) -> None:
        """A request was held for its model; ``seconds`` is ``None`` if it could not be held."""

    def loaded(self, backend: str, model: str, outcome: str, seconds: float) -> None:
        """A load that we started has ended: ``loaded`` or ``failed``."""

    def unloaded(self, backend: str, model: str, why: str) -> None:
        """A model was unloaded: ``evicted``, ``idle`` or ``operator``."""
