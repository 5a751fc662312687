"""Weighted least connections: the fewest requests of ours for its weight.

A good simple router for a fleet of unlike machines, provided the weights are
about right: wrong ones are followed faithfully, as nothing is measured.
"""

from __future__ import annotations

from llmgw.routing.least_connections import LeastConnections


class WeightedLeastConnections(LeastConnections):
    """Least connections with ``(in_flight + 1) / (weight x warmth)`` as the cost."""

    weighted = True
