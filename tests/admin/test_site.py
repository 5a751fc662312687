"""The admin listener, spoken to in bytes under a clock, and over a real socket where that matters."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import ISSLTransport
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from zope.interface import directlyProvides

from llmgw.access.flood import FailureFlood
from llmgw.admin import assets
from llmgw.admin import events as events_module
from llmgw.admin import guesses as guesses_module
from llmgw.admin import session as session_module
from llmgw.admin import site as site_module
from llmgw.admin.site import AdminRoot, AdminSite
from llmgw.errors import ConfigError, ConfigFault, ModelNotFound, PluginError

TOKEN = "s3cret-token"
BEARER = {"authorization": f"Bearer {TOKEN}"}


class Gateway:
    """:class:`llmgw.admin.site.Operations` with everything to be set."""

    def __init__(self) -> None:
        self.ready = (True, "")
        self.picture: dict[str, Any] = {"uptime_s": 1.0, "in_flight": 0}
        self.fault: Exception | None = None
        self.reloading: Deferred[list[str]] = succeed(["listen"])
        self.draining = False
        self.drained: dict[str, bool] = {}
        self.explained = b""
        self.opened: bytes | None = None

    def _raise(self) -> None:
        if self.fault is not None:
            raise self.fault

    def readiness(self) -> tuple[bool, str]:
        self._raise()
        return self.ready

    def state(self) -> Mapping[str, Any]:
        self._raise()
        return self.picture

    def metrics_text(self) -> bytes:
        self._raise()
        return b"llmgw_x 1\n"

    def openmetrics(self) -> bytes | None:
        return self.opened

    def explain(self, body: bytes) -> Mapping[str, Any]:
        self._raise()
        self.explained = body
        return {"choice": "b0"}

    def drain_backend(self, id: str, on: bool) -> bool:
        self._raise()
        self.drained[id] = on
        return id in ("b0", "a/b", "é")

    def reload(self) -> Deferred[list[str]]:
        self._raise()
        return self.reloading

    def drain(self) -> None:
        self._raise()
        self.draining = True


class Numbers:
    """A feed: ``total`` numbers, of which the last three are kept."""

    name = "numbers"

    def __init__(self) -> None:
        self.total = 0

    def since(self, seen: int) -> list[int]:
        return list(range(max(seen, self.total - 3), self.total))


class Answer:
    """A response, taken apart."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(status.split(" ")[1])
        self.headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            self.headers[name.lower()] = ", ".join(filter(None, (self.headers.get(name.lower()), value)))

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class Admin:
    """One listener, and clients without sockets."""

    def __init__(self, token: str | None = None) -> None:
        self.clock = Clock()
        self.gateway = Gateway()
        self.feed = Numbers()
        self.root = AdminRoot(
            self.gateway,
            token,
            flood=FailureFlood(),
            reactor=self.clock,
            feeds=[self.feed],
            wall_clock=self.clock.seconds,
            clock=self.clock.seconds,
        )
        self.site = AdminSite(self.root)
        self.site.doStart()

    def connect(self, transport: StringTransport | None = None) -> tuple[Any, StringTransport]:
        channel = self.site.buildProtocol(None)
        transport = transport or StringTransport()
        assert channel is not None
        channel.makeConnection(transport)
        return channel, transport

    def send(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Any:
        """A request on a connection of its own: channel and transport."""
        channel, transport = self.connect()
        fields = {"host": "localhost:9901", **(headers or {})}
        if body or method == "POST":
            fields["content-length"] = str(len(body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
        channel.dataReceived(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        return channel, transport

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        channel, transport = self.send(method, path, headers, body)
        answer = Answer(transport.value())
        channel.connectionLost(Failure(ConnectionLost()))
        return answer

    def close(self) -> None:
        self.site.doStop()
        assert not [call for call in self.clock.getDelayedCalls() if call.active()]


@pytest.fixture
def admin() -> Iterator[Admin]:
    """Without a token, on loopback."""
    admin = Admin()
    yield admin
    admin.close()


@pytest.fixture
def locked() -> Iterator[Admin]:
    """With a token."""
    admin = Admin(TOKEN)
    yield admin
    admin.close()


# --- pages --------------------------------------------------------------------


def test_probes(admin: Admin) -> None:
    assert admin.ask("GET", "/livez").json == {"status": "ok"}
    assert admin.ask("GET", "/readyz").json == {"status": "ok", "reason": ""}
    admin.gateway.ready = (False, "draining")
    answer = admin.ask("GET", "/readyz")
    assert (answer.status, answer.json) == (503, {"status": "not ready", "reason": "draining"})
    assert admin.ask("GET", "/livez").status == 200


def test_metrics_state_and_index(admin: Admin) -> None:
    answer = admin.ask("GET", "/metrics")
    assert answer.body == b"llmgw_x 1\n"
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert admin.ask("GET", "/api/state").json == {"uptime_s": 1.0, "in_flight": 0}
    answer = admin.ask("GET", "/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.body.startswith(b"<!doctype html>")


def test_openmetrics_is_for_those_who_ask_where_there_is_some(admin: Admin) -> None:
    asks = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    assert admin.ask("GET", "/metrics", asks).headers["content-type"].startswith("text/plain")
    admin.gateway.opened = b"# EOF\n"
    answer = admin.ask("GET", "/metrics", asks)
    assert answer.body == b"# EOF\n"
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert admin.ask("GET", "/metrics").body == b"llmgw_x 1\n"


def test_a_state_with_odd_values_is_json(admin: Admin) -> None:
    admin.gateway.picture = {"ttft_s": float("inf"), "other": Gateway, "model": "\x00é"}
    state = admin.ask("GET", "/api/state").json
    assert state["ttft_s"] is None
    assert state["model"] == "\x00é"
    assert isinstance(state["other"], str)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/api/state", "/"])
def test_head_is_get_without_the_body(admin: Admin, path: str) -> None:
    get, head = admin.ask("GET", path), admin.ask("HEAD", path)
    assert head.body == b""
    assert head.status == get.status
    assert head.headers["content-length"] == str(len(get.body))
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/livez", "GET, HEAD"),
        ("DELETE", "/metrics", "GET, HEAD"),
        ("OPTIONS", "/api/state", "GET, HEAD"),
        ("POST", "/api/events", "GET, HEAD"),
        ("GET", "/api/reload", "POST"),
        ("HEAD", "/api/drain", "POST"),
        ("PUT", "/api/explain", "POST"),
        ("GET", "/api/backends/b0/drain", "POST"),
        ("BREW", "/api/reload", "POST"),
    ],
)
def test_another_method_is_405_with_allow(admin: Admin, method: str, path: str, allow: str) -> None:
    answer = admin.ask(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allow)
    assert method == "HEAD" or answer.code == "method_not_allowed"
    assert not admin.gateway.draining


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/livez/",
        "/livez/x",
        "/metrics/x",
        "/api",
        "/api/",
        "/api/state/x",
        "/api/backends",
        "/api/backends/b0",
        "/api/backends/b0/stop",
        "/api/backends/b0/drain/x",
        "//api/state",
        "/%2e%2e/etc/passwd",
        "/assets",
        "/assets/",
        "/assets/none.js",
        "/assets/..",
        "/assets/%2e%2e%2fsite.py",
        "/assets/style.css/",
        "/%00",
    ],
)
def test_other_paths_are_404(admin: Admin, path: str) -> None:
    for method in ("GET", "POST"):
        answer = admin.ask(method, path)
        assert (answer.status, answer.code) == (404, "not_found")


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/nothing", "/api/events"])
def test_no_answer_is_stored_or_names_its_server(admin: Admin, path: str) -> None:
    headers = admin.ask("GET", path).headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "server" not in headers


# --- levers -------------------------------------------------------------------


def test_drain(admin: Admin) -> None:
    answer = admin.ask("POST", "/api/drain")
    assert (answer.status, answer.json) == (202, {"status": "draining"})
    assert admin.gateway.draining


@pytest.mark.parametrize(("path", "name"), [("b0", "b0"), ("a%2Fb", "a/b"), ("%C3%A9", "é")])
def test_a_backend_is_drained_and_taken_back(admin: Admin, path: str, name: str) -> None:
    assert admin.ask("POST", f"/api/backends/{path}/drain").json == {"backend": name, "draining": True}
    assert admin.ask("POST", f"/api/backends/{path}/undrain").json == {"backend": name, "draining": False}
    assert admin.gateway.drained == {name: False}


@pytest.mark.parametrize("path", ["b1", "%FF"])
def test_an_unknown_backend_is_404(admin: Admin, path: str) -> None:
    answer = admin.ask("POST", f"/api/backends/{path}/drain")
    assert (answer.status, answer.code) == (404, "not_found")


def test_explain_takes_a_body(admin: Admin) -> None:
    answer = admin.ask("POST", "/api/explain", body=b'{"model":"m"}')
    assert answer.json == {"choice": "b0"}
    assert admin.gateway.explained == b'{"model":"m"}'


def test_explain_answers_as_the_request_would_have_been(admin: Admin) -> None:
    admin.gateway.fault = ModelNotFound("no such model: 'x'", param="model")
    answer = admin.ask("POST", "/api/explain", body=b"{}")
    assert answer.status == 404
    assert answer.json["error"] == {
        "message": "no such model: 'x'",
        "type": "invalid_request_error",
        "code": "model_not_found",
        "param": "model",
    }


def test_reload_tells_what_needs_a_restart(admin: Admin) -> None:
    answer = admin.ask("POST", "/api/reload")
    assert (answer.status, answer.json) == (200, {"status": "reloaded", "needs_restart": ["listen"]})


def test_a_refused_reload_tells_every_fault(admin: Admin) -> None:
    faults = [ConfigFault("backends[0].url", "no"), ConfigFault("", "all of it")]
    admin.gateway.reloading = fail(ConfigError(faults, "llmgw.toml"))
    answer = admin.ask("POST", "/api/reload")
    assert (answer.status, answer.code) == (400, "invalid_config")
    assert answer.json["error"]["message"] == "llmgw.toml: backends[0].url: no\nllmgw.toml: all of it"
    assert answer.json["error"]["faults"] == [
        {"where": "backends[0].url", "what": "no"},
        {"where": "", "what": "all of it"},
    ]


def test_a_reload_that_lacks_a_plugin_says_which(admin: Admin) -> None:
    admin.gateway.fault = PluginError("no router 'x'")
    answer = admin.ask("POST", "/api/reload")
    assert (answer.status, answer.code, answer.json["error"]["message"]) == (
        400,
        "invalid_plugin",
        "no router 'x'",
    )


def test_a_slow_reload_answers_when_it_is_done(admin: Admin) -> None:
    admin.gateway.reloading = Deferred()
    channel, transport = admin.send("POST", "/api/reload")
    assert transport.value() == b""
    admin.gateway.reloading.callback([])
    assert Answer(transport.value()).json == {"status": "reloaded", "needs_restart": []}
    channel.connectionLost(Failure(ConnectionLost()))


def test_an_operator_who_leaves_does_not_stop_a_reload(admin: Admin) -> None:
    reloading: Deferred[list[str]] = Deferred(lambda _: pytest.fail("it was cancelled"))
    admin.gateway.reloading = reloading
    channel, transport = admin.send("POST", "/api/reload")
    channel.connectionLost(Failure(ConnectionLost()))
    reloading.callback([])
    assert transport.value() == b""


# --- faults -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/readyz"),
        ("GET", "/metrics"),
        ("GET", "/api/state"),
        ("GET", "/api/events"),
        ("POST", "/api/explain"),
        ("POST", "/api/reload"),
        ("POST", "/api/drain"),
        ("POST", "/api/backends/b0/drain"),
    ],
)
def test_a_fault_of_ours_is_logged_and_not_shown(
    admin: Admin, expected_failures: Any, method: str, path: str
) -> None:
    admin.gateway.fault = ZeroDivisionError("the secret is 42")
    answer = admin.ask(method, path)
    assert (answer.status, answer.code) == (500, "internal_error")
    assert b"42" not in answer.body
    assert b"Traceback" not in answer.body
    assert len(expected_failures(ZeroDivisionError)) == 1


