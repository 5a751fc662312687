"""One backend's settings, as the fleet needs them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class BackendSpec(Struct, frozen=True):
    """One backend as configured or discovered.

    :param url: base URL; a changed one means another server, whose profile starts anew.
    :param models: names it serves, ``None`` to go by its reports.
    :param max_connections: cap on requests in flight, ``None`` for its slot count.
    :param context_length: tokens per slot, ``None`` to go by its reports.
    :param extra: anything the owner wants to find again; not looked at.
    """

    id: str
    url: str
    weight: float = 1.0
    models: tuple[str, ...] | None = None
    max_connections: int | None = None
    context_length: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    extra: object = None
