"""What is built from a configuration, and what is refused before anything starts."""

import pytest
from twisted.internet import reactor

from llmgw.assembly import build_listeners, check_discoveries, check_listeners_are_guarded
from llmgw.config import parse_config
from llmgw.errors import ConfigError, PluginError
from llmgw.listening import Sockets
from llmgw.service import GatewayService
from llmgw.verify import verify


def config(text=""):
    return parse_config(
        '[[backends]]\nid = "a"\nurl = "http://127.0.0.1:1"\n' + text, source="", base_dir="/"
    )


def test_a_discovery_that_is_not_installed_is_refused():
    with pytest.raises(PluginError, match=r"discovery\[0\]"):
        check_discoveries(config('[[discovery]]\nplugin = "no-such"\n'), reactor)


def test_faults_of_all_discoveries_are_told_at_once():
    with pytest.raises(ConfigError) as refused:
        check_discoveries(
            config('[[discovery]]\nplugin = "dns"\n[[discovery]]\nplugin = "static"\nno = 1\n'), reactor
        )
    places = [fault.where for fault in refused.value.faults]
    assert places == ["discovery[0].query", "discovery[1].no", "discovery[1].file"]


@pytest.mark.parametrize("text", ["foo:1", "systemd:domain=INET:index=0", "tcp:x"])
def test_an_endpoint_that_cannot_be_made_is_a_fault_with_its_key(text):
    with pytest.raises(ConfigError) as refused:
        build_listeners("listen", ["tcp:0:interface=127.0.0.1", text], None, Sockets(reactor))
    [fault] = refused.value.faults
    assert fault.where == "listen[1]"
    assert text in fault.what


def test_a_broken_certificate_is_not_taken_for_a_socket_that_is_not_there(monkeypatch):
    """``llmtls:systemd:…``: the socket is there, and the key is what is wrong."""
    monkeypatch.setattr("llmgw.listen.parsers._endpoint", lambda reactor, description: object())
    with pytest.raises(ConfigError) as refused:
        build_listeners(
            "listen", ["llmtls:systemd:INET:name=https:privateKey=/no.pem"], None, Sockets(reactor)
        )
    [fault] = refused.value.faults
    assert fault.what.endswith("/no.pem: cannot be read: No such file or directory")


def test_an_open_listener_is_never_left_without_keys():
    """A reload cannot close a listener, so it must not take the keys away either."""
    with pytest.raises(ConfigError) as refused:
        check_listeners_are_guarded(["tcp:8000:interface=127.0.0.1", "tcp:18000"], config())
    assert refused.value.faults[0].where == "auth"
    check_listeners_are_guarded(["tcp:8000:interface=127.0.0.1"], config())
    keyed = parse_config(
        'auth = ["anonymous"]\n[[backends]]\nid = "a"\nurl = "http://127.0.0.1:1"\n', source="", base_dir="/"
    )
    check_listeners_are_guarded(["tcp:18000"], keyed)


FAULTY = """
[router]
plugin = "no-such"
[[health]]
plugin = "llamacpp"
interval_s = 0.1
[[health]]
plugin = "no-such"
[rate_limiter]
plugin = "no-such"
[[discovery]]
plugin = "no-such"
[[discovery]]
plugin = "dns"
[[filters]]
plugin = "no-such"
[[filters]]
plugin = "deny-pattern"
words = [5]
"""
PLACES = [
    "discovery[0].plugin",
    "discovery[1].query",
    "rate_limiter.plugin",
    "router.plugin",
    "auth[0]",
    "filters[0].plugin",
    "filters[1].words[0]",
    "health[0].interval_s",
    "health[1].plugin",
    "backends[0].loader.plugin",
    "listen[0]",
]


@pytest.mark.parametrize("workers", [1, 2])
def test_faults_of_all_parts_are_told_at_once(workers):
    head = f'workers = {workers}\nauth = ["no-such"]\n'
    head += 'listen = ["systemd:domain=INET:index=0"]\n'
    backend = '[[backends]]\nid = "a"\nurl = "http://127.0.0.1:1"\nloader = "no-such"\n'
    faulty = parse_config(head + backend + FAULTY, source="", base_dir="/")
    with pytest.raises(ConfigError) as refused:
        verify(faulty, reactor)
    assert [str(fault).partition(": ")[0] for fault in refused.value.faults] == PLACES


def test_a_reload_tells_the_faults_of_all_parts_at_once_and_changes_nothing():
    faulty = config('[router]\nplugin = "no-such"\n[[filters]]\nplugin = "no-such"\n')
    service = GatewayService(config(), reactor, reread=lambda: faulty)
    before = (service.config, service.gateway.router, service.gateway.filters)
    with pytest.raises(ConfigError) as refused:
        service._reload()
    assert len(refused.value.faults) == 2
    assert (service.config, service.gateway.router, service.gateway.filters) == before