# --- who may ------------------------------------------------------------------


def test_probes_are_open(locked: Admin) -> None:
    for path in ("/livez", "/readyz"):
        assert locked.ask("GET", path).status == 200
        assert locked.ask("GET", path, {"host": "gateway.example"}).status == 200


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/state", "/api/events", "/nothing", "/livez/x"])
@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Bearer {TOKEN}x",
        TOKEN,
        f"Token {TOKEN}",
        "Basic !!!",
        f"Basic {b64encode(b'nocolon').decode()}",
        f"Basic {b64encode(b'u:wrong').decode()}",
        f"Basic {b64encode(TOKEN.encode() + b':').decode()}",
        "Bearer \xff\xfe",
    ],
)
def test_without_the_token_everything_else_is_401(locked: Admin, path: str, header: str) -> None:
    answer = locked.ask("GET", path, {"authorization": header})
    assert (answer.status, answer.code) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == 'Bearer, Basic realm="llmgw", charset="UTF-8"'


@pytest.mark.parametrize(
    "header",
    [
        f"Bearer {TOKEN}",
        f"bearer {TOKEN}",
        f"Bearer  {TOKEN} ",
        f"Basic {b64encode(f'me:{TOKEN}'.encode()).decode()}",
    ],
)
def test_with_the_token_everything_is_there(locked: Admin, header: str) -> None:
    headers = {"authorization": header, "host": "gateway.example:9901"}
    assert locked.ask("GET", "/metrics", headers).status == 200
    assert locked.ask("POST", "/api/drain", headers).status == 202
    assert locked.ask("GET", "/nothing", headers).status == 404


