"""The etcd discovery against a real etcd: resume, compaction, another store, silence, log-in."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any

import pytest
import pytest_twisted
from certificates import issue
from real_etcd import Etcd, Relay
from twisted.internet import reactor
from twisted.internet.task import deferLater

from llmgw.builtins import etcd_discovery


class Watching:
    """A discovery at work, and what it told."""

    def __init__(self, *urls: str, **options: Any) -> None:
        self.told: list[list[dict[str, Any]]] = []
        table = {"endpoints": list(urls), "silence_s": 5.0, **options}
        self.discovery = etcd_discovery.build(table, reactor)
        self.discovery.start(self.told.append)

    @property
    def ids(self) -> list[str] | None:
        return [each.get("id", "?") for each in self.told[-1]] if self.told else None

    async def until(self, check: Callable[[], Any], within_s: float = 15) -> None:
        end = time.monotonic() + within_s
        while not check():
            assert time.monotonic() < end, (self.told[-1:], self.discovery.error)
            await deferLater(reactor, 0.02)  # type: ignore[arg-type]

    async def until_ids(self, *ids: str) -> None:
        await self.until(lambda: self.ids == list(ids))


@pytest.fixture
def watching() -> Any:
    made: list[Watching] = []

    def make(*urls: str, **options: Any) -> Watching:
        made.append(Watching(*urls, **options))
        return made[-1]

    yield make
    for each in made:
        each.discovery.stop()
    # What was aborted is told in the next turn.
    pytest_twisted.blockon(deferLater(reactor, 0))  # type: ignore[arg-type]


def doc(host: int, **more: Any) -> dict[str, Any]:
    return {"url": f"http://10.0.0.{host}:8080", **more}


@pytest_twisted.ensureDeferred
async def test_what_is_there_what_comes_what_changes_and_what_goes(etcd: Etcd, watching: Any) -> None:
    etcd.put("/llmgw/a", doc(1, weight=2, context=4096, caps=3, labels={"zone": "x"}))
    etcd.put("/llmgwx/other", doc(9))
    it = watching(etcd.url)
    await it.until_ids("a")
    assert it.told[-1] == [
        {
            "key": "/llmgw/a",
            "id": "a",
            "url": "http://10.0.0.1:8080",
            "weight": 2.0,
            "context_length": 4096,
            "max_connections": 3,
            "labels": {"zone": "x"},
        }
    ]
    etcd.put("/llmgw/more/b", doc(2))
    await it.until_ids("a", "b")
    etcd.put("/llmgw/a", doc(1, weight=5))
    await it.until(lambda: it.told[-1][0].get("weight") == 5.0)
    etcd.put("/llmgw/c", "no json")
    await it.until_ids("a", "b", "?")
    assert it.told[-1][2]["key"] == "/llmgw/c"
    etcd.delete("/llmgw/a")
    etcd.delete("/llmgw/c")
    await it.until_ids("b")
    assert it.discovery.connected


@pytest_twisted.ensureDeferred
async def test_a_lease_that_ends_takes_its_backend_along(etcd: Etcd, watching: Any) -> None:
    etcd.put("/llmgw/a", doc(1))
    etcd.put("/llmgw/b", doc(2), etcd.lease(1))
    it = watching(etcd.url)
    await it.until_ids("a", "b")
    await it.until_ids("a")


@pytest_twisted.ensureDeferred
async def test_a_crash_of_etcd_changes_nothing_and_the_watch_resumes(etcd: Etcd, watching: Any) -> None:
    etcd.put("/llmgw/a", doc(1))
    it = watching(etcd.url)
    await it.until_ids("a")
    etcd.kill()
    await it.until(lambda: not it.discovery.connected)
    assert it.ids == ["a"]
    etcd.start()
    etcd.put("/llmgw/b", doc(2))
    await it.until_ids("a", "b")
    assert len(it.told) == 2  # nothing was told twice: it went on where it was


@pytest_twisted.ensureDeferred
async def test_s_etc_1_a_revision_that_was_compacted_meanwhile_is_read_anew(
    etcd: Etcd, watching: Any
) -> None:
    etcd.put("/llmgw/a", doc(1))
    etcd.put("/llmgw/b", doc(2))
    relay = Relay(etcd.port)
    it = watching(relay.url)
    await it.until_ids("a", "b")
    relay.cut()
    await it.until(lambda: not it.discovery.connected)
    etcd.delete("/llmgw/a")
    for turn in range(5):
        etcd.put("/llmgw/c", doc(3, weight=turn + 1))
    etcd.compact()
    assert it.ids == ["a", "b"]
    seen = len(it.told)
    relay.mend()
    await it.until_ids("b", "c")
    assert len(it.told) == seen + 1  # from the one set to the other, and none in between
    etcd.put("/llmgw/d", doc(4))
    await it.until_ids("b", "c", "d")
    relay.cut()


@pytest_twisted.ensureDeferred
async def test_another_store_at_the_same_place_is_read_anew(etcd: Etcd, watching: Any) -> None:
    for turn in range(5):
        etcd.put("/llmgw/a", doc(1, weight=turn + 1))
    it = watching(etcd.url)
    await it.until_ids("a")
    etcd.wipe()
    etcd.put("/llmgw/b", doc(2))
    await it.until_ids("b")


@pytest_twisted.ensureDeferred
async def test_a_member_that_hangs_is_left_for_the_next(
    etcd_server: Callable[..., Etcd], watching: Any
) -> None:
    first, second = etcd_server(), etcd_server()
    first.put("/llmgw/a", doc(1))
    second.put("/llmgw/b", doc(2))
    it = watching(first.url, second.url, timeout_s=0.5, silence_s=1.0)
    await it.until_ids("a")
    first.pause(True)
    try:
        await it.until_ids("b")
    finally:
        first.pause(False)


@pytest_twisted.ensureDeferred
async def test_an_etcd_that_hangs_from_the_start_is_waited_for(etcd: Etcd, watching: Any) -> None:
    etcd.put("/llmgw/a", doc(1))
    etcd.pause(True)
    try:
        it = watching(etcd.url, timeout_s=0.2)
        await it.until(lambda: it.discovery.error.endswith("no answer in 0.2 s"))
    finally:
        etcd.pause(False)
    await it.until_ids("a")


@pytest_twisted.ensureDeferred
async def test_silence_alone_is_no_failure(etcd: Etcd, watching: Any) -> None:
    etcd.put("/llmgw/a", doc(1))
    it = watching(etcd.url, silence_s=1.0)
    await it.until_ids("a")
    contact_s = it.discovery.contact_s
    await it.until(lambda: it.discovery.contact_s > contact_s + 1.5)
    assert it.discovery.error == ""
    assert len(it.told) == 1
    etcd.put("/llmgw/b", doc(2))
    await it.until_ids("a", "b")


@pytest_twisted.ensureDeferred
async def test_progress_is_contact(etcd_server: Callable[..., Etcd], watching: Any) -> None:
    etcd = etcd_server("--experimental-watch-progress-notify-interval", "300ms")
    etcd.put("/llmgw/a", doc(1))
    it = watching(etcd.url, silence_s=600)
    await it.until_ids("a")
    contact_s = it.discovery.contact_s
    await it.until(lambda: it.discovery.contact_s > contact_s + 0.5)
    revision = it.discovery._mirror.revision
    last = etcd.put("/elsewhere", "x")
    await it.until(lambda: it.discovery._mirror.revision == last)
    assert last > revision


@pytest_twisted.ensureDeferred
async def test_a_log_in_is_renewed_and_a_wrong_one_is_told(
    etcd_server: Callable[..., Etcd], watching: Any, tmp_path: Any
) -> None:
    etcd = etcd_server("--auth-token-ttl", "1")
    etcd.enable_users()
    etcd.put("/llmgw/a", doc(1))
    password = tmp_path / "password"
    password.write_text("wrong\n")
    password.chmod(0o600)
    as_reader = {"username": "reader", "password_file": str(password), "silence_s": 1.0}
    it = watching(etcd.url, **as_reader)
    await it.until(lambda: "authentication failed" in it.discovery.error)
    password.write_text("reader-word\n")
    await it.until_ids("a")
    nobody = watching(etcd.url)
    await nobody.until(lambda: "user name is empty" in nobody.discovery.error)
    outside = watching(etcd.url, prefix="/other/", **as_reader)
    await outside.until(lambda: "permission denied" in outside.discovery.error)
    # Tokens end after a second here, and a watch is opened each second.
    contact_s = it.discovery.contact_s
    await it.until(lambda: it.discovery.contact_s > contact_s + 2.5)
    etcd.log_in("root", "root-word")
    etcd.put("/llmgw/b", doc(2))
    await it.until_ids("a", "b")
    assert it.discovery.error == ""


@pytest_twisted.ensureDeferred
async def test_over_tls_both_ends_show_who_they_are(
    etcd_server: Callable[..., Etcd], watching: Any, tmp_path: Any
) -> None:
    ours = issue(tmp_path)
    ca, cert, key = str(ours.authority), str(ours.certificate), str(ours.key)
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(cert, key)
    flags = ("--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth")
    etcd = etcd_server(*flags, scheme="https", verify=context)
    etcd.put("/llmgw/a", doc(1))
    it = watching(etcd.url, ca_file=ca, cert_file=cert, key_file=key)
    await it.until_ids("a")
    etcd.put("/llmgw/b", doc(2))
    await it.until_ids("a", "b")
    nobody = watching(etcd.url, ca_file=ca)
    await nobody.until(lambda: nobody.discovery.error)
    doubtful = watching(etcd.url, cert_file=cert, key_file=key)
    await doubtful.until(lambda: "verify failed" in doubtful.discovery.error)
    assert not nobody.told
    assert not doubtful.told
