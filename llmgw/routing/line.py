"""A straight line through measured times, learned with forgetting."""

from __future__ import annotations

KEPT = 0.99
"""What remains of a line's past at each new sample."""

GUESS = 4.0
"""Weight of each of the two points of a guess beside samples of weight 1 at most."""


class Line:
    """``y = base + slope x`` through weighted samples, newer ones counting more.

    A guess gives the shape where samples are few or all alike: two of its points,
    at ``x = 0`` and at ``far``, stand beside the samples for good. The level is that
    of the samples from the first one on, however wrong the guess was.
    """

    __slots__ = ("_far", "_w", "_wx", "_wxx", "_wxy", "_wy", "base", "samples", "slope")

    def __init__(self, far: float) -> None:
        self._far = far
        self._w = self._wx = self._wxx = self._wy = self._wxy = 0.0
        self.samples = 0
        self.base = 0.0
        self.slope = 0.0

    def add(self, x: float, y: float, weight: float) -> None:
        """A sample; :meth:`fit` takes it in."""
        self.samples += 1
        self._w = KEPT * self._w + weight
        self._wx = KEPT * self._wx + weight * x
        self._wxx = KEPT * self._wxx + weight * x * x
        self._wy = KEPT * self._wy + weight * y
        self._wxy = KEPT * self._wxy + weight * x * y

    def fit(self, base: float, slope: float) -> None:
        """Lay the line anew.

        :param base: of the guess, above 0; as ``slope``.
        """
        far = self._far
        if self._w:
            level = self._wy / (self._w * base + self._wx * slope)
            base *= level
            slope *= level
        end = base + slope * far
        w = self._w + 2.0 * GUESS
        wx = self._wx + GUESS * far
        wxx = self._wxx + GUESS * far * far
        wy = self._wy + GUESS * (base + end)
        wxy = self._wxy + GUESS * far * end
        slope = (w * wxy - wx * wy) / (w * wxx - wx * wx)
        self.slope = slope = slope if slope > 1e-9 else 1e-9
        base = (wy - slope * wx) / w
        self.base = base if base > 0.0 else 0.0