def test_levers_do_not_move_without_the_token(locked: Admin) -> None:
    for path in ("/api/drain", "/api/reload", "/api/explain", "/api/backends/b0/drain"):
        assert locked.ask("POST", path, body=b"{}").status == 401
    assert not locked.gateway.draining
    assert not locked.gateway.drained
    assert locked.gateway.explained == b""


def test_the_token_is_compared_in_constant_time(locked: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return False

    monkeypatch.setattr(session_module.hmac, "compare_digest", compare_digest)
    assert locked.ask("GET", "/metrics", BEARER).status == 401
    assert compared == [(TOKEN.encode(), TOKEN.encode())]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000, 400),
        (b"POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"0" * 5000, 400),
        (b"POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"1" * 16, 400),
        (b"POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"1" * 15, 413),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000, 431),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost", 404),
    ],
    ids=lambda value: value[:30].decode() if isinstance(value, bytes) else None,
)
def test_odd_heads_are_answered_without_a_fault_of_ours(admin: Admin, head: bytes, status: int) -> None:
    """And without Twisted's name and version."""
    channel, transport = admin.connect()
    channel.dataReceived(head + b"\r\n\r\n")
    answer = Answer(transport.value())
    assert answer.status == status
    assert "server" not in answer.headers
    channel.connectionLost(Failure(ConnectionLost()))


WRONG = {"authorization": "Bearer wrong"}


