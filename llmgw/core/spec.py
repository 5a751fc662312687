"""One backend's settings, as the fleet needs them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class BackendSpec(Struct, frozen=True):
    """One backend as configured or discovered.

    :param url: base URL; if it changes, it is another server, with a new profile.
    :param models: names of the models it serves; ``None``: as it reports.
    :param max_connections: cap on requests in flight; ``None``: its number of slots.
    :param context_length: tokens per slot; ``None``: as it reports.
    """

    id: str
    url: str
    weight: float = 1.0
    models: tuple[str, ...] | None = None
    max_connections: int | None = None
    context_length: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
