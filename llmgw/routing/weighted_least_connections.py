"""Weighted least connections: the fewest requests of ours for its weight.

A good simple router for a fleet of unlike machines, provided the weights are
about right: wrong ones are followed faithfully, as nothing is measured.
"""

from __future__ import annotations

from llmgw.routing.least_connections import LeastConnections, load
from llmgw.values import Backend


class WeightedLeastConnections(LeastConnections):
    """Least connections with ``(in_flight + 1) / weight`` as the cost."""

    def cost(self, backend: Backend) -> float:
        """Requests there, with the one to place, over weight and warmth."""
        return load(backend, backend.weight)