def test_wrong_tokens_are_counted_and_the_right_one_passes(locked: Admin) -> None:
    """Bearer, Basic and cookies of one's own making are one count; a body makes no second of one call."""
    basic = {"authorization": "Basic " + b64encode(b"x:wrong").decode()}
    for headers in (WRONG, basic, {"cookie": "llmgw_admin=9999999999.00"}) * 3:
        assert locked.ask("GET", "/metrics", headers).status == 401
    assert locked.ask("POST", "/api/explain", WRONG, b"{}").status == 401
    for headers in (WRONG, basic, {"cookie": "llmgw_admin=9999999999.00"}):
        answer = locked.ask("POST", "/api/session", headers)
        assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 6
        assert "www-authenticate" not in answer.headers
    cookie = sign_in(locked)
    for headers in (BEARER, {"cookie": cookie}):
        assert locked.ask("GET", "/metrics", headers).status == 200
    assert locked.ask("GET", "/livez").status == 200
    locked.clock.advance(6.0)
    assert locked.ask("GET", "/metrics", WRONG).status == 401
    assert locked.ask("GET", "/metrics", WRONG).status == 429


def test_a_call_with_nothing_and_a_session_that_has_ended_are_no_guesses(locked: Admin) -> None:
    cookie = sign_in(locked)
    locked.clock.advance(12 * 3600)
    for _ in range(30):
        assert locked.ask("GET", "/api/state").status == 401
        assert locked.ask("GET", "/api/state", {"cookie": cookie}).status == 401


def test_a_browser_with_the_cookie_of_an_older_token_still_gets_the_form(locked: Admin) -> None:
    older = {"cookie": "llmgw_admin=9999999999.00", "accept": "text/html"}
    for _ in range(30):
        answer = locked.ask("GET", "/", older)
        assert answer.status == 401
        assert b'id="token"' in answer.body


def test_wrong_tokens_are_counted_by_address_and_told_once_a_minute(
    locked: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    log = SimpleNamespace(warn=lambda _, **fields: told.append(fields))
    monkeypatch.setattr(guesses_module.Guesses, "log", log)

    def ask(address: Any) -> int:
        transport = StringTransport(peerAddress=address)
        channel, _ = locked.connect(transport)
        channel.dataReceived(b"GET /metrics HTTP/1.1\r\nhost: g\r\nauthorization: Bearer wrong\r\n\r\n")
        channel.connectionLost(Failure(ConnectionLost()))
        return Answer(transport.value()).status

    addresses = [IPv4Address("TCP", f"192.0.2.{last}", 1) for last in range(3)] + [UNIXAddress("/s")]
    for address in addresses:
        assert [ask(address) for _ in range(12)] == [401] * 10 + [429] * 2
    assert told == [{"peer": "192.0.2.0"}]
    locked.clock.advance(60.0)
    assert [ask(addresses[-1]) for _ in range(11)] == [401] * 10 + [429]
    assert told == [{"peer": "192.0.2.0"}, {"peer": "unix"}]


def test_an_empty_token_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="empty"):
        AdminRoot(Gateway(), "", flood=FailureFlood())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:9901", 200),
        ("LOCALHOST:9901", 200),
        ("llmgw.localhost", 200),
        ("127.0.0.1:9901", 200),
        ("[::1]:9901", 200),
        ("10.1.2.3", 200),
        ("rebound.example:9901", 403),
        ("127.0.0.1.example", 403),
        ("localhost.example", 403),
    ],
)
def test_without_a_token_a_foreign_name_is_refused(admin: Admin, host: str, status: int) -> None:
    assert admin.ask("GET", "/api/state", {"host": host}).status == status
    assert admin.ask("GET", "/livez", {"host": host}).status == 200


def test_without_a_host_there_is_no_browser(admin: Admin) -> None:
    channel, transport = admin.connect()
    channel.dataReceived(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert Answer(transport.value()).status == 200
    channel.connectionLost(Failure(ConnectionLost()))


@pytest.mark.parametrize(
    "hosts",
    [
        "",
        "host: localhost\r\nhost: localhost\r\n",
        "host: rebound.example\r\nhost: localhost\r\n",
        "host: [::1\r\n",
        "host: ex\xe4mple\r\n",
        "host: :9901\r\n",
        "host: localhost, rebound.example\r\n",
        "host:\r\n",
    ],
)
@pytest.mark.parametrize("path", ["/livez", "/api/state"])
def test_a_request_names_its_host_once(admin: Admin, path: str, hosts: str) -> None:
    """RFC 9112 section 3.2."""
    channel, transport = admin.connect()
    channel.dataReceived(f"GET {path} HTTP/1.1\r\n{hosts}\r\n".encode("latin-1"))
    channel.dataReceived(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert Answer(transport.value()).status == 400
    assert transport.value().count(b"HTTP/1.1") == 1
    assert transport.disconnecting
    channel.connectionLost(Failure(ConnectionLost()))


def test_a_unix_socket_goes_by_any_name(admin: Admin) -> None:
    channel, transport = admin.connect(StringTransport(hostAddress=UNIXAddress("/run/llmgw.sock")))
    channel.dataReceived(b"GET /metrics HTTP/1.1\r\nhost: llmgw\r\n\r\n")
    assert Answer(transport.value()).status == 200
    channel.connectionLost(Failure(ConnectionLost()))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"origin": "http://localhost:9901"}, 202),
        ({"sec-fetch-site": "same-origin"}, 202),
        ({"sec-fetch-site": "none"}, 202),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:9901"}, 403),
    ],
)
def test_foreign_pages_move_no_levers(headers: dict[str, str], status: int) -> None:
    for admin, shown in ((Admin(), {}), (Admin(TOKEN), BEARER)):
        assert admin.ask("POST", "/api/drain", {**headers, **shown}).status == status
        assert admin.gateway.draining is (status == 202)
        assert admin.ask("GET", "/api/state", {**headers, **shown}).status == 200
        admin.close()


