"""What a configuration names, looked at: do the servers answer, and are they what is said of them?

Each finding says where the cause stands in the file, what is seen, and how to mend
it. Nothing here keeps a gateway from starting: a server may come later.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from llmgw.access import key_file
from llmgw.commands.asked import SOON_S, WITHIN_S, Finding, Told, ask_backend, loader_of, quoted
from llmgw.commands.sources import Named
from llmgw.config import BackendConfig, Config
from llmgw.errors import ConfigError
from llmgw.store.address import parse_address

AT_ONCE = 16
_PROXIED = re.compile(r"(^|:)(proxied|haproxy)(:|\\)")


def look(
    config: Config, named: Sequence[Named] = (), progress: Callable[[], None] = lambda: None
) -> list[Finding]:
    """Ask every backend and the store, and compare.

    :param named: what the discoveries have told.
    :param progress: called once for each backend.
    """
    findings: list[Finding] = [finding for source in named for finding in source.findings()]
    told: dict[str, Told] = {}
    backends = {f"backends[{index}]": backend for index, backend in enumerate(config.backends)}
    for source in named:
        backends |= {f"{source.where}.{backend.id}": backend for backend in source.backends}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for backend, (answer, found) in zip(
            backends.values(), pool.map(ask_backend, backends, backends.values()), strict=True
        ):
            told[backend.id] = answer
            findings += found
            progress()
    findings += _models(config, told)
    findings += _store(config)
    findings += _commands(config)
    findings += _alone(config, told)
    findings += _keys(config, told)
    return findings


def _served(config: Config, told: Mapping[str, Told]) -> set[str] | None:
    """All models that there are; ``None`` while somebody who might have more has not told."""
    served: set[str] = set()
    for backend in config.backends:
        own = backend.models if backend.models is not None else told[backend.id].models
        if own is None:
            return None
        served |= set(own)
    return None if config.discovery else served


def _models(config: Config, told: Mapping[str, Told]) -> Iterable[Finding]:
    served = _served(config, told)
    if served is None:
        return
    for index, model in enumerate(config.models):
        if model.target not in served:
            what = f"no backend serves {model.target!r}, the target of {model.name!r}"
            if model.target == model.name:
                what = f"no backend serves {model.name!r}"
            yield Finding(f"models[{index}].target", what, f"There are: {quoted(sorted(served)) or 'none'}")


def _store(config: Config) -> Iterable[Finding]:
    url = config.store.url
    if url is None or config.store.sentinels:
        return
    address = parse_address(url, hostless=True)
    place = address.path or f"{address.host}:{address.port}"
    try:
        if address.path:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(WITHIN_S)
                line.connect(address.path)
        else:
            socket.create_connection((address.host, address.port), WITHIN_S).close()
    except OSError as error:
        what = f"the store at {place} cannot be reached: {error.strerror or error}"
        cure = "Start it, or check its address; until then each gateway counts alone"
        yield Finding("store.url", what, cure)


def _commands(config: Config) -> Iterable[Finding]:
    """Files of models that servers are to be started with."""
    for index, backend in enumerate(config.backends):
        if backend.loader is None or backend.loader.plugin != "command":
            continue
        for model, path in backend.loader.options["models"].items():
            # Else it may be another way to name a model.
            if path.startswith("/") and not os.access(path, os.R_OK):
                what = f"{path}, the file of {model!r}, is not there, or cannot be read"
                cure = "Correct it in `models`, or let the daemon's user read it"
                yield Finding(f"backends[{index}].loader.models", what, cure)


def _alone(config: Config, told: Mapping[str, Told]) -> Iterable[Finding]:
    """Models that are loaded by name, seemingly by several gateways that share nothing."""
    if config.store.url or config.store.sentinels or config.workers > 1:
        return
    if any(table.plugin == "etcd" for table in config.discovery):
        return
    balanced = next((i for i, text in enumerate(config.listen) if _PROXIED.search(text)), None)
    loading = next((i for i, each in enumerate(config.backends) if _loads_by_name(each, told)), None)
    if balanced is not None and loading is not None:
        yield Finding(
            f"listen[{balanced}]",
            f"connections come from a balancer, and backends[{loading}] loads models by name: if it has "
            "other gateways behind it, two of them may load a model at a time, as there is no [store]",
            "Name a [store] that all of them share, or a [[discovery]] of etcd; if this is the only gateway, "
            "all is well",
        )


def _loads_by_name(backend: BackendConfig, told: Mapping[str, Told]) -> bool:
    loader = loader_of(backend)
    return loader not in ("none", "command") if loader is not None else told[backend.id].router


def _keys(config: Config, told: Mapping[str, Told]) -> Iterable[Finding]:
    served = _served(config, told)
    names = None if served is None else served | {model.name for model in config.models}
    now = time.time()
    for index, spec in enumerate(config.auth):
        kind, _, path = spec.partition(":")
        if kind != "keys":
            continue
        where = f"auth[{index}]"
        try:
            keys = key_file.load(path)[0].keys.values()
        except ConfigError:
            continue  # told as a fault
        live = [key for key in keys if key.state(now) == "live"]
        if not live:
            yield Finding(
                where, f"{path} holds no key that is good", f"Make one: llmgw keys new --file {path} NAME"
            )
        for key in live:
            if key.expires is not None and key.expires.timestamp() < now + SOON_S:
                what = f"the key {key.id} of {key.name} ends on {key.expires:%Y-%m-%d}"
                yield Finding(where, what, "Make its owner a new one, then revoke this")
            missing = [] if names is None or key.models is None else sorted(set(key.models) - names)
            if missing:
                what = f"the key {key.id} of {key.name} may use {quoted(missing)}, which nobody serves"
                yield Finding(where, what, f"Correct `models` in [keys.{key.id}]")
