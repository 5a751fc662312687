"""From TOML text, a file or a command line to a :class:`Config`, or to every fault at once.

Parsing is pure but for the files that keys name (backend keys, certificates,
the admin token): these are asked of a :class:`~llmgw.config.files.FileSeam`.
Relative paths count from the folder of the config file, and are absolute in a
:class:`Config`, so that a daemon may change its directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from llmgw.config.files import DISK, FileSeam
from llmgw.config.fleet_tables import BackendConfig
from llmgw.config.places import base_url
from llmgw.config.reader import Reader, keys_of, toml_table
from llmgw.config.schema import Config, StoreConfig
from llmgw.config.whole import check_backend, check_store, check_whole
from llmgw.config.words import cause, shown
from llmgw.errors import ConfigError, ConfigFault


class Misread(ConfigError):
    """Some keys are wrong.

    :ivar rest: the configuration without them, in which more may be found wrong. An entry of
        an array may be ``BAD``.
    """

    def __init__(self, faults: Sequence[ConfigFault], rest: Config) -> None:
        super().__init__(faults, rest.source)
        self.rest = rest


def load_config(path: str, *, files: FileSeam = DISK) -> Config:
    """The configuration in the file at ``path``.

    :raise ConfigError: every fault of it, or that it cannot be read.
    """
    return config_from_options(path, files=files)


def parse_config(text: str, *, source: str, base_dir: str, files: FileSeam = DISK) -> Config:
    """The configuration that ``text`` spells.

    :param source: stands before each fault.
    :param base_dir: absolute; relative paths count from here.
    :raise ConfigError: every fault of it.
    """
    return _checked(toml_table(text, source), {}, source, base_dir, base_dir, files)


def config_from_options(
    path: str | None = None,
    *,
    listen: Sequence[str] = (),
    admin: Sequence[str] = (),
    backends: Sequence[str] = (),
    auth: Sequence[str] = (),
    workers: int | None = None,
    working_dir: str | None = None,
    files: FileSeam = DISK,
) -> Config:
    """The configuration of a command line, alone or over the file at ``path``.

    An option that is given takes the place of the whole key of the file, so
    ``--backend`` hides the file's ``[[backends]]``.

    :param backends: see :func:`parse_backend_option`.
    :param working_dir: relative paths in options, and ``path``, count from here;
        a daemon that reloads passes the directory it was started in.
    :raise ConfigError: every fault; those of options begin with ``--``.
    """
    working_dir = os.path.abspath(working_dir or os.getcwd())
    given = {"listen": list(listen), "admin": list(admin), "auth": list(auth), "backends": list(backends)}
    options: dict[str, Any] = {key: value for key, value in given.items() if value}
    if workers is not None:
        options["workers"] = workers
    if path is None:
        return _checked({}, options, "", working_dir, working_dir, files)
    source = os.path.join(working_dir, path)
    try:
        text = files.read(source).decode()
    except UnicodeDecodeError as error:
        raise ConfigError([ConfigFault("", f"not UTF-8 (at byte {error.start})")], source) from None
    except (OSError, ValueError) as error:
        raise ConfigError([ConfigFault("", f"cannot read the file: {cause(error)}")], source) from None
    return _checked(toml_table(text, source), options, source, os.path.dirname(source), working_dir, files)


def parse_backend_option(text: str) -> BackendConfig:
    """``URL[,weight=..][,model=..]``, ``model`` as often as wanted, as the ``--backend`` option has it.

    :raise ConfigError: every fault of it.
    """
    try:
        table = _backend_table(text)
    except ValueError as error:
        raise ConfigError([ConfigFault("", str(error))]) from None
    return parse_backend(table, base_dir=os.getcwd(), files=DISK)


def parse_backend(
    table: Mapping[str, Any],
    *,
    where: str = "",
    base_dir: str = "",
    files: FileSeam | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> BackendConfig:
    """One ``[[backends]]`` table that did not come from the file, such as a discovery's.

    :param files: without it, keys that name files are refused: whoever may write
        to a discovery must not make the gateway read files and send them away.
    :param defaults: attributes for what the table leaves out, already checked; labels
        of both are put together, and ``tls`` is only for an ``https`` URL.
    :raise ConfigError: every fault of it, below ``where``.
    """
    reader = Reader(base_dir, files)
    values = reader.fields(BackendConfig, dict(table), where)
    if reader.faults:
        raise ConfigError(reader.faults)
    shared = dict(defaults or {})
    if not values["url"].startswith("https:"):
        shared.pop("tls", None)
    labels = {**shared.get("labels", {}), **values.get("labels", {})}
    backend = BackendConfig(**{**shared, **values, "labels": labels})
    check_backend(reader, backend, where)
    if reader.faults:
        raise ConfigError(reader.faults)
    return backend


def parse_store(table: Mapping[str, Any], *, files: FileSeam = DISK) -> StoreConfig:
    """The keys of ``[store]``, where they stand in a plugin's own table.

    :raise ConfigError: every fault of it.
    """
    reader = Reader(os.getcwd(), files)
    store = reader.struct(StoreConfig, dict(table), "")
    if not reader.faults:
        check_store(reader, store, "")
    if reader.faults:
        raise ConfigError(reader.faults)
    assert isinstance(store, StoreConfig)
    return store


def _checked(
    table: Mapping[str, Any],
    options: Mapping[str, Any],
    source: str,
    base_dir: str,
    working_dir: str,
    files: FileSeam,
) -> Config:
    """Both tables read, one over the other, and the whole checked."""
    reader = Reader(base_dir, files)
    limits = table.get("rate_limits")
    if isinstance(limits, list):
        named = [
            {"name": f"limit-{index}", **limit} if isinstance(limit, dict) else limit
            for index, limit in enumerate(limits, 1)
        ]
        table = {**table, "rate_limits": named}
    values = reader.fields(Config, {k: v for k, v in table.items() if k not in options}, "", Config())
    if not values.get("health", True):
        del values["health"]

    reader.base_dir = working_dir
    called = {key: "--backend" if key == "backends" else f"--{key}" for key in options}
    for key, raw in options.items():
        if key == "backends":
            values[key] = tuple(
                _backend_of_option(reader, text, f"{called[key]}[{i}]") for i, text in enumerate(raw)
            )
        else:
            value = reader.value(keys_of(Config)[key].hint, raw, called[key])
            if value is not None:
                values[key] = value

    config = check_whole(reader, Config(**values, source=source, base_dir=base_dir), called)
    if reader.faults:
        raise Misread(reader.faults, config)
    return replace(config, warnings=tuple(reader.warnings))


def _backend_of_option(reader: Reader, text: str, where: str) -> Any:
    try:
        return reader.struct(BackendConfig, _backend_table(text), where)
    except ValueError as error:
        reader.fault(where, str(error))
        return None


def _backend_table(text: str) -> dict[str, Any]:
    """``URL[,weight=..][,model=..]`` as a ``[[backends]]`` table, its values still unchecked.

    Any other scalar key of such a table may stand there too; without ``id`` the
    host, port and path make one.

    :raise ValueError: an item is not ``key=value``.
    """
    url, *items = text.split(",")
    table: dict[str, Any] = {"url": url.strip()}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"expected key=value after the URL, got {shown(item)}")
        if name == "model":
            table.setdefault("models", []).append(value)
        elif name in ("weight", "max_connections", "context_length"):
            table[name] = _number(value)
        else:
            table[name] = value
    if "id" not in table:
        try:
            plain = base_url(None, "", table["url"]).partition("://")[2]
        except ValueError:
            plain = "unnamed"
        table["id"] = re.sub(r"[^A-Za-z0-9._:-]", "-", plain.translate({ord("["): "", ord("]"): ""}))[:128]
    return table


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