# --- the dashboard's files ----------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/assets/main.js", "text/javascript; charset=utf-8"),
        ("/assets/style.css", "text/css; charset=utf-8"),
        ("/assets/icon.svg", "image/svg+xml"),
    ],
)
def test_a_file_has_its_type_and_is_sent_again_only_when_it_changed(
    admin: Admin, path: str, content_type: str
) -> None:
    first = admin.ask("GET", path)
    assert (first.status, first.headers["content-type"]) == (200, content_type)
    assert first.headers["cache-control"] == "no-cache"
    assert "'unsafe" not in first.headers["content-security-policy"]
    again = admin.ask("GET", path, {"if-none-match": first.headers["etag"]})
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert admin.ask("GET", path, {"if-none-match": '"other"'}).body == first.body
    assert admin.ask("HEAD", path).headers["etag"] == first.headers["etag"]
    assert admin.ask("POST", path).status == 405


def test_pages_hold_no_script_or_style_and_nothing_from_elsewhere(admin: Admin) -> None:
    for name, file in assets.load().items():
        text = file.decode()
        if name.endswith(".html"):
            assert not re.search(
                r"<style|<script(?! type=\"module\" src=\"/assets/)|\sstyle=|\son\w+=", text
            ), name
        assert not re.search(r"(?:src|href|from|import\(|url\()[ =]*[\"']?(?:https?:)?//", text), name


def test_files_are_open_and_what_they_show_is_not(locked: Admin) -> None:
    assert locked.ask("GET", "/assets/style.css", {"host": "gateway.example"}).status == 200
    assert locked.ask("GET", "/assets/dashboard.html").status == 200
    assert locked.ask("GET", "/api/state").status == 401


# --- sessions -----------------------------------------------------------------


def sign_in(admin: Admin, **headers: str) -> str:
    answer = admin.ask("POST", "/api/session", {**BEARER, **headers})
    assert answer.status == 200
    cookie, *flags = answer.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=43200"} <= set(flags)
    return cookie


def test_a_browser_gets_a_form_and_no_prompt(locked: Admin) -> None:
    answer = locked.ask("GET", "/", {"accept": "text/html,*/*", "sec-fetch-mode": "navigate"})
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert b'id="token"' in answer.body
    answer = locked.ask("GET", "/api/state", {"accept": "*/*", "sec-fetch-mode": "cors"})
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_the_token_once_and_then_the_cookie(locked: Admin) -> None:
    cookie = sign_in(locked)
    assert TOKEN not in cookie
    assert locked.ask("GET", "/api/state", {"cookie": cookie}).status == 200
    assert locked.ask("POST", "/api/drain", {"cookie": cookie, "sec-fetch-site": "same-origin"}).status == 202
    assert locked.ask("GET", "/", {"cookie": cookie}).status == 200
    assert locked.ask("GET", "/api/session", {"cookie": cookie}).json == {"token": True}


def test_over_tls_the_cookie_is_for_tls_alone(locked: Admin) -> None:
    transport: Any = StringTransport()
    transport.setTcpNoDelay = lambda enabled: None
    directlyProvides(transport, ISSLTransport)
    channel, _ = locked.connect(transport)
    head = (
        f"POST /api/session HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: 0\r\n\r\n"
    )
    channel.dataReceived(head.encode())
    assert Answer(transport.value()).headers["set-cookie"].endswith("; Secure")
    channel.connectionLost(Failure(ConnectionLost()))


def test_a_cookie_ends_after_twelve_hours_and_with_the_token(locked: Admin) -> None:
    cookie = sign_in(locked)
    other = Admin("another-token")
    assert other.ask("GET", "/api/state", {"cookie": cookie}).status == 401
    other.close()
    locked.clock.advance(12 * 3600 - 1)
    assert locked.ask("GET", "/api/state", {"cookie": cookie}).status == 200
    locked.clock.advance(1)
    assert locked.ask("GET", "/api/state", {"cookie": cookie}).status == 401


def test_a_cookie_of_ones_own_making_is_worth_nothing(locked: Admin) -> None:
    name, _, value = sign_in(locked).partition("=")
    expiry, _, seal = value.partition(".")
    for made in (
        "",
        ".",
        "x.y",
        f"{int(expiry) + 1}.{seal}",
        f"{expiry}.",
        f"{expiry}.{seal}0",
        f"{expiry}.\xff",
    ):
        assert locked.ask("GET", "/api/state", {"cookie": f"{name}={made}"}).status == 401, made


def test_a_wrong_token_begins_no_session(locked: Admin) -> None:
    answer = locked.ask("POST", "/api/session", {"authorization": "Bearer wrong"})
    assert answer.status == 401
    assert "set-cookie" not in answer.headers


