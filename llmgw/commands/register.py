"""``llmgw register``: a side-car that keeps one model server registered in etcd while it is well.

It runs until it is told to end. Exit status: 0, ended by a signal and taken out
of etcd; 2, wrong options; 3, ended by a signal, and etcd could not be told (the
key goes by itself when its lease ends); 1, a fault of its own.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import click

from llmgw import plugins
from llmgw.config import parse_backend
from llmgw.discovery.etcd_client import EtcdClient, EtcdOptions, check_etcd_options
from llmgw.discovery.registration import Registration
from llmgw.discovery.standing import read_options
from llmgw.errors import ConfigError, PluginError
from llmgw.private_files import read_private

NOT_TOLD = 3
_SAID = {
    "healthy": "the server is well: {detail}",
    "unhealthy": "the server is not well: {detail}",
    "registered": "registered as {key}",
    "changed": "changed {key}",
    "deregistered": "took {key} away ({why})",
    "lease_lost": "the lease has ended in etcd; a new one is taken",
    "etcd_lost": "etcd: {why}; trying on",
    "etcd_back": "etcd is there again at {endpoint}",
    "taken": "{why}; trying on",
    "failed": "a fault of its own: {why}",
    "lingering": "waiting {seconds:g} s for gateways to let go",
    "ended": "ended",
}


def _labels(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
        found[name] = text
    return found


@click.command()
@click.option("--id", "id_", required=True, help="The backend's id, and the last part of its key.")
@click.option("--url", required=True, help="Base URL by which gateways reach the server.")
@click.option(
    "--etcd", "endpoints", required=True, multiple=True, help="Etcd members; repeatable, or with commas."
)
@click.option("--prefix", default="/llmgw/", show_default=True, help="Before the id in the key.")
@click.option("--ttl-s", type=click.IntRange(2, 3600), default=15, show_default=True, help="Of the lease.")
@click.option("--probe-url", help="Where the server is reached from here, if not by --url.")
@click.option("--health", default="llamacpp", show_default=True, help="Health plugin that looks at it.")
@click.option(
    "--interval-s", type=click.FloatRange(2, 3600), default=5.0, show_default=True, help="Of looks."
)
@click.option(
    "--fall", type=click.IntRange(1, 1000), default=3, show_default=True, help="Bad looks to leave."
)
@click.option(
    "--rise", type=click.IntRange(1, 1000), default=2, show_default=True, help="Good ones to return."
)
@click.option("--model", "models", multiple=True, help="A name it serves; repeatable. Absent: asked of it.")
@click.option("--weight", type=float, help="Static compute weight.")
@click.option("--max-connections", type=int, help="Most requests of one gateway. Absent: its slots.")
@click.option("--context-length", type=int, help="Tokens of one slot. Absent: asked of it.")
@click.option("--label", "labels", multiple=True, callback=_labels, help="NAME=VALUE; repeatable.")
@click.option("--api-key-file", help="The server's own key, for looking at it.")
@click.option("--ca-file", help="Authorities for an https server, in place of the system's.")
@click.option("--username", help="Log in to etcd.")
@click.option("--password-file", help="With this password; read at each log-in.")
@click.option("--etcd-ca-file", help="Authorities for etcd over https.")
@click.option("--etcd-cert-file", help="Our certificate for etcd.")
@click.option("--etcd-key-file", help="Its key.")
@click.option(
    "--linger-s",
    type=click.FloatRange(0, 3600),
    default=0.0,
    show_default=True,
    help="Stay so long after leaving etcd, so that whoever stops the server next finds no gateway there.",
)
@click.option("--json", "as_json", is_flag=True, help="Events as JSON, one a line.")
def register(id_: str, url: str, endpoints: tuple[str, ...], prefix: str, as_json: bool, **more: Any) -> None:
    """Keep a model server in etcd under a lease, while it is well.

    Gateways with a [[discovery]] of plugin "etcd" and the same prefix find it
    there. SIGTERM takes it away and ends with status 0; 3 if etcd could not be told.
    """
    try:
        setting = _Setting(id_, url, endpoints, prefix, more)
    except ConfigError as error:
        raise click.UsageError("; ".join(str(error).splitlines())) from None
    except (PluginError, OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    sys.exit(_run(setting, _telling(as_json, id_)))


class _Setting:
    """The options, checked.

    :raise ConfigError: (PluginError, OSError, ValueError) some of them are wrong.
    """

    def __init__(
        self, id: str, url: str, endpoints: tuple[str, ...], prefix: str, more: dict[str, Any]
    ) -> None:
        told: dict[str, Any] = {
            "id": id,
            "url": url,
            "models": list(more["models"]) or None,
            "weight": more["weight"],
            "max_connections": more["max_connections"],
            "context_length": more["context_length"],
            "labels": more["labels"] or None,
        }
        told = {name: value for name, value in told.items() if value is not None}
        backend = parse_backend(told)
        if not re.fullmatch(r"[\x21-\x7e]+", prefix):
            raise ValueError("prefix: must be visible ASCII")
        self.told = Registration(**{**told, "url": backend.url})
        options = {
            "endpoints": [_with_scheme(each.strip()) for text in endpoints for each in text.split(",")],
            "prefix": prefix,
            "username": more["username"],
            "password_file": more["password_file"],
            "ca_file": more["etcd_ca_file"],
            "cert_file": more["etcd_cert_file"],
            "key_file": more["etcd_key_file"],
        }
        self.etcd = read_options(
            EtcdOptions,
            {name: value for name, value in options.items() if value is not None},
            check_etcd_options,
        )
        self.key = self.etcd.prefix + id
        self.probe_url = url if more["probe_url"] is None else more["probe_url"]
        self.probe_url = parse_backend({"id": id, "url": self.probe_url}).url
        self.headers = {}
        if more["api_key_file"] is not None:
            word = read_private(more["api_key_file"]).decode("ascii").strip()
            self.headers["authorization"] = f"Bearer {word}"
        self.ca_file = more["ca_file"]
        self.health = more["health"]
        self.health_options = {"interval_s": more["interval_s"]}
        self.ttl_s, self.fall, self.rise = more["ttl_s"], more["fall"], more["rise"]
        self.linger_s = more["linger_s"]
        from twisted.internet import reactor

        plugins.build("health", self.health, self.health_options, reactor, where="health")


def _with_scheme(endpoint: str) -> str:
    """``10.0.0.1:2379`` as etcd's own tools take it."""
    return endpoint if "://" in endpoint or not endpoint else f"http://{endpoint}"


