"""The key file: who may call, what they may use, and the hash of each key.

The upper half is pure: text in, values or every fault out. The lower half reads
and replaces the file. A fault never quotes a value that might be a secret
somebody put into the wrong place.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llmgw.errors import ConfigError, ConfigFault
from llmgw.finite import is_finite_number
from llmgw.private_files import locked, read_private, replace_private
from llmgw.values import Caller, Caps, Policy

LEAST_PEPPER_BYTES = 16

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_HASH = re.compile(r"(hmac-)?sha256:[0-9a-f]{64}")
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_FLAGS = ("show_backend", "show_decision", "interim", "loaded_only")
_RATES = ("requests_per_minute", "tokens_per_minute")
_TIMES = ("expires", "created", "revoked")
CRITICALITIES = ("sheddable", "standard", "critical")
_COUNTS = {
    "concurrent": 1,
    "max_prompt_tokens": 1,
    "max_tokens": 1,
    "max_n": 1,
    "max_stop": 0,
    "max_tools": 0,
    "max_logprobs": 0,
    "max_response_bytes": 1,
}
"""Whole numbers, and the least that each may be."""


class Key(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """One table ``[keys.<id>]``.

    :param hash: ``sha256:…`` or, under a pepper, ``hmac-sha256:…``, in hex.
    :param models: names it may use; ``None`` = all.
    :param max_prompt_tokens: and those after it: see :class:`~llmgw.values.Caps`.
    :param criticality: one of :data:`CRITICALITIES`; ``None`` is ``standard``.
    """

    id: str
    name: str
    hash: str
    models: tuple[str, ...] | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_n: int | None = None
    max_stop: int | None = None
    max_tools: int | None = None
    max_logprobs: int | None = None
    grammar: bool | None = None
    max_response_bytes: int | None = None
    expires: datetime | None = None
    show_backend: bool = False
    show_decision: bool = False
    interim: bool = False
    loaded_only: bool = False
    criticality: str | None = None
    created: datetime | None = None
    revoked: datetime | None = None

    def __repr__(self) -> str:
        # Without the hash: that of an imported secret could be guessed at.
        return f"<Key {self.id}>"

    def state(self, now_unix_s: float) -> str:
        """``"live"``, ``"expired"`` or ``"revoked"``."""
        if self.revoked is not None:
            return "revoked"
        if self.expires is not None and self.expires.timestamp() <= now_unix_s:
            return "expired"
        return "live"

    def caller(self) -> Caller:
        """What the key's owner may do. Its own limits are a policy ``keys.<id>``."""
        policies: tuple[Policy, ...] = ()
        if (self.requests_per_minute, self.tokens_per_minute, self.concurrent) != (None, None, None):
            policies = (
                Policy(
                    name=f"keys.{self.id}",
                    requests_per_minute=self.requests_per_minute,
                    tokens_per_minute=self.tokens_per_minute,
                    concurrent=self.concurrent,
                ),
            )
        return Caller(
            id=self.id,
            models=None if self.models is None else frozenset(self.models),
            policies=policies,
            show_backend=self.show_backend,
            show_decision=self.show_decision,
            interim=self.interim,
            loaded_only=self.loaded_only,
            criticality=self.criticality or "standard",
            caps=Caps.tightest([Caps(**{name: getattr(self, name) for name in Caps.__struct_fields__})]),
        )


class KeyFile(Struct, frozen=True):
    """All that a key file says.

    :param pepper_file: path of the pepper, relative to the key file's folder.
    """

    keys: Mapping[str, Key]
    pepper_file: str | None = None


# --- text ---------------------------------------------------------------------


