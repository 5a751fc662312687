"""The endpoint strings ``llmtls:`` and ``proxied:``, as Twisted takes them apart."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest
from authority import Authority
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IStreamServerEndpointStringParser
from twisted.internet.testing import MemoryReactorClock
from twisted.plugin import getPlugins
from zope.interface.verify import verifyObject

from llmgw.listen.parsers import llmtls, proxied
from llmgw.listen.proxied import ProxiedEndpoint
from llmgw.listen.tls import TlsEndpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    authority = Authority()
    authority.issue("gw.example").write(folder, "gw.example.pem")
    authority.issue("gw.example").write(folder, "two")
    authority.write(folder / "ca.crt.txt")
    return folder


def endpoint(description: str, folder: Path) -> Any:
    return serverFromString(MemoryReactorClock(), description.replace("DIR", str(folder)))


def test_they_are_plugins_and_keep_the_contract() -> None:
    found = {plugin.prefix: plugin for plugin in getPlugins(IStreamServerEndpointStringParser)}
    assert {"llmtls", "proxied"} <= set(found)
    for plugin in (llmtls, proxied):
        verifyObject(IStreamServerEndpointStringParser, plugin)


@pytest.mark.parametrize(
    "description",
    [
        "llmtls:tcp:8443:privateKey=DIR/gw.example.pem:interface=127.0.0.1:backlog=7",
        "llmtls:tcp:port=8443:certKey=DIR/two.crt:privateKey=DIR/two.key:backlog=7:interface=127.0.0.1",
        r"llmtls:tcp\:8443\:interface=127.0.0.1:privateKey=DIR/gw.example.pem:backlog=7",
    ],
)
def test_what_is_not_ours_goes_to_the_endpoint_within(folder: Path, description: str) -> None:
    made = endpoint(description, folder)
    assert isinstance(made, TlsEndpoint)
    assert (made.inner._port, made.inner._interface, made.inner._backlog) == (8443, "127.0.0.1", 7)


@pytest.mark.parametrize("inner", ["haproxy:tcp:8443", "proxied:tcp:8443", r"haproxy\:tcp\:8443"])
def test_the_proxy_header_comes_before_tls(folder: Path, inner: str) -> None:
    made = endpoint(f"llmtls:{inner}:privateKey=DIR/gw.example.pem:networks=10.0.0.0/8,fd00\\:\\:/8", folder)
    assert isinstance(made.inner, ProxiedEndpoint)
    assert made.inner._networks == (
        ipaddress.ip_network("10.0.0.0/8"),
        ipaddress.ip_network("fd00::/8"),
    )
    assert made.inner.inner._port == 8443


def test_an_inner_address_keeps_its_colons_and_equal_signs(folder: Path) -> None:
    made = endpoint(r"llmtls:unix:/tmp/a\:b\=c:mode=600:privateKey=DIR/gw.example.pem", folder)
    assert made.inner._address == "/tmp/a:b=c"
    made = endpoint(r"proxied:tcp:1:interface=\:\:1", folder)
    assert made.inner._interface == "::1"


@pytest.mark.parametrize(
    ("description", "told"),
    [
        ("llmtls:tcp:1", "needs privateKey= or certs="),
        ("llmtls:", "wraps another endpoint"),
        ("llmtls:privateKey=DIR/gw.example.pem", "wraps another endpoint"),
        ("llmtls:ssl:1:privateKey=DIR/gw.example.pem", "wraps an endpoint without TLS"),
        ("llmtls:tcp:1:certs=DIR:certKey=DIR/two.crt", "certKey= needs privateKey="),
        ("llmtls:tcp:1:certs=DIR:clientCerts=optional", "clientCerts= needs clientCA="),
        (
            "llmtls:tcp:1:privateKey=DIR/gw.example.pem:minimum=1.1",
            "minimum must be 1.2 or 1.3, not '1.1'",
        ),
        (
            "llmtls:tcp:1:certs=DIR:clientCA=DIR/ca.crt.txt:clientCerts=maybe",
            "clientCerts must be required or optional",
        ),
        ("llmtls:tcp:1:privateKey=DIR/no.pem", "no.pem: cannot be read"),
        ("llmtls:tcp:1:privateKey=DIR/two.key:certKey=DIR/gw.example.pem", "does not belong to the private"),
        ("llmtls:tcp:1:certs=DIR", "does not say which one is the default"),
        ("proxied:tcp:1:networks=10.0.0.1/8", "has host bits set"),
        ("proxied:tcp:1:networks=", "does not appear to be an IPv4 or IPv6 network"),
        ("proxied:", "wraps another endpoint"),
    ],
)
def test_what_is_wrong_is_told(folder: Path, description: str, told: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        endpoint(description, folder)
    assert told in str(caught.value)
