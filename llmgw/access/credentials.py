"""The credentials of callers, and the form of keys.

A key made here is ``lgw_<id>_<secret><checksum>``: the id may be logged, the
secret is 256 random bits, and the checksum tells a mistyped key from one of another system
without a look at any file. An imported key may have any form.
"""

from __future__ import annotations

import hmac
import re
import secrets
from hashlib import sha256
from zlib import crc32

from twisted.cred.credentials import ICredentials
from zope.interface import Attribute, Interface, implementer

from llmgw.values import Caller
from llmgw.values import Secret as Secret  # shown to others from here too

PREFIX = "lgw"
SECRET_LENGTH = 43
"""Characters of URL-safe base64 that hold 256 bits."""
CHECKSUM_LENGTH = 6
LEAST_IMPORTED_LENGTH = 20

_ID_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"
"""Without ``l``, ``o``, ``0`` and ``1``, which people confuse."""
_CHECKSUM_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_FORM = re.compile(
    rf"{PREFIX}_([a-z2-9]{{8,10}})_([A-Za-z0-9_-]{{{SECRET_LENGTH}}})([A-Z2-7]{{{CHECKSUM_LENGTH}}})"
)


class IApiKey(ICredentials):
    """A caller has sent a key, in whichever header."""

    secret: str = Attribute("The key as it was sent.")
    peer: str = Attribute("The caller's address, for logs.")


class ICallers(Interface):
    """A credentials checker that also knows what its avatars may do.

    Asked by the gateway after ``requestAvatarId``; a checker that does not
    provide it lets its avatars do everything.
    """

    def caller(avatar_id: bytes | tuple[()]) -> Caller:  # noqa: N805 (an interface has no self)
        """The caller behind an avatar id that this checker returned.

        :raise twisted.cred.error.UnauthorizedLogin: it is not known (any more).
        """


@implementer(IApiKey)
class ApiKey:
    """A key as a request carried it."""

    __slots__ = ("peer", "secret")

    def __init__(self, secret: str, peer: str) -> None:
        self.secret = secret
        self.peer = peer

    def __repr__(self) -> str:
        return f"<ApiKey from {self.peer}>"


def new_id() -> str:
    """Eight random characters: two of a million keys rarely collide, and the file is checked for it."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(8))


def new_key(key_id: str) -> str:
    """A new key with 256 random bits."""
    body = f"{PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"
    return body + _checksum(body)


def is_mistyped(key: str) -> bool:
    """Whether ``key`` looks like one of ours, but has a wrong form or checksum."""
    if not key.startswith(f"{PREFIX}_"):
        return False
    match = _FORM.fullmatch(key)
    return match is None or match[3] != _checksum(key[:-CHECKSUM_LENGTH])


def import_fault(secret: str) -> str | None:
    """Why ``secret`` cannot become a key, or ``None``. The answer never quotes it."""
    if len(secret) < LEAST_IMPORTED_LENGTH:
        return f"it has {len(secret)} characters; at least {LEAST_IMPORTED_LENGTH} are needed"
    if not (secret.isascii() and secret.isprintable()):
        return "only printable ASCII characters can be sent in a header field"
    if secret != secret.strip():
        return "it begins or ends with a blank, which a header field would lose"
    if is_mistyped(secret):
        return f"it begins like a key of llmgw ({PREFIX}_) but its checksum is wrong: was it copied whole?"
    return None


def digest(secret: str, pepper: bytes | None = None) -> bytes:
    """The hash of a key that is stored: SHA-256, or HMAC-SHA256 with a pepper.

    A slow function (scrypt, Argon2) protects passwords, which can be guessed. 256 random bits
    cannot be guessed at any speed; and a slow check at each request would help attackers that
    flood the gateway with wrong keys. The pepper is for imported
    secrets, which may be guessable: without it, the file alone is of no use.

    :source: NIST SP 800-63B section 5.1.2.2 (look-up secrets of at least 112 bits
        need an approved one-way function and no more); RFC 2104 for HMAC.
    """
    if pepper is None:
        return sha256(_bytes(secret)).digest()
    return hmac.digest(pepper, _bytes(secret), "sha256")


def _bytes(text: str) -> bytes:
    # Lone surrogates are no key of ours, and no reason to fail.
    return text.encode("utf-8", "surrogatepass")


def _checksum(body: str) -> str:
    number = crc32(body.encode())
    # Six letters hold 30 of the 32 bits: one typo in a billion is not noticed.
    return "".join(_CHECKSUM_LETTERS[number >> shift & 31] for shift in range(0, 5 * CHECKSUM_LENGTH, 5))