def test_a_cookie_moves_no_levers_for_pages_of_others(locked: Admin) -> None:
    cookie = sign_in(locked)
    for foreign in ({"origin": "http://evil.example"}, {"sec-fetch-site": "same-site"}):
        assert locked.ask("POST", "/api/drain", {"cookie": cookie, **foreign}).status == 403
        assert locked.ask("POST", "/api/session", {**BEARER, **foreign}).status == 403
        assert locked.ask("DELETE", "/api/session", {"cookie": cookie, **foreign}).status == 403


def test_signing_out_takes_the_cookie_away(locked: Admin) -> None:
    answer = locked.ask("DELETE", "/api/session", {"cookie": sign_in(locked)})
    assert answer.status == 200
    assert answer.headers["set-cookie"].startswith("llmgw_admin=; Max-Age=0; ")


def test_without_a_token_there_is_nothing_to_sign_in_to(admin: Admin) -> None:
    assert admin.ask("GET", "/api/session").json == {"token": False}
    assert "set-cookie" not in admin.ask("POST", "/api/session").headers
    assert admin.ask("GET", "/", {"accept": "text/html"}).status == 200


# --- bodies -------------------------------------------------------------------


def test_a_body_that_says_it_is_too_long_is_refused_at_once(admin: Admin) -> None:
    channel, transport = admin.connect()
    head = b"POST /api/explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n"
    channel.dataReceived(head)
    channel.dataReceived(b"x" * 1000)
    assert Answer(transport.value()).status == 413
    assert transport.value().count(b"HTTP/1.1") == 1
    assert transport.disconnecting
    channel.connectionLost(Failure(ConnectionLost()))


