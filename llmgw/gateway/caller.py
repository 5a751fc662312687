"""Who is calling: from the credential in the request to a :class:`~llmgw.values.Caller`.

A credential may be sent in ``Authorization: Bearer``, ``x-api-key`` (Anthropic) or
``api-key`` (Azure). If there is more than one, they must be equal: accepting either would
let one tenant act for another. None of them, and no other credential header, ever reaches a
backend.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from twisted.cred.credentials import IAnonymous, IUsernamePassword, UsernamePassword
from twisted.cred.error import LoginFailed
from twisted.internet.defer import Deferred, maybeDeferred

from llmgw.access.credentials import ApiKey, IApiKey
from llmgw.core.retry import retry_after
from llmgw.errors import InvalidApiKey, RateLimited
from llmgw.values import Caller

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from llmgw.access.flood import FailureFlood

_KEY_HEADERS = (b"x-api-key", b"api-key")


class Callers:
    """Asks the configured checkers, in order.

    :param checkers: ``twisted.cred`` checkers; the first that accepts wins.
    :param flood: counts failures by address.
    :param dice: spreads ``Retry-After``.
    """

    def __init__(self, checkers: Sequence[Any], flood: FailureFlood, dice: Random) -> None:
        self.checkers = tuple(checkers)
        self._flood = flood
        self._dice = dice
        self._anonymous = any(IAnonymous in checker.credentialInterfaces for checker in self.checkers)
        self._keyed = [c for c in self.checkers if IApiKey in c.credentialInterfaces]
        self._named = [c for c in self.checkers if IUsernamePassword in c.credentialInterfaces]
        self._open = self._anonymous and not self._keyed and not self._named

    def identify(self, headers: Mapping[bytes, bytes], peer: str, now_s: float) -> Caller | Deferred[Caller]:
        """The caller, at once from our own checkers, else as a Deferred. Cancelling it cancels the checker's.

        :raise InvalidApiKey: a credential is needed, and there is none, a wrong one, or two that differ.
        :raise RateLimited: a wrong one, for the eleventh time in a minute from this address.
        """
        if self._open:  # no checker could tell a good key from a bad one
            return Caller(id="anonymous")
        authorization = headers.get(b"authorization")
        if (
            authorization is not None
            and authorization.startswith(b"Bearer ")
            and b"x-api-key" not in headers
            and b"api-key" not in headers
        ):
            # The common form, without a second credential.
            secret: str | None = authorization[7:].strip().decode("latin-1") or None
            password = None
        else:
            secret, password = _credentials(headers)
        if secret is not None:
            for checker in self._keyed:
                try:
                    avatar = checker.requestAvatarId(ApiKey(secret, peer))
                except LoginFailed:
                    continue
                # isinstance() with Deferred, which has an ABC as its base, is slower than comparing the type.
                if type(avatar) is not bytes and isinstance(avatar, Deferred):
                    return self._later(checker, avatar, peer, now_s)
                return _caller(checker, avatar)
        if password is not None:
            for checker in self._named:
                return self._later(checker, _login(checker, UsernamePassword(*password)), peer, now_s)
        if self._anonymous and secret is None and password is None:
            return Caller(id="anonymous")
        raise self._refusal(peer, now_s, given=secret is not None or password is not None)

    async def _checked(self, checker: Any, avatar: Deferred[Any], peer: str, now_s: float) -> Caller:
        try:
            return _caller(checker, await avatar)
        except LoginFailed:
            raise self._refusal(peer, now_s, given=True) from None

    def _later(self, checker: Any, avatar: Deferred[Any], peer: str, now_s: float) -> Deferred[Caller]:
        return Deferred.fromCoroutine(self._checked(checker, avatar, peer, now_s))

    def _refusal(self, peer: str, now_s: float, *, given: bool) -> InvalidApiKey | RateLimited:
        if not given:  # a missing key is not a failed attempt
            return InvalidApiKey("an API key is needed: Authorization: Bearer …, or x-api-key")
        wait_s = self._flood.failed(peer, now_s)
        if wait_s:
            after_s = retry_after(wait_s, self._dice)
            return RateLimited("too many failed logins from this address", retry_after_s=after_s)
        return InvalidApiKey("the API key is not valid")


def _credentials(headers: Mapping[bytes, bytes]) -> tuple[str | None, tuple[bytes, bytes] | None]:
    """The key, or else the name and password, in a request.

    :raise InvalidApiKey: two keys that differ.
    """
    secret: bytes | None = None
    password: tuple[bytes, bytes] | None = None
    authorization = headers.get(b"authorization")
    if authorization is not None:
        scheme, _, rest = authorization.partition(b" ")
        rest = rest.strip()
        kind = scheme.lower()
        if kind == b"bearer" and rest:
            secret = rest
        elif kind == b"basic":
            try:
                name, separator, word = base64.b64decode(rest, validate=True).partition(b":")
            except ValueError:
                separator = b""
            if separator:
                password = (name, word)
    for header in _KEY_HEADERS:
        value = headers.get(header)
        if value:
            if secret is not None and value != secret:
                raise InvalidApiKey("the request carries two different API keys")
            secret = value
    return (None if secret is None else secret.decode("latin-1")), password


def _login(checker: Any, credentials: Any) -> Deferred[Any]:
    return maybeDeferred(checker.requestAvatarId, credentials)


def _caller(checker: Any, avatar: Any) -> Caller:
    """The caller behind an avatar; checkers that are not ours only give a name."""
    lookup = getattr(checker, "caller", None)
    if lookup is not None:
        found: Caller = lookup(avatar)
        return found
    if isinstance(avatar, bytes):
        avatar = avatar.decode("utf-8", "replace")
    return Caller(id=str(avatar) or "anonymous")
