"""Where the shared store is: URLs in their settled form.

``redis://[user@]host[:port][/db]``, ``rediss://`` for the same over TLS,
``unix:///path/to/socket[?db=1]``. Passwords stand in files of their own.

:source: the IANA registrations of the schemes ``redis`` and ``rediss``.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

PORT = 6379
SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "unix")


class Address(Struct, frozen=True):
    """One server.

    :param host: ``""`` for a Unix socket, or where Sentinel tells it.
    :param path: of a Unix socket.
    :param tls: its certificate is verified, by name and the system's or ``ca_file``'s authorities.
    :param user: for Redis' ACL; ``""`` is its default user.
    """

    host: str = ""
    port: int = PORT
    path: str = ""
    tls: bool = False
    user: str = ""
    db: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}" + (f"?db={self.db}" if self.db else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.user}@" if self.user else ""
        db = f"/{self.db}" if self.db else ""
        return f"redis{'s' if self.tls else ''}://{user}{host}:{self.port}{db}"


def parse_address(text: str, *, hostless: bool = False) -> Address:
    """The server that a URL names.

    :param hostless: the host may be missing, because Sentinel will tell it.
    :raise ValueError: it is no such URL; the message never holds a password.
    """
    if not re.fullmatch(r"[\x21-\x7e]+", text) or "\\" in text:
        raise ValueError("not a URL of a store")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("bad host or port in the URL of the store") from None
    if parts.scheme not in SCHEMES:
        raise ValueError("must begin with redis://, rediss:// or unix://")
    if parts.password is not None:
        raise ValueError("must not hold a password; use password_file")
    if parts.fragment:
        raise ValueError("must have no fragment")
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError("needs three slashes and an absolute path: unix:///run/redis.sock")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        db = query.pop("db", "0")
        if query:
            raise ValueError("may have db=N after the question mark, and nothing else")
        return Address(path=unquote(parts.path), db=_db(db))
    if parts.query:
        raise ValueError("must have no query")
    host = parts.hostname or ""
    if not host and not hostless:
        raise ValueError("names no host")
    if port == 0:
        raise ValueError("bad port")
    path = parts.path.strip("/")
    return Address(
        host=host,
        port=PORT if port is None else port,
        tls=parts.scheme == "rediss",
        user=unquote(parts.username or ""),
        db=_db(path or "0"),
    )


def parse_sentinel(text: str) -> tuple[str, int]:
    """``host[:port]`` of a Sentinel; a literal IPv6 address stands in brackets.

    :raise ValueError: it is not of that form.
    """
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        raise ValueError("must be host:port of a Sentinel") from None
    host = parts.hostname or ""
    plain = re.fullmatch(r"[\x21-\x7e]+", text) and parts.netloc == text and "@" not in text
    if not host or not plain or port == 0:
        raise ValueError("must be host:port of a Sentinel")
    return host, SENTINEL_PORT if port is None else port


def _db(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise ValueError("the database must be a number, as in redis://host/0")
    return int(text)
