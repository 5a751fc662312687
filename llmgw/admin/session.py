"""Who may use the admin listener: whoever shows the token, or a cookie that was given for it.

The token comes as ``Authorization: Bearer``, or as the password of ``Basic``. A
browser shows it once and then has a cookie: an expiry and its HMAC under the
token. So nothing is remembered here, every process that has the token knows the
cookie, and another token ends all sessions. Pages' scripts cannot read it
(``HttpOnly``), and it comes from no other site (``SameSite=Strict``).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twisted.web.server import Request

COOKIE = b"llmgw_admin"
LASTS_S = 12 * 3600


class Sessions:
    """Checks the token and its cookies.

    :param token: not empty.
    :param wall_clock: Unix seconds.
    """

    def __init__(self, token: bytes, wall_clock: Callable[[], float]) -> None:
        self._token = token
        self._wall_clock = wall_clock

    def admit(self, request: Request) -> bool:
        """Whether ``request`` shows the token or a cookie that is still good."""
        cookie = request.getCookie(COOKIE)
        if cookie is not None and not request.getHeader(b"authorization"):
            return self._is_good(cookie)
        return hmac.compare_digest(_shown(request), self._token)

    def tried(self, request: Request) -> bool:
        """Whether one that is not admitted shows something that was never good: a cookie
        that has run out is no guess, nor is a call with nothing."""
        if request.getHeader(b"authorization"):
            return True
        cookie = request.getCookie(COOKIE)
        return cookie is not None and not self._is_ours(cookie)

    def begin(self, request: Request) -> None:
        """Give the caller a cookie."""
        expiry = b"%d" % (self._wall_clock() + LASTS_S)
        self._set(request, expiry + b"." + self._sealed(expiry), LASTS_S)

    def end(self, request: Request) -> None:
        """Take the caller's cookie away."""
        self._set(request, b"", 0)

    def _is_good(self, cookie: bytes) -> bool:
        return self._is_ours(cookie) and int(cookie.partition(b".")[0]) > self._wall_clock()

    def _is_ours(self, cookie: bytes) -> bool:
        """It was given by somebody who has the token: its expiry is a number, whether past or not."""
        expiry, _, seal = cookie.partition(b".")
        return hmac.compare_digest(seal, self._sealed(expiry))

    def _sealed(self, expiry: bytes) -> bytes:
        return hmac.digest(self._token, b"llmgw admin session until " + expiry, "sha256").hex().encode()

    def _set(self, request: Request, value: bytes, seconds: int) -> None:
        secure = b"; Secure" if request.isSecure() else b""
        request.responseHeaders.addRawHeader(
            b"set-cookie",
            b"%b=%b; Max-Age=%d; Path=/; HttpOnly; SameSite=Strict%b" % (COOKIE, value, seconds, secure),
        )


def _shown(request: Request) -> bytes:
    """The token that came with ``request``; never equal to one if none did."""
    scheme, _, given = (request.getHeader(b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return given.strip()
    return bytes(request.getPassword())