def parse(text: str, source: str = "") -> KeyFile:
    """Read the text of a key file.

    :param source: the file's name, for messages.
    :raise ConfigError: it holds every fault found, by key path.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Some messages quote table names, and whoever mixes up id and key has a secret there.
        what = re.sub(r"\('.*'\)|'.*'", "something", str(error))
        raise ConfigError([ConfigFault("", f"not valid TOML: {what}")], source) from None
    faults = [
        ConfigFault(_short(name), "unknown key") for name in table if name not in ("keys", "pepper_file")
    ]
    pepper_file = table.get("pepper_file")
    if pepper_file is not None and not (isinstance(pepper_file, str) and pepper_file):
        faults.append(ConfigFault("pepper_file", "must be a path"))
    keys = _parse_keys(table.get("keys", {}), pepper_file is not None, faults)
    if faults:
        raise ConfigError(faults, source)
    return KeyFile(keys, pepper_file)


def dump(file: KeyFile) -> str:
    """The whole as text that :func:`parse` reads back."""
    head = "" if file.pepper_file is None else f"pepper_file = {_quoted(file.pepper_file)}\n\n"
    return head + "\n".join(map(_table, file.keys.values()))


def add(text: str, key: Key, source: str = "") -> str:
    """``text`` and one more key; comments and order stay.

    :raise ConfigError: ``text`` is faulty, or has the id or the hash already.
    """
    file = parse(text, source)
    where = f"keys.{key.id}"
    if key.id in file.keys:
        raise ConfigError([ConfigFault(where, "exists already")], source)
    for other in file.keys.values():
        if other.hash == key.hash:
            raise ConfigError([ConfigFault(where, f"the same secret as keys.{other.id}")], source)
    body = text.rstrip()
    candidate = f"{body}\n\n{_table(key)}" if body else _table(key)
    return _faithful(candidate, KeyFile({**file.keys, key.id: key}, file.pepper_file))


def revoke(text: str, key_id: str, at: datetime, source: str = "") -> str:
    """``text`` with one key marked as revoked; comments and order stay.

    :raise ConfigError: ``text`` is faulty or has no such key.
    """
    file = parse(text, source)
    key = file.keys.get(key_id)
    if key is None:
        raise ConfigError([ConfigFault("", f"no key has the id {_short(key_id)}")], source)
    if key.revoked is not None:
        return text
    header = re.compile(rf"^[ \t]*\[[ \t]*keys[ \t]*\.[ \t]*{re.escape(key_id)}[ \t]*\][^\n]*", re.MULTILINE)
    candidate = header.sub(lambda found: f"{found[0].rstrip()}\nrevoked = {_written(at)}", text, count=1)
    return _faithful(candidate, KeyFile({**file.keys, key_id: replace(key, revoked=at)}, file.pepper_file))


def _faithful(candidate: str, wanted: KeyFile) -> str:
    """An edited text if it means what is wanted, else one written anew (comments are lost)."""
    try:
        if parse(candidate) == wanted:
            return candidate
    except ConfigError:
        pass
    return dump(wanted)


def _parse_keys(tables: Any, peppered: bool, faults: list[ConfigFault]) -> dict[str, Key]:
    if not isinstance(tables, dict):
        faults.append(ConfigFault("keys", "must hold tables, such as [keys.k7m2p9xa]"))
        return {}
    keys: dict[str, Key] = {}
    owners: dict[str, str] = {}
    for key_id, table in tables.items():
        where = f"keys.{_short(key_id)}"
        if not _ID.fullmatch(key_id):
            faults.append(ConfigFault(where, "an id is 1 to 40 letters, digits, `-` and `_`"))
        elif key_id == "anonymous":
            faults.append(ConfigFault(where, "is the id of callers without a key"))
        if not isinstance(table, dict):
            faults.append(ConfigFault(where, "must be a table"))
            continue
        fields = _parse_fields(where, table, faults)
        hash_ = fields.get("hash", "")
        if hash_.startswith("hmac-") and not peppered:
            faults.append(ConfigFault(f"{where}.hash", "needs a pepper_file at the top of the file"))
        if hash_ and owners.setdefault(hash_, where) != where:
            faults.append(ConfigFault(f"{where}.hash", f"the same secret as {owners[hash_]}"))
        keys[key_id] = Key(id=key_id, **{"name": "", "hash": "", **fields})
    return keys


def _parse_fields(where: str, table: Mapping[str, Any], faults: list[ConfigFault]) -> dict[str, Any]:
    fields: dict[str, Any] = {}

    def keep(name: str, value: Any, good: bool, rule: str) -> None:
        if good:
            fields[name] = value
        else:
            faults.append(ConfigFault(f"{where}.{name}", rule))

    for name in ("name", "hash"):
        if name not in table:
            faults.append(ConfigFault(f"{where}.{name}", "missing"))
    for name, value in table.items():
        # A TOML boolean is a Python int.
        number = is_finite_number(value)
        if name == "name":
            good = isinstance(value, str) and 0 < len(value) <= 128 and value.isprintable()
            keep(name, value, good, "must be 1 to 128 printable characters")
        elif name == "hash":
            good = isinstance(value, str) and _HASH.fullmatch(value) is not None
            keep(
                name,
                value,
                good,
                "must be `sha256:` or `hmac-sha256:` and 64 hex digits, never the key itself",
            )
        elif name == "models":
            good = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
            rule = "must be a list of model names; leave it out to allow all"
            keep(name, tuple(value) if good else None, good and bool(value), rule)
        elif name in _RATES:
            keep(name, value, number and value > 0, "must be a number above 0; leave it out for no limit")
        elif name in _COUNTS:
            least = _COUNTS[name]
            good = number and isinstance(value, int) and value >= least
            keep(name, value, good, f"must be a whole number of {least} or more; leave it out for no limit")
        elif name == "criticality":
            keep(name, value, value in CRITICALITIES, f"must be one of {', '.join(CRITICALITIES)}")
        elif name in _TIMES:
            moment = _moment(value)
            rule = "must be a time with its offset, such as 2027-01-31T12:00:00Z (RFC 3339)"
            keep(name, moment, moment is not None, rule)
        elif name in _FLAGS or name == "grammar":
            keep(name, value, isinstance(value, bool), "must be true or false")
        else:
            faults.append(ConfigFault(f"{where}.{_short(name)}", "unknown key"))
    return fields


def _moment(value: Any) -> datetime | None:
    if isinstance(value, str) and _RFC_3339.fullmatch(value):
        try:
            value = datetime.fromisoformat(value.upper())
        except ValueError:
            return None
    return value if isinstance(value, datetime) and value.tzinfo is not None else None


def _short(name: str) -> str:
    # Long enough for every true name, too short for a key in its place.
    return name if len(name) <= 40 and name.isprintable() else f"{name[:12]!a}…"


def _table(key: Key) -> str:
    lines = [f"[keys.{key.id}]"]
    for name in key.__struct_fields__[1:]:
        value = getattr(key, name)
        if value is not None and (value is not False or name == "grammar"):
            lines.append(f"{name} = {_written(value)}")
    return "\n".join(lines) + "\n"


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_quoted, value))}]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    # JSON's escapes are all TOML's too; DEL alone is allowed bare by one and not by the other.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- files --------------------------------------------------------------------


def load(path: str) -> tuple[KeyFile, bytes | None]:
    """Read a key file and its pepper.

    :return: the file, and the pepper if it names one.
    :raise ConfigError: either is unreadable, unsafe or faulty.
    """
    file = parse(_text(path), path)
    if file.pepper_file is None:
        return file, None
    pepper_path = str(Path(path).parent / file.pepper_file)
    pepper = read_private(pepper_path).strip()
    if len(pepper) < LEAST_PEPPER_BYTES:
        raise ConfigError([ConfigFault("", f"a pepper has at least {LEAST_PEPPER_BYTES} bytes")], pepper_path)
    return file, pepper


def edit(path: str, change: Callable[[str], str], *, create: bool = False) -> None:
    """Replace a key file by what ``change`` makes of its text, wholly or not at all.

    Readers see the old file or the new one. Writers wait for one another. The
    owner and the mode stay; a new file has mode 0600.

    :param create: start from nothing if there is no such file.
    :raise ConfigError: the file before or after the change is faulty; it stays as it was.
    :raise OSError: it cannot be written.
    """
    # A link (as Kubernetes makes them) is followed, not replaced.
    target = os.path.realpath(path)
    if not create:
        # Before there is a lock file beside a name that was only mistyped.
        read_private(target)
    with locked(f"{target}.lock"):
        missing = create and not os.path.exists(target)
        text = change("" if missing else _text(target))
        parse(text, path)
        replace_private(target, text, None if missing else os.stat(target))


def _text(path: str) -> str:
    try:
        return read_private(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError([ConfigFault("", f"not UTF-8 at byte {error.start}")], path) from None
