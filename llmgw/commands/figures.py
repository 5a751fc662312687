"""Figures and pictures of one line for the terminal, and a backend's state in one word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
SLOW_TIMES = 3.0
SLOW_LEAST_S = 0.2
"""As on the dashboard: see ``admin/dashboard/findings.js``."""


def seconds(value: float | None) -> str:
    """Two or three digits and a unit."""
    if value is None:
        return "–"
    if value < 0.0095:
        return f"{value * 1000:.1f} ms"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 9.95 else f"{value:.0f} s"


def figure(value: float | None) -> str:
    """Two or three digits."""
    if value is None:
        return "–"
    if 0 < abs(value) < 0.001:
        return "0.00"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f}M"
    if abs(value) >= 1e3:
        return f"{value / 1e3:.1f}k"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def bar(used: int, most: int | None, width: int = 8) -> str:
    """``██░░``: a block for each slot, or a share of ``width`` where there are many."""
    if not most:
        return ""
    size = most if most <= width else width
    filled = used if most <= width else round(size * used / most)
    filled = min(size, filled)
    return "█" * filled + "░" * (size - filled)


def spark(values: Sequence[float | None], top: float) -> str:
    """One block a value, 0 to ``top``; a gap is a space."""
    last = len(BLOCKS) - 1
    return "".join(
        " " if value is None else BLOCKS[min(last, round(last * value / top))] if top > 0 else BLOCKS[0]
        for value in values
    )


def state_of(backend: Mapping[str, Any]) -> tuple[str, str]:
    """A word, and a tone: ``good``, ``warn``, ``bad`` or ``idle``."""
    standing = backend.get("standing")
    for word, tone, holds in (
        ("leaving", "idle", backend.get("removed")),
        ("draining", "idle", backend.get("draining")),
        ("down", "bad", standing == "down"),
        ("loading", "warn", backend.get("loading")),
        ("paused", "warn", standing == "busy"),
        ("taken out", "bad", standing == "ejected" or backend.get("breaker") == "open"),
        ("on trial", "warn", backend.get("breaker") == "half_open"),
        ("warming up", "warn", (backend.get("warmth") or 0.0) < 0.999),
        (str(standing), "bad", not backend.get("available")),
        ("full", "good", (backend.get("cap") or 1 << 30) <= backend["in_flight"]),
    ):
        if holds:
            return word, tone
    return "ready", "good"


def times_of_others(backend: Mapping[str, Any], backends: Sequence[Mapping[str, Any]]) -> float | None:
    """How many times as long to the first token as the middle of the other backends of its models."""
    own, models = backend.get("ttft_s"), set(backend.get("models") or ())
    others = [
        other["ttft_s"]
        for other in backends
        if other["id"] != backend["id"]
        and other.get("ttft_s")
        and (backend.get("models") is None or other.get("models") is None or models & set(other["models"]))
    ]
    return own / median(others) if own is not None and others else None


def is_slow(backend: Mapping[str, Any], backends: Sequence[Mapping[str, Any]]) -> bool:
    """It stands out."""
    times = times_of_others(backend, backends)
    return times is not None and times >= SLOW_TIMES and backend["ttft_s"] >= SLOW_LEAST_S
