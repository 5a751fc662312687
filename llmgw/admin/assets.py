"""The files of the dashboard: read once, served with their type and an ETag.

They hold nothing of the gateway's, so whoever reaches the listener may have
them; what they show is asked for under the listener's own rules.

:source: RFC 9110, section 8.8.3 (ETag) and section 13.1.2 (If-None-Match).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files

from twisted.web.http import CACHED
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request

from llmgw.admin.pages import Answer, not_allowed, send, set_headers

TYPES: Mapping[str, bytes] = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}


class Asset(Resource):
    """One file.

    :param status: what it is answered with.
    """

    isLeaf = True

    def __init__(self, name: str, body: bytes, status: int = 200) -> None:
        super().__init__()
        self._answer = Answer(body, status, TYPES[name[name.rindex(".") :]])
        self._tag = b'"%b"' % sha256(body).hexdigest()[:32].encode("ascii")

    def render(self, request: Request) -> int:
        if request.method not in (b"GET", b"HEAD"):
            return send(request, not_allowed(request, (b"GET", b"HEAD")))
        if self._answer.status != 200:
            return send(request, self._answer)
        fresh = request.setETag(self._tag) == CACHED
        set_headers(request, self._answer.content_type)
        request.setHeader(b"cache-control", b"no-cache")  # keep it, and ask each time
        if fresh:
            request.responseHeaders.removeHeader(b"content-type")
            request.finish()
            return NOT_DONE_YET
        return send(request, self._answer, keep=True)


def load() -> Mapping[str, bytes]:
    """Every file of the dashboard by its name."""
    folder = files("llmgw.admin") / "dashboard"
    found = {each.name: each for each in folder.iterdir()}
    return {name: found[name].read_bytes() for name in sorted(found) if name[name.rfind(".") :] in TYPES}
