"""Request targets and ``Host`` values.

Nothing is decoded or normalised. A path that two programs might read as different paths is
refused instead, so that routing, authorisation and the backend cannot disagree about it.

:source: RFC 9112 section 3.2, RFC 3986 section 3.2.2, CVE-2019-9901.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import AddressValueError, IPv6Address

from msgspec import Struct

_ABSOLUTE = re.compile(r"https?://([^/?]+)(/[^?]*)?(?:\?(.*))?", re.IGNORECASE)
_AUTHORITY = re.compile(rb"(?:[0-9A-Za-z._~\-]+|\[([0-9A-Fa-f:.]+)\])(?::[0-9]{1,5})?")
_SUSPECT = re.compile(r"%|\\|\.\.")
_UNSAFE_ESCAPE = re.compile(r"%(?:2[Ff]|5[Cc]|00|(?![0-9A-Fa-f]{2}))")
_DOT = re.compile(r"%2[Ee]")
_SLASH = re.compile(r"%2[Ff]")
_NAMES = "/v1/models/"


class Target(Struct):
    """A parsed request target; ``authority`` is ``None`` in origin form."""

    path: str
    query: str
    authority: bytes | None


def parse_target(target: str) -> Target:
    """Parse a request target in origin form, or in absolute form without user information.

    ``//`` in the path is left as it is; no route has it.

    :param target: characters 0x21 to 0x7e only.
    :raise ValueError: with a message for the client.
    """
    if "#" in target:
        raise ValueError("a request target has no fragment")
    authority: bytes | None = None
    if target[0] == "/":
        path, _, query = target.partition("?")
    else:
        found = _ABSOLUTE.fullmatch(target)
        if found is None:
            raise ValueError("the request target is neither a path nor an absolute http URL")
        authority = found[1].encode("ascii")
        path = found[2] or "/"
        query = found[3] or ""
    if _SUSPECT.search(path):
        _refuse_traversal(path)
    return Target(path, query, authority)


def _refuse_traversal(path: str) -> None:
    """:raise ValueError: another program might read this path as another one (CVE-2019-9901)."""
    if path.startswith(_NAMES):
        # A model's name follows, whose "/" the official clients write so. The gateway answers
        # this path itself: no other program will read it.
        path = _SLASH.sub("/", path)
    if "\\" in path or _UNSAFE_ESCAPE.search(path):
        raise ValueError("the path holds a backslash, an encoded separator or a broken escape")
    if ".." in _DOT.sub(".", path).split("/"):
        raise ValueError("the path holds a parent segment")


def is_authority(value: bytes) -> bool:
    """Whether a ``Host`` value names a host: reg-name of unreserved characters, IPv4 or IPv6, and port."""
    return len(value) <= 255 and _names_host(value)


@lru_cache(maxsize=256)
def _names_host(value: bytes) -> bool:
    found = _AUTHORITY.fullmatch(value)
    if found is None:
        return False
    if found[1] is not None:
        try:
            IPv6Address(found[1].decode("ascii"))
        except AddressValueError:
            return False
    return True