def _telling(as_json: bool, id: str) -> Any:
    """Writes events, one a line."""

    def tell(event: str, **fields: Any) -> None:
        if as_json:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"at": at, "event": event, "id": id, **fields})
        else:
            line = f"{id}: {' '.join(_SAID[event].format(**fields).split())}"
        click.echo(line)

    return tell


def _run(setting: _Setting, tell: Any) -> int:
    """Until a signal. :return: the exit status."""
    from twisted.internet import reactor as any_reactor
    from twisted.internet.defer import Deferred
    from twisted.internet.task import deferLater

    from llmgw.discovery.http_client import HttpClient, TlsFiles
    from llmgw.health.target import Target
    from llmgw.sidecar import Keeping, Sidecar
    from llmgw.wire.pool import tls_options

    reactor: Any = any_reactor
    reactor.seconds = time.monotonic  # a clock that is set must not end a lease
    etcd = setting.etcd
    parts = urlsplit(setting.probe_url)
    tls = tls_options(parts.hostname or "", setting.ca_file, True) if parts.scheme == "https" else None

    def told(event: str, **fields: Any) -> None:
        tell(event, **fields)
        if event == "failed":
            finish(1)

    sidecar = Sidecar(
        reactor,
        Keeping(setting.key, setting.told, setting.ttl_s, setting.fall, setting.rise),
        EtcdClient(
            etcd, HttpClient(reactor, TlsFiles(etcd.ca_file, etcd.cert_file, etcd.key_file), etcd.timeout_s)
        ),
        len(etcd.endpoints),
        plugins.build("health", setting.health, setting.health_options, reactor),
        Target(reactor, setting.key, setting.probe_url, setting.headers, tls),
        told,
    )
    status: list[int] = []

    def finish(code: int) -> None:
        status.append(code)
        if reactor.running:
            reactor.stop()

    async def leave() -> None:
        gone = await sidecar.stop()
        if setting.linger_s and gone:
            tell("lingering", seconds=setting.linger_s)
            await deferLater(reactor, setting.linger_s)
        finish(0 if gone else NOT_TOLD)

    leaving: list[Deferred[None]] = []

    def end() -> None:
        if leaving:
            finish(NOT_TOLD)  # hurried
        else:
            leaving.append(Deferred.fromCoroutine(leave()))
            leaving[0].addErrback(lambda failure: told("failed", why=failure.getErrorMessage()))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: reactor.callFromThread(end))
    reactor.callWhenRunning(sidecar.start)
    reactor.run(installSignalHandlers=False)
    tell("ended")
    return status[0] if status else 1
