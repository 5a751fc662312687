"""The checker ``keys``: API keys from a key file.

:meth:`KeysChecker.requestAvatarId` answers at once, without a Deferred, since
every request passes through it. Unknown, expired and revoked keys get the same
answer after the same work; which it was is nobody's business but the operator's.
A good key is hashed when it is first shown and then remembered as it is until the
next reload: whoever can read this process's memory finds it in the requests too.
"""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING

from twisted.cred.checkers import ICredentialsChecker
from twisted.cred.error import UnauthorizedLogin
from twisted.cred.strcred import ICheckerFactory
from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.access import key_file
from llmgw.access.credentials import ApiKey, IApiKey, ICallers, digest
from llmgw.errors import ConfigError, ConfigFault
from llmgw.values import Caller

if TYPE_CHECKING:
    from collections.abc import Callable

FOREVER = float("inf")

MAX_SEEN = 4096
"""Keys whose owner is found without hashing; beyond it all are forgotten and hashed once more."""

_NOBODY = (bytes(32), b"", 0.0)
"""Stands in for an unknown key, so that it costs what a known one costs. Expired since 1970."""


class _Seen(dict[str, tuple[bytes, float]]):
    """Good keys that were shown lately, to avatar id and expiry; it does not show them."""

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"


@implementer(ICredentialsChecker, ICallers)
class KeysChecker:
    """Checks :class:`~llmgw.access.credentials.IApiKey` against a key file.

    :param path: the key file, read now and at each :meth:`reload`.
    :param wall_clock: Unix seconds, for expiry.
    :ivar names: of the keys, by id; for people.
    :raise ConfigError: the file is missing, unsafe or faulty.
    """

    credentialInterfaces = (IApiKey,)

    def __init__(self, path: str, wall_clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._wall_clock = wall_clock
        self._pepper: bytes | None = None
        # Digest to (digest, avatar id, expiry in Unix seconds).
        self._entries: dict[bytes, tuple[bytes, bytes, float]] = {}
        self._callers: dict[bytes, Caller] = {}
        self._seen = _Seen()
        self.names: dict[str, str] = {}
        self.reload()

    # "Alternatively, return the result itself": the interface's text allows what its type does not.
    def requestAvatarId(self, credentials: ApiKey) -> bytes:  # type: ignore[override]
        """The key's id as bytes, at once.

        :raise UnauthorizedLogin: the key is unknown, expired or revoked.
        """
        secret = credentials.secret
        seen = self._seen.get(secret)
        # A dict compares texts only after their hashes, which are keyed at random
        # in each process: how long it takes tells nothing about any key in it.
        if seen is not None and self._wall_clock() < seen[1]:
            return seen[0]
        shown = digest(secret, self._pepper)
        known, avatar_id, expires_unix_s = self._entries.get(shown, _NOBODY)
        if avatar_id == b"" and self._pepper is not None:
            # A file that has a pepper may still hold keys from before it had one.
            shown = digest(secret)
            known, avatar_id, expires_unix_s = self._entries.get(shown, _NOBODY)
        # The dict look-up compares digests, which an attacker cannot steer byte by
        # byte; this comparison does not even depend on that.
        if hmac.compare_digest(known, shown) and self._wall_clock() < expires_unix_s:
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen[secret] = (avatar_id, expires_unix_s)
            return avatar_id
        raise UnauthorizedLogin("unknown key")

    def caller(self, avatar_id: bytes | tuple[()]) -> Caller:
        """What the owner of a key may do.

        :raise UnauthorizedLogin: no such key (a reload may have removed it).
        """
        try:
            return self._callers[avatar_id]  # type: ignore[index]
        except KeyError:
            raise UnauthorizedLogin("unknown key") from None

    def reload(self) -> None:
        """Read the file again.

        :raise ConfigError: it is unreadable, unsafe or faulty; the last good keys stay.
        """
        file, pepper = key_file.load(self.path)
        entries = {}
        callers = {}
        for key in file.keys.values():
            if key.revoked is None:
                avatar_id = key.id.encode()
                kept = bytes.fromhex(key.hash.partition(":")[2])
                expires_unix_s = FOREVER if key.expires is None else key.expires.timestamp()
                entries[kept] = (kept, avatar_id, expires_unix_s)
                callers[avatar_id] = key.caller()
        self._pepper = pepper
        self._entries = entries
        self._callers = callers
        self.names = {key.id: key.name for key in file.keys.values()}
        self._seen = _Seen()


@implementer(IPlugin, ICheckerFactory)
class KeysCheckerFactory:
    """``--auth keys:PATH``."""

    authType = "keys"
    authHelp = "API keys from a file that `llmgw keys new` writes; it holds hashes only."
    argStringFormat = "Path of the key file."
    credentialInterfaces = (IApiKey,)

    def generateChecker(self, argstring: str) -> KeysChecker:
        """:raise ConfigError: no path, or the file is missing, unsafe or faulty."""
        if not argstring:
            raise ConfigError([ConfigFault("auth", "`keys` needs the path of a key file: keys:PATH")])
        return KeysChecker(argstring)
