"""What a backend that loads models by name has: which are in memory, which only on its disk."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class Stock(Struct):
    """One backend's models.

    :param names: all it could serve.
    :param cold: those of them that are not in memory; no request goes there for these.
    :param slots: parallel sequences of single models that are, where known.
    :param used: when each that is in memory was last asked for, or came.
    """

    names: tuple[str, ...]
    cold: frozenset[str]
    slots: Mapping[str, int] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)

    def says(self, other: Stock | None) -> bool:
        """Whether ``other`` has the same models in the same states."""
        return other is not None and (self.names, self.cold, self.slots) == (
            other.names,
            other.cold,
            other.slots,
        )

    def follow(self, old: Stock | None, now_s: float) -> None:
        """Take over when each was last used; what has come since then was used now."""
        known = {} if old is None else old.used
        self.used = {name: known.get(name, now_s) for name in self.names if name not in self.cold}
