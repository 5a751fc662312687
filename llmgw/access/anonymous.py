"""Callers without a key.

Twisted brings the checker and its ``strcred`` plugin ``anonymous``; what is
missing there is who the caller is for us.
"""

from __future__ import annotations

from twisted.cred.checkers import ANONYMOUS
from twisted.cred.error import UnauthorizedLogin

from llmgw.values import Caller

ANONYMOUS_CALLER = Caller(id="anonymous")
"""All anonymous callers are one: they share the limits of scope ``key``."""


def caller(avatar_id: bytes | tuple[()]) -> Caller:
    """The caller behind the avatar id of ``AllowAnonymousAccess``.

    :raise UnauthorizedLogin: ``avatar_id`` is somebody's, so it came from another checker.
    """
    if avatar_id != ANONYMOUS:
        raise UnauthorizedLogin("not anonymous")
    return ANONYMOUS_CALLER