def test_a_body_that_grows_too_long_is_refused_then(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module.AdminRequest, "_left", 100)
    channel, transport = admin.connect()
    channel.dataReceived(
        b"POST /api/explain HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    for _ in range(5):
        channel.dataReceived(b"32\r\n" + b"x" * 50 + b"\r\n")
    assert Answer(transport.value()).status == 413
    assert transport.value().count(b"HTTP/1.1") == 1
    assert transport.disconnecting
    channel.connectionLost(Failure(ConnectionLost()))


def test_a_strangers_body_is_not_kept(locked: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []
    monkeypatch.setattr(
        site_module.Request, "handleContentChunk", lambda self, data: kept.append(data), raising=False
    )
    assert locked.ask("POST", "/api/explain", body=b"x" * 1000).status == 401
    assert kept == []


# --- connections --------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        "content-length: 0\r\ntransfer-encoding: chunked\r\n",
        "content-length: 0\r\ncontent-length: 0\r\n",
        "content-length: -1\r\n",
        "no field\r\n",
        "a b: c\r\n",
        "a: \0\r\n",
        "".join(f"x{n}: y\r\n" for n in range(501)),
        f"x: {'y' * 16_000}\r\nx: {'y' * 16_000}\r\n",
    ],
)
def test_what_is_refused_is_not_done_all_the_same(admin: Admin, fields: str) -> None:
    channel, transport = admin.connect()
    lever = f"POST /api/drain HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n"
    channel.dataReceived(lever.encode() + b"0\r\n\r\nPOST /api/drain HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert Answer(transport.value()).status == 400
    assert transport.value().count(b"HTTP/1.1") == 1
    assert transport.disconnecting
    assert not admin.gateway.draining
    channel.connectionLost(Failure(ConnectionLost()))


class Endable(StringTransport):
    """A transport that tells its channel of an abort, as real ones do."""

    channel: Any = None

    def abortConnection(self) -> None:
        super().abortConnection()
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.connectionLost(Failure(ConnectionLost()))


def connected(admin: Admin) -> tuple[Any, Endable]:
    transport = Endable()
    channel = transport.channel = admin.site.buildProtocol(None)
    channel.makeConnection(transport)
    return channel, transport


DRIPS = {
    "head": (b"GET /livez HTTP/1.1\r\nhost: localhost\r\n", b"x: y\r\n", 10.0),
    "line": (b"", b"G", 10.0),
    "body": (b"POST /api/explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n\r\n", b"x", 30.0),
    "long body": (
        b"POST /api/explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1638400\r\n\r\n",
        b"x",
        100.0,
    ),
    "chunks": (
        b"POST /api/explain HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n",
        b"1\r\nx\r\n",
        30.0,
    ),
}


@pytest.mark.parametrize("what", DRIPS)
def test_a_request_has_to_be_whole_in_its_time(admin: Admin, what: str) -> None:
    begin, drip, within_s = DRIPS[what]
    channel, transport = connected(admin)
    channel.dataReceived(begin + drip)
    for _ in range(int(within_s) * 2 - 1):
        admin.clock.advance(0.5)
        channel.dataReceived(drip)
    assert transport.value() == b""
    admin.clock.advance(0.5)
    assert Answer(transport.value()).status == 408
    assert transport.disconnecting
    channel.dataReceived(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert transport.value().count(b"HTTP/1.1") == 1
    admin.clock.pump([5.0, 5.0])
    assert transport.disconnected
    assert len(admin.site.connections) == 0


def test_an_idle_connection_ends_without_a_word(admin: Admin) -> None:
    idle: list[Any] = [connected(admin)[1] for _ in range(2)]
    channel, _ = connected(admin)
    for _ in range(3):  # each answer begins the time anew
        admin.clock.advance(40.0)
        channel.dataReceived(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert all(each.disconnecting and not each.value() for each in idle)
    admin.clock.advance(5.0)
    assert all(each.disconnected for each in idle)
    assert len(admin.site.connections) == 1
    channel.transport.abortConnection()


def test_a_request_that_is_being_answered_has_no_deadline(admin: Admin) -> None:
    admin.gateway.reloading = Deferred()
    channel, transport = connected(admin)
    channel.dataReceived(b"POST /api/reload HTTP/1.1\r\nhost: localhost\r\n\r\n")
    channel.dataReceived(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n")  # the next one's head, in parts
    admin.clock.advance(600.0)
    assert not transport.disconnecting
    admin.gateway.reloading.callback([])
    admin.clock.advance(9.0)
    assert not transport.disconnecting
    admin.clock.advance(1.0)
    assert transport.disconnecting
    assert transport.value().count(b"HTTP/1.1 408") == 1
    transport.abortConnection()


def test_who_says_nothing_keeps_nobody_out(admin: Admin) -> None:
    """One too many ends the one that has waited longest; a stream of events waits for nothing."""
    admin.site.connections.most = 3
    listener, stream = connected(admin)
    listener.dataReceived(b"GET /api/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
    asking, answered = connected(admin)
    silent = connected(admin)[1]
    asking.dataReceived(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
    newest = connected(admin)[1]
    assert [each.disconnected for each in (stream, answered, silent, newest)] == [False, False, True, False]
    others = [connected(admin)[1] for _ in range(3)]
    assert not stream.disconnected
    assert [each.disconnected for each in (answered, newest, *others)] == [True, True, True, False, False]
    for each in (stream, *others[1:]):
        each.abortConnection()
    assert len(admin.site.connections) == 0


def test_where_all_are_at_work_the_newest_has_to_go(admin: Admin) -> None:
    admin.site.connections.most = 1
    listener, stream = connected(admin)
    listener.dataReceived(b"GET /api/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert connected(admin)[1].disconnected
    assert not stream.disconnected
    stream.abortConnection()


def test_http_2_is_not_offered(admin: Admin) -> None:
    assert admin.site.acceptableProtocols() == [b"http/1.1"]


# --- events -------------------------------------------------------------------


def news_of(raw: bytes) -> list[Any]:
    """What came of the feed ``numbers``."""
    found = re.findall(rb"event: numbers\ndata: (.*)\n\n", raw)
    return [json.loads(each) for each in found]


def events_of(raw: bytes) -> list[Any]:
    """What a chunked stream has said so far: states, and ``":"`` for comments."""
    body = raw.partition(b"\r\n\r\n")[2]
    text = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        text += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    assert text == b"" or text.endswith(b"\n\n")
    found: list[Any] = []
    for block in text.split(b"\n\n")[:-1]:
        if block.startswith(b"event: "):
            continue
        found.append(":" if block == b":" else json.loads(block.removeprefix(b"data: ")))
    return found


def test_the_state_is_told_at_once_and_when_it_changes(admin: Admin) -> None:
    channel, transport = admin.send("GET", "/api/events")
    answer = Answer(transport.value())
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in answer.headers
    assert events_of(transport.value()) == [{"uptime_s": 1.0, "in_flight": 0}]
    admin.clock.pump([0.1] * 30)
    assert len(events_of(transport.value())) == 1
    admin.gateway.picture = {"uptime_s": 5.0, "in_flight": 1}
    admin.clock.pump([0.1] * 11)
    assert events_of(transport.value())[1:] == [{"uptime_s": 5.0, "in_flight": 1}]
    channel.connectionLost(Failure(ConnectionLost()))


def test_there_is_one_event_a_second_at_most(admin: Admin) -> None:
    channel, transport = admin.send("GET", "/api/events")
    for index in range(100):
        admin.gateway.picture = {"in_flight": index}
        admin.clock.advance(0.1)
    assert 10 <= len(events_of(transport.value())) <= 11
    channel.connectionLost(Failure(ConnectionLost()))


def test_time_alone_is_no_event_and_a_comment_breaks_long_silence(admin: Admin) -> None:
    channel, transport = admin.send("GET", "/api/events")
    for second in range(40):
        admin.gateway.picture = {"uptime_s": float(second), "in_flight": 0}
        admin.clock.advance(1.0)
    assert events_of(transport.value())[1:] == [":", ":"]
    channel.connectionLost(Failure(ConnectionLost()))


def test_the_timer_runs_only_while_somebody_listens(admin: Admin) -> None:
    idle = len(admin.clock.getDelayedCalls())
    one, _ = admin.send("GET", "/api/events")
    two, _ = admin.send("GET", "/api/events")
    assert len(admin.clock.getDelayedCalls()) == idle + 1
    assert len(admin.root.events) == 2
    one.connectionLost(Failure(ConnectionLost()))
    assert len(admin.clock.getDelayedCalls()) == idle + 1
    two.connectionLost(Failure(ConnectionLost()))
    assert len(admin.clock.getDelayedCalls()) == idle
    assert len(admin.root.events) == 0


def test_a_slow_listener_misses_events_and_gets_the_newest(admin: Admin) -> None:
    channel, transport = admin.send("GET", "/api/events")
    producer = transport.producer
    assert producer is not None
    producer.pauseProducing()
    for index in range(1, 6):
        admin.gateway.picture = {"in_flight": index}
        admin.clock.advance(1.0)
    assert len(events_of(transport.value())) == 1
    producer.resumeProducing()
    admin.clock.advance(1.0)
    assert events_of(transport.value())[1:] == [{"in_flight": 5}]
    producer.stopProducing()
    channel.connectionLost(Failure(ConnectionLost()))


def test_a_listener_that_takes_nothing_for_a_minute_gives_its_place_to_others(admin: Admin) -> None:
    streams: list[Any] = []
    for _ in range(2):
        channel, stream = connected(admin)
        channel.dataReceived(b"GET /api/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        stream.producer.pauseProducing()
        streams.append(stream)
    stalled, slow = streams
    admin.clock.pump([1.0] * 30)
    slow.producer.resumeProducing()
    slow.producer.pauseProducing()
    admin.clock.pump([1.0] * 30)
    assert (stalled.disconnected, slow.disconnected) == (True, False)
    assert len(admin.root.events) == 1
    admin.clock.pump([1.0] * 30)
    assert slow.disconnected
    assert len(admin.root.events) == 0


def test_a_state_that_cannot_be_read_is_logged_and_the_stream_goes_on(
    admin: Admin, expected_failures: Any
) -> None:
    channel, transport = admin.send("GET", "/api/events")
    admin.gateway.fault = ZeroDivisionError()
    admin.clock.advance(1.0)
    assert len(expected_failures(ZeroDivisionError)) == 1
    admin.gateway.fault = None
    admin.gateway.picture = {"in_flight": 2}
    admin.clock.advance(1.0)
    assert events_of(transport.value())[1:] == [{"in_flight": 2}]
    channel.connectionLost(Failure(ConnectionLost()))


def test_a_feed_is_told_from_its_start_and_then_what_is_new(admin: Admin) -> None:
    admin.feed.total = 5
    channel, transport = admin.send("GET", "/api/events")
    assert news_of(transport.value()) == [{"total": 5, "items": [2, 3, 4]}]
    admin.clock.advance(1.0)
    admin.feed.total = 6
    admin.clock.advance(1.0)
    admin.clock.advance(1.0)
    assert news_of(transport.value())[1:] == [{"total": 6, "items": [5]}]
    transport.producer.pauseProducing()
    for total in range(7, 20):
        admin.feed.total = total
        admin.clock.advance(1.0)
    transport.producer.resumeProducing()
    admin.clock.advance(1.0)
    assert news_of(transport.value())[2:] == [{"total": 19, "items": [16, 17, 18]}]
    channel.connectionLost(Failure(ConnectionLost()))


def test_a_feed_can_be_asked_for(admin: Admin) -> None:
    admin.feed.total = 2
    assert admin.ask("GET", "/api/numbers").json == {"total": 2, "items": [0, 1]}


def test_listeners_are_bounded(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_LISTENERS", 2)
    channels = [admin.send("GET", "/api/events")[0] for _ in range(2)]
    answer = admin.ask("GET", "/api/events")
    assert (answer.status, answer.code) == (503, "overloaded")
    for channel in channels:
        channel.connectionLost(Failure(ConnectionLost()))
    assert admin.ask("GET", "/api/events").status == 200


def test_head_of_the_events_does_not_listen(admin: Admin) -> None:
    answer = admin.ask("HEAD", "/api/events")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert len(admin.root.events) == 0


def test_closing_the_listener_ends_the_streams() -> None:
    admin = Admin()
    channel, transport = admin.send("GET", "/api/events")
    admin.site.doStop()
    assert transport.value().endswith(b"0\r\n\r\n")
    channel.connectionLost(Failure(ConnectionLost()))
    assert not admin.clock.getDelayedCalls()


# --- over a socket ------------------------------------------------------------


class Reader(Protocol):
    """Collects, and fires when ``wanted`` has come."""

    def __init__(self, wanted: bytes) -> None:
        self.raw = b""
        self.wanted = wanted
        self.seen: Deferred[bytes] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.raw += data
        if self.wanted in self.raw and not self.seen.called:
            self.seen.callback(self.raw)


@pytest_twisted.ensureDeferred
async def test_a_listener_that_leaves_takes_the_timer_along() -> None:
    from twisted.internet import reactor

    gateway = Gateway()
    root = AdminRoot(gateway, TOKEN, flood=FailureFlood())
    port: Any = reactor.listenTCP(0, AdminSite(root), interface="127.0.0.1")  # type: ignore[attr-defined]
    endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port)
    reader: Any = await connectProtocol(endpoint, Reader(b"\n\n\r\n"))
    reader.transport.write(
        b"GET /api/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n" % TOKEN.encode()
    )
    raw = await reader.seen.addTimeout(5, reactor)
    assert events_of(raw) == [gateway.picture]
    assert len(root.events) == 1
    reader.transport.abortConnection()
    for _ in range(200):
        if not len(root.events):
            break
        await deferLater(reactor, 0.01)  # type: ignore[arg-type]
    assert len(root.events) == 0
    await port.stopListening()
