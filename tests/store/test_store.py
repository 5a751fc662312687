"""The shared store on real servers, and what becomes of it when they fail."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import free_port
from pytest_twisted import blockon, ensureDeferred
from redis_servers import RedisServer, Sentinel
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from llmgw.config import StoreConfig
from llmgw.demo.certificate import ensure_certificate
from llmgw.store.errors import StoreDown, StoreLost, StoreRefused
from llmgw.store.store import CLUSTER, Script, Store
from llmgw.values import Secret

ADD = Script("return redis.call('INCRBY', KEYS[1], ARGV[1])")


@pytest.fixture
def stores() -> Iterator[Callable[..., Store]]:
    """Makes stores, started; they end with the test."""
    made: list[Store] = []

    def make(**config: Any) -> Store:
        config.setdefault("op_s", 2.0)  # this machine may be busy
        config.setdefault("connect_s", 2.0)
        store = Store(StoreConfig(**config), reactor)
        made.append(store)
        store.start()
        return store

    yield make
    for store in made:
        blockon(store.close())


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {within_s} s"
        await deferLater(reactor, 0.01)  # type: ignore[arg-type]


async def failure_of(answer: Deferred[Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        await answer
    return str(raised.value)


@ensureDeferred
async def test_commands_and_scripts(redis_server: RedisServer, stores: Callable[..., Store]) -> None:
    store = stores(url=redis_server.url)
    assert (store.up, store.why) == (False, "connecting")
    assert await failure_of(store.command("PING"), StoreDown) == "connecting"
    await until(lambda: store.up)
    assert store.why == ""
    key = store.key("a", "b")
    assert key == "llmgw:a:b"
    assert await store.command("SET", key, b"\xff1", "PX", 60_000) == "OK"
    assert await store.command("GET", key) == b"\xff1"
    assert await store.command("GET", "no-such") is None
    assert await store.run(ADD, [store.key("n")], [2]) == 2
    assert await store.run(ADD, [store.key("n")], [3]) == 5
    assert await failure_of(store.command("INCR", key), StoreRefused)
    assert store.up


@ensureDeferred
async def test_s_red_2_a_lost_script_is_sent_again(
    redis_server: RedisServer, stores: Callable[..., Store]
) -> None:
    store = stores(url=redis_server.url)
    await until(lambda: store.up)
    await store.run(ADD, ["n"], [1])
    redis_server.ask("SCRIPT", "FLUSH")
    assert await store.run(ADD, ["n"], [1]) == 2
    assert store.up


@ensureDeferred
async def test_a_unix_socket_and_a_database(redis_server: RedisServer, stores: Callable[..., Store]) -> None:
    store = stores(url=f"unix://{redis_server.socket_path}?db=3")
    await until(lambda: store.up)
    await store.command("SET", "here", 1)
    assert redis_server.ask("EXISTS", "here") == 0
    assert b"db3:keys=1" in redis_server.ask("INFO", "keyspace")


@ensureDeferred
async def test_passwords(redis_servers: Callable[..., RedisServer], stores: Callable[..., Store]) -> None:
    server = redis_servers(password="open-sesame")
    server.ask("ACL", "SETUSER", "gw", "on", ">hush", "~llmgw:*", "+set", "+evalsha", "+eval")
    good = stores(url=server.url, password=Secret("open-sesame"))
    # This user may not even say HELLO.
    limited = stores(url=server.url.replace("//", "//gw@"), password=Secret("hush"))
    wrong = stores(url=server.url, password=Secret("wrong"))
    none = stores(url=server.url)
    await until(lambda: good.up and limited.up and "connecting" not in (wrong.why, none.why))
    assert "WRONGPASS" in wrong.why
    assert "NOAUTH" in none.why
    assert await limited.command("SET", "llmgw:x", 1) == "OK"
    assert "NOPERM" in await failure_of(limited.command("SET", "x", 1), StoreRefused)


@ensureDeferred
async def test_tls_is_verified(
    redis_servers: Callable[..., RedisServer], stores: Callable[..., Store], tmp_path: Path
) -> None:
    made = ensure_certificate(tmp_path)
    port = free_port()
    redis_servers(
        *("--tls-port", str(port), "--tls-cert-file", str(made.certificate), "--tls-key-file", str(made.key)),
        *("--tls-auth-clients", "no"),
    )
    good = stores(url=f"rediss://localhost:{port}", ca_file=str(made.authority))
    stranger = stores(url=f"rediss://localhost:{port}")
    await until(lambda: good.up and stranger.why != "connecting")
    assert await good.command("PING") == "PONG"
    assert "certificate verify failed" in stranger.why


@ensureDeferred
async def test_a_dead_server_fails_at_once_and_comes_back(
    redis_server: RedisServer, stores: Callable[..., Store]
) -> None:
    store = stores(url=redis_server.url)
    changes: list[bool] = []
    store.watchers.append(changes.append)
    await until(lambda: store.up)
    redis_server.kill()
    await until(lambda: not store.up)
    assert await failure_of(store.command("PING"), StoreDown)
    redis_server.start()
    await until(lambda: store.up)
    assert await store.command("PING") == "PONG"
    assert changes == [True, False, True]
    assert store.losses == 1


@ensureDeferred
async def test_s_red_1_a_server_that_stands_still_is_given_up_after_three_answers(
    redis_server: RedisServer, stores: Callable[..., Store]
) -> None:
    store = stores(url=redis_server.url, op_s=0.05, connect_s=0.25)
    await until(lambda: store.up)
    redis_server.signal(signal.SIGSTOP)
    for missed in range(3):
        assert store.up
        begun = time.monotonic()
        assert await failure_of(store.command("SET", f"k{missed}", 1), StoreLost) == "no answer in 50 ms"
        assert time.monotonic() - begun >= 0.05
    assert not store.up
    await until(lambda: store.why == "no answer in 250 ms")
    redis_server.signal(signal.SIGCONT)
    await until(lambda: store.up)


@ensureDeferred
async def test_s_red_3_late_answers_do_not_come_to_the_wrong_question(
    redis_server: RedisServer, stores: Callable[..., Store]
) -> None:
    store = stores(url=redis_server.url)
    await until(lambda: store.up)
    redis_server.ask("SET", "one", "1")
    redis_server.ask("SET", "two", "2")
    redis_server.signal(signal.SIGSTOP)
    assert await failure_of(store.command("GET", "one", within_s=0.05), StoreLost)
    cancelled = store.command("GET", "one")
    cancelled.addErrback(lambda failure: None)
    cancelled.cancel()
    answer = store.command("GET", "two")
    redis_server.signal(signal.SIGCONT)
    assert await answer == b"2"


@ensureDeferred
async def test_s_red_3_sentinel_tells_the_master_and_its_successor(
    redis_servers: Callable[..., Any], stores: Callable[..., Store]
) -> None:
    master = redis_servers()
    replica = redis_servers("--replicaof", "127.0.0.1", str(master.port))
    await until(lambda: b"master_link_status:up" in replica.ask("INFO", "replication"))
    sentinel = redis_servers(Sentinel, master.port)
    await until(lambda: b"slaves=1" in sentinel.ask("INFO", "sentinel"), 20)
    # The first of them is dead; the host of the URL is not used.
    store = stores(
        url="redis://ignored/0",
        sentinels=(f"127.0.0.1:{free_port()}", f"127.0.0.1:{sentinel.port}"),
        master="mm",
    )
    await until(lambda: store.up)
    await store.command("SET", "who", "first")
    assert master.ask("GET", "who") == b"first"
    master.kill()
    await until(lambda: not store.up)
    await until(lambda: store.up, 30)
    await store.command("SET", "who", "second")
    assert replica.ask("GET", "who") == b"second"


@ensureDeferred
async def test_s_red_3_a_master_that_became_a_replica_is_left(
    redis_servers: Callable[..., Any], stores: Callable[..., Store]
) -> None:
    master, other = redis_servers(), redis_servers()
    store = stores(url=master.url)
    await until(lambda: store.up)
    master.ask("REPLICAOF", "127.0.0.1", str(other.port))
    if store.up:  # Redis cuts clients on such a change, or tells them READONLY
        with pytest.raises((StoreRefused, StoreLost, StoreDown)):
            await store.command("SET", "a", 1)
    await until(lambda: "is a replica" in store.why)
    master.ask("REPLICAOF", "NO", "ONE")
    await until(lambda: store.up)


@ensureDeferred
async def test_a_cluster_and_a_sentinel_are_refused(
    redis_servers: Callable[..., Any], stores: Callable[..., Store]
) -> None:
    cluster = stores(url=redis_servers("--cluster-enabled", "yes", "--cluster-port", str(free_port())).url)
    sentinel = stores(url=redis_servers(Sentinel, redis_servers().port).url)
    await until(lambda: "connecting" not in (cluster.why, sentinel.why))
    assert cluster.why == CLUSTER
    assert "is a Sentinel" in sentinel.why
    assert not cluster.up
    assert not sentinel.up


@ensureDeferred
async def test_a_server_that_only_takes_connections(stores: Callable[..., Store]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = stores(url=f"redis://127.0.0.1:{silent.getsockname()[1]}", connect_s=0.1)
        await until(lambda: store.why == "no answer in 100 ms")


@ensureDeferred
async def test_a_server_that_drops_connections_is_not_tried_without_end(stores: Callable[..., Store]) -> None:
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                while True:
                    line, _ = listener.accept()
                    accepted.append(line)
                    for _ in ("HELLO", "INFO"):
                        line.recv(100)
                        line.sendall(b"-NOPERM no\r\n")
                    line.close()
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store = stores(url=f"redis://127.0.0.1:{listener.getsockname()[1]}")
        await until(lambda: store.losses >= 2)
        await deferLater(reactor, 0.3)  # type: ignore[arg-type]
        assert len(accepted) <= 3
        await store.close()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@ensureDeferred
async def test_closing(redis_server: RedisServer, stores: Callable[..., Store]) -> None:
    store = stores(url=redis_server.url)
    await until(lambda: store.up)
    redis_server.signal(signal.SIGSTOP)
    waiting = store.command("PING")
    closed = store.close()
    redis_server.signal(signal.SIGCONT)
    await closed
    assert await failure_of(waiting, StoreLost)
    assert await failure_of(store.command("PING"), StoreDown) == "closed"
    early = stores(url=redis_server.url)
    await early.close()
    early.start()
    await deferLater(reactor, 0.05)  # type: ignore[arg-type]
    assert not early.up


@ensureDeferred
async def test_a_watcher_that_raises_harms_nobody(
    redis_server: RedisServer, stores: Callable[..., Store], expected_failures: Callable[..., list[Any]]
) -> None:
    store = stores(url=redis_server.url)
    seen: list[bool] = []
    store.watchers += [lambda up: 1 / 0, seen.append]  # type: ignore[list-item,return-value]
    await until(lambda: store.up)
    assert seen == [True]
    del store.watchers[0]
    assert len(expected_failures(ZeroDivisionError)) == 1
