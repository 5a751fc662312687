"""What no single key can tell: names that clash, bounds that cross, listeners open to all, aliases.

Faults and warnings go to the reader, which knows those of single keys already;
what was refused there stands as ``BAD`` in the config and is passed over here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import asdict, replace

from llmgw.config.fleet_tables import BackendConfig
from llmgw.config.places import address_of, is_local_url, is_loopback_endpoint, with_backlog
from llmgw.config.reader import BAD, Reader
from llmgw.config.schema import Config, StoreConfig
from llmgw.config.words import key_path, shown
from llmgw.store.address import Address, parse_address
from llmgw.values import Caps

FAR_LOADERS = ("llamacpp-router", "ollama", "none")
"""Loaders that a backend may ask for that did not come from the file."""


def check_backend(reader: Reader, backend: BackendConfig, where: str) -> None:
    """What no single key of a backend can tell."""
    https = backend.url.startswith("https:")
    tls = backend.tls
    if tls.key_file is not None and tls.cert_file is None:
        reader.fault(key_path(key_path(where, "tls"), "key_file"), "wants a cert_file beside it")
    if not https and (tls.ca_file is not None or tls.cert_file is not None or not tls.verify):
        reader.fault(key_path(where, "tls"), f"the URL is not https: {shown(backend.url)}")
    if https and not backend.tls.verify:
        at = key_path(key_path(where, "tls"), "verify")
        reader.warnings.append(f"{at}: false: anybody on the way can pose as this backend")
    loader = backend.loader
    if reader.files is None and loader is not None and (loader.options or loader.plugin not in FAR_LOADERS):
        # Who may write to a discovery must not start programs here.
        names = ", ".join(FAR_LOADERS)
        reader.fault(key_path(where, "loader"), f"must be one of {names} here, and have no options")
    if backend.api_key is not None and not https and not is_local_url(backend.url):
        at = key_path(where, "api_key_file")
        reader.warnings.append(f"{at}: the key travels in clear text; use https")


def check_store(reader: Reader, store: StoreConfig, where: str) -> None:
    """What no single key of a store can tell."""
    if not store:
        if store != StoreConfig():
            reader.fault(key_path(where, "url"), "missing: the other keys have nothing to belong to")
        return
    address = parse_address(store.url, hostless=True) if store.url else Address()
    if bool(store.sentinels) != bool(store.master):
        missing = "master" if store.sentinels else "sentinels"
        reader.fault(key_path(where, missing), "missing: Sentinel needs `sentinels` and `master`")
    if store.sentinels and address.path:
        reader.fault(key_path(where, "url"), "a Unix socket and Sentinel do not go together")
    if not store.sentinels and not address.path and not address.host:
        reader.fault(key_path(where, "url"), "names no host")
    if address.user and store.password is None:
        reader.fault(key_path(where, "password_file"), f"missing: the URL names the user {address.user}")
    if store.ca_file is not None and not address.tls:
        reader.fault(key_path(where, "ca_file"), f"the URL is not rediss: {shown(store.url)}")
    away = address.host and not is_local_url(f"//{address.host}")
    if store.password is not None and not address.tls and not address.path and (away or store.sentinels):
        at = key_path(where, "password_file")
        reader.warnings.append(f"{at}: the password travels in clear text; use rediss")


def check_whole(reader: Reader, config: Config, names: Mapping[str, str]) -> Config:
    """What no single key can tell; aliases come out resolved and listeners with their backlog.

    :param names: what a top-level key is called in faults, where it is not its own name.
    """

    def called(key: str) -> str:
        return names.get(key, key)

    def unique(key: str, attribute: str, word: str) -> None:
        first: dict[Any, int] = {}
        for index, item in enumerate(getattr(config, key)):
            half = reader.halves.get(f"{called(key)}[{index}]", {})
            value = getattr(item, attribute, half.get(attribute, BAD))
            if value is not BAD and first.setdefault(value, index) != index:
                where = f"{called(key)}[{index}].{attribute}"
                reader.fault(where, f"{word} {shown(value)} is already that of {called(key)}[{first[value]}]")

    def ordered(table: str, low: str, high: str) -> None:
        part = getattr(config, table)
        if getattr(part, low) > getattr(part, high):
            reader.fault(f"{table}.{low}", f"must not be above {high} ({getattr(part, high):g})")

    for index, backend in enumerate(config.backends):
        if backend is not BAD:
            check_backend(reader, backend, f"{called('backends')}[{index}]")
        if (
            backend is not BAD
            and config.workers > 1
            and backend.loader
            and backend.loader.plugin == "command"
        ):
            where = f"{called('backends')}[{index}].loader"
            reader.fault(where, "command: each worker would start a server of its own; use workers = 1")
    unique("backends", "id", "id")
    unique("backends", "url", "URL")
    unique("models", "name", "name")
    unique("rate_limits", "name", "name")
    for index, policy in enumerate(config.rate_limits):
        if policy is not BAD and not (
            policy.requests_per_minute or policy.tokens_per_minute or policy.concurrent
        ):
            reader.fault(
                f"rate_limits[{index}]",
                "limits nothing: set requests_per_minute, tokens_per_minute or concurrent",
            )
    ordered("hold", "min_s", "max_s")
    ordered("retry", "backoff_min_s", "backoff_max_s")
    ordered("breaker", "open_s", "open_cap_s")
    ordered("limits", "body_bytes", "body_total_bytes")
    ordered("limits", "header_line", "headers")
    ordered("overload", "shed_lag_s", "refuse_lag_s")
    ordered("overload", "refuse_lag_s", "close_lag_s")
    ordered("overload", "shed_memory", "refuse_memory")
    ordered("overload", "refuse_memory", "close_memory")
    ordered("overload", "close_memory", "cut_memory")
    check_store(reader, config.store, "store")
    _check_addresses(reader, config, called)
    _check_reach(reader, config, called)
    _warn(reader, config)
    return replace(
        config,
        listen=tuple(
            description if description is BAD else with_backlog(description, config.limits.backlog)
            for description in config.listen
        ),
        models=_resolved_models(reader, config, called),
        router=_with_paths(config.base_dir, config.router),
        health=tuple(_with_paths(config.base_dir, table) for table in config.health),
        rate_limiter=_with_paths(config.base_dir, config.rate_limiter),
        discovery=tuple(_with_paths(config.base_dir, table) for table in config.discovery),
    )


def _with_paths(base_dir: str, table: Any) -> Any:
    """A plugin does not know where the file lies: its options ``file`` and ``…_file`` come to it absolute.

    :param base_dir: the file's folder; by now the reader's is that of the command line.
    """
    if table is BAD:
        return table
    found = {
        name: os.path.join(base_dir, value)
        for name, value in table.options.items()
        if (name == "file" or name.endswith("_file")) and isinstance(value, str) and value
    }
    return replace(table, options={**table.options, **found}) if found else table


def _check_addresses(reader: Reader, config: Config, called: Callable[[str], str]) -> None:
    """No two listeners may take one address; all interfaces have each of them."""
    taken: list[tuple[tuple[str, str, str], str]] = []
    for key in ("listen", "admin"):
        for index, description in enumerate(getattr(config, key)):
            address = None if description is BAD else address_of(description)
            if address is None:
                continue
            where = f"{called(key)}[{index}]"
            for other, first in taken:
                kind, interface, port = address
                if (kind, port) == (other[0], other[2]) and (
                    interface == other[1] or (kind != "unix" and "" in (interface, other[1]))
                ):
                    reader.fault(where, f"takes the address that {first} takes")
                    break
            taken.append((address, where))


def _check_reach(reader: Reader, config: Config, called: Callable[[str], str]) -> None:
    refused = {fault.where.lstrip("-").partition("[")[0] for fault in reader.faults}
    if not config.listen and "listen" not in refused:
        reader.fault(called("listen"), "must name at least one endpoint")
    if not config.auth and "auth" not in refused:
        for index, description in enumerate(config.listen):
            if description is not BAD and not is_loopback_endpoint(description):
                reader.fault(
                    f"{called('listen')}[{index}]",
                    'reachable from outside without auth; set auth (or auth = ["anonymous"]),'
                    " or interface=127.0.0.1",
                )
    if config.admin_token is None and "admin_token_file" not in refused:
        for index, description in enumerate(config.admin):
            if description is not BAD and not is_loopback_endpoint(description):
                reader.fault(
                    f"{called('admin')}[{index}]",
                    "reachable from outside without a token; set admin_token_file, or interface=127.0.0.1",
                )


def _warn(reader: Reader, config: Config) -> None:
    warn = reader.warnings.append
    if not config.backends and not config.discovery:
        warn("no [[backends]] and no [[discovery]]: every model is unknown")
    if "anonymous" in config.auth:
        warn("auth: anonymous: whoever reaches a listener may use it")
    if config.workers > 1 and config.rate_limits and config.rate_limiter.plugin == "local":
        warn(f"rate_limiter.plugin: local: each of the {config.workers} workers counts by itself")
    if config.timeouts.upstream_idle_s >= 5:
        warn("timeouts.upstream_idle_s: llama-server closes idle connections at 5 s: requests will meet it")


def _resolved_models(reader: Reader, config: Config, called: Callable[[str], str]) -> Any:
    """Aliases with their final target, and the smallest of the limits met on the way to it."""
    by_name = {model.name: model for model in config.models if model is not BAD}
    served = {
        name: index
        for index, backend in enumerate(config.backends)
        if backend is not BAD
        for name in backend.models or ()
    }
    resolved = []
    loops: set[frozenset[str]] = set()
    for index, model in enumerate(config.models):
        if model is BAD:
            continue
        chain = [model]
        trail = [model.name]
        while (target := chain[-1].target or chain[-1].name) != chain[-1].name:
            trail.append(target)
            if target not in by_name or target in trail[:-1]:
                break
            chain.append(by_name[target])
        if target in trail[:-1] and len(trail) > 1:
            loop = frozenset(trail[trail.index(target) :])
            if loop not in loops:
                loops.add(loop)
                reader.fault(f"models[{index}].target", f"aliases run in a circle: {' -> '.join(trail)}")
        elif target != model.name and model.name in served:
            reader.fault(
                f"models[{index}].name",
                f"{shown(model.name)} is a model of {called('backends')}[{served[model.name]}];"
                " an alias would hide it",
            )
        resolved.append(
            replace(
                model,
                target=target,
                loaded_only=any(each.loaded_only for each in chain),
                **asdict(Caps.tightest(each.caps for each in chain) or Caps()),
            )
        )
    return tuple(resolved)
