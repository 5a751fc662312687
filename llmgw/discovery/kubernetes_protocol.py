"""EndpointSlices as the Kubernetes API tells them, and the backends in them.

No I/O. A list gives everything and a resource version; a watch from there gives
single changes, and bookmarks that only move the version on. A version that the
server has forgotten (410 Gone) wants a new list.

:source: Kubernetes API conventions, "Efficient detection of changes"; discovery.k8s.io/v1 EndpointSlice.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from typing import Any

GONE = 410


class ApiError(Exception):
    """The API has answered, and what it said is no use.

    :param code: its HTTP status, 0 if it told none.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Heard(enum.Enum):
    """What an event of a watch was."""

    CHANGED = "changed"
    BOOKMARK = "bookmark"


class Slices:
    """All slices that a selector finds, as of one version.

    :ivar version: ``None``: nothing is known, or not any more, and a list is wanted.
    """

    def __init__(self) -> None:
        self.version: str | None = None
        self._slices: dict[str, Mapping[str, Any]] = {}

    def load(self, answer: Mapping[str, Any]) -> None:
        """Take in a list.

        :raise ApiError: it is none; nothing has changed.
        """
        items = answer.get("items") or []
        if not isinstance(items, list):
            raise ApiError("a list without items")
        slices = {_name(item): item for item in items}
        self._slices, self.version = slices, _version(answer)

    def take(self, event: Mapping[str, Any]) -> Heard:
        """Take in an event of the watch.

        :raise ApiError: it is an error, or no event; then nothing has changed but that
            after 410 the version is forgotten.
        """
        kind, item = event.get("type"), event.get("object")
        if not isinstance(item, Mapping):
            raise ApiError("an event without object")
        if kind == "ERROR":
            error = error_of(item)
            if error.code == GONE:
                self.version = None
            raise error
        version = _version(item)
        if kind == "BOOKMARK":
            self.version = version
            return Heard.BOOKMARK
        name = _name(item)
        if kind in ("ADDED", "MODIFIED"):
            self._slices[name] = item
        elif kind == "DELETED":
            self._slices.pop(name, None)
        else:
            raise ApiError(f"an event of type {str(kind)[:40]!r}")
        self.version = version
        return Heard.CHANGED

    def entries(self, port: int | str | None, scheme: str, path: str) -> list[dict[str, Any]]:
        """A ``[[backends]]`` table for each endpoint that is ready, each once.

        :param port: number, or name in the slice; ``None`` takes a slice's first.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in sorted(self._slices):
            for entry in _entries(self._slices[name], port, scheme, path):
                # With two families a pod stands in two slices.
                found.setdefault(entry["id"], {"key": name, **entry})
        return list(found.values())


def error_of(status: Any) -> ApiError:
    """The error that a ``Status`` object tells."""
    if not isinstance(status, Mapping):
        return ApiError("an answer that is no object")
    code = status.get("code")
    text = status.get("message") or status.get("reason") or "no reason told"
    return ApiError(str(text)[:200], code if isinstance(code, int) else 0)


def _entries(
    item: Mapping[str, Any], port: int | str | None, scheme: str, path: str
) -> Iterator[dict[str, Any]]:
    number = _port(item, port)
    if number is None:
        return
    for endpoint in _tables(item.get("endpoints")):
        conditions = endpoint.get("conditions")
        # Not told counts as ready.
        if isinstance(conditions, Mapping) and conditions.get("ready") is False:
            continue
        addresses = endpoint.get("addresses")
        # Several addresses of an endpoint mean the same; the API asks to take the first.
        if not isinstance(addresses, list) or not addresses or not isinstance(addresses[0], str):
            continue
        host = addresses[0]
        place = f"[{host}]" if ":" in host else host
        target = endpoint.get("targetRef")
        pod = target.get("name") if isinstance(target, Mapping) else None
        labels = {"zone": endpoint.get("zone"), "node": endpoint.get("nodeName")}
        entry: dict[str, Any] = {
            "id": pod if _is_id(pod) else f"{host}:{number}",
            "url": f"{scheme}://{place}:{number}{path}",
        }
        labels = {name: value for name, value in labels.items() if isinstance(value, str) and value}
        if labels:
            entry["labels"] = labels
        yield entry


def _is_id(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", name) is not None


def _port(item: Mapping[str, Any], wanted: int | str | None) -> int | None:
    if isinstance(wanted, int):
        return wanted
    for port in _tables(item.get("ports")):
        number = port.get("port")
        if isinstance(number, int) and (wanted is None or port.get("name") == wanted):
            return number
    return None


def _tables(value: Any) -> Iterator[Mapping[str, Any]]:
    return (each for each in value if isinstance(each, Mapping)) if isinstance(value, list) else iter(())


def _metadata(item: Any) -> Mapping[str, Any]:
    metadata = item.get("metadata") if isinstance(item, Mapping) else None
    if not isinstance(metadata, Mapping):
        raise ApiError("an object without metadata")
    return metadata


def _name(item: Any) -> str:
    name = _metadata(item).get("name")
    if not isinstance(name, str) or not name:
        raise ApiError("an object without a name")
    return name


def _version(item: Any) -> str:
    version = _metadata(item).get("resourceVersion")
    if not isinstance(version, str) or not version.isalnum():
        raise ApiError("an object without a resource version")
    return version
