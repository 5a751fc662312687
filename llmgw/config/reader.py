"""Reads any table against any struct: the fields are the keys, the annotations the rules.

Nothing here stops at the first fault: a :class:`Reader` gathers them, each with
its key path, in the order of the file. A key that failed keeps its default while
the rest is checked; such a result never leaves :mod:`llmgw.config`, which raises
once anything is at fault.

Secrets are never quoted in a fault, nor is anything that may hold one (URLs
with user information, contents of files).
"""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import fields, replace

from llmgw.config.files import FileSeam
from llmgw.config.words import bounds, did_you_mean, key_path, shown, type_of
from llmgw.errors import ConfigError, ConfigFault
from llmgw.values import Policy, Secret

BAD: Any = None
"""Stands for a value that was refused; no TOML value is ``None``."""


class Rule(Struct, frozen=True):
    """What a value must be beyond its type; stands in ``Annotated``.

    A float needs a ``most``: it keeps ``inf`` and integers of any size out.

    :param above: exclusive lower bound; ``least`` and ``most`` are inclusive.
    :param shape: a string must match it in full; ``meaning`` says it in words.
    :param filled: an empty string or array is refused.
    :param off: ``false`` is allowed and means 0.
    :param convert: called with the reader, the key path and the value, gives the
        final value; raises ``ValueError`` with what is wrong, or calls ``reader.fault``.
    """

    above: float | None = None
    least: float | None = None
    most: float | None = None
    shape: str = ""
    meaning: str = ""
    filled: bool = False
    off: bool = False
    convert: Callable[[Reader, str, Any], Any] | None = None


def toml_table(text: str, source: str) -> dict[str, Any]:
    """:raise ConfigError: not TOML (with line and column), or nothing in it."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError([ConfigFault("", f"not TOML: {cause}")], source) from None
    if not table:
        raise ConfigError([ConfigFault("", "the file is empty: it configures nothing")], source)
    return table


class _Key(Struct, frozen=True):
    attribute: str
    hint: Any
    default: Any
    required: bool


def _policy_name(reader: Reader, where: str, name: str) -> str:
    # Key.caller names a key's own limits so; two policies of one name share a count.
    if name.startswith("keys."):
        raise ValueError(f"names that begin with keys. are kept for the limits of keys; got {shown(name)}")
    return name


# Policy is a value that other rooms make as well, so its bounds stand here.
_POLICY_HINTS: dict[str, Any] = {
    "name": Annotated[
        str, Rule(shape=r"[A-Za-z0-9._-]{1,64}", meaning="letters, digits, . _ -", convert=_policy_name)
    ],
    "scope": Literal["key", "global"],
    "requests_per_minute": Annotated[float, Rule(above=0, most=1e9)],
    "tokens_per_minute": Annotated[float, Rule(above=0, most=1e12)],
    "concurrent": Annotated[int, Rule(least=1, most=10**6)],
    "burst_s": Annotated[float, Rule(above=0, most=86400)],
    "on_redis_loss": Literal["local", "open", "closed"] | None,
}


@cache
def keys_of(cls: type[Struct]) -> Mapping[str, _Key]:
    """The keys of ``cls``'s table, by the name they have in the file."""
    hints = get_type_hints(cls, include_extras=True) | (_POLICY_HINTS if cls is Policy else {})
    skipped = getattr(cls, "not_keys", ())
    return {
        each.encode_name: _Key(each.name, hints[each.name], each.default, each.required)
        for each in fields(cls)
        if each.name not in skipped
    }


class Reader:
    """Turns tables into structs and remembers what was wrong.

    :param base_dir: absolute; relative paths count from here.
    :param files: ``None`` refuses every key that names a file.
    :ivar halves: by key path, what was good of a table that could not be read as a whole.
    """

    def __init__(self, base_dir: str, files: FileSeam | None) -> None:
        self.base_dir = base_dir
        self.files = files
        self.faults: list[ConfigFault] = []
        self.halves: dict[str, dict[str, Any]] = {}
        self.warnings: list[str] = []

    def fault(self, where: str, what: str) -> None:
        self.faults.append(ConfigFault(where, what))

    def fields(
        self, cls: type[Struct], table: Mapping[str, Any], where: str, base: Any = None
    ) -> dict[str, Any]:
        """Attributes of ``cls`` that ``table`` sets well; ``base`` has the defaults of inner tables."""
        keys = keys_of(cls)
        rest = getattr(cls, "rest", None)
        values: dict[str, Any] = {}
        unread: dict[str, Any] = {}
        for name, raw in table.items():
            at = key_path(where, name)
            if name in keys:
                key = keys[name]
                value = self.value(key.hint, raw, at, getattr(base, key.attribute, key.default))
                if value is not BAD:
                    values[key.attribute] = value
            elif rest:
                unread[name] = raw
            else:
                self.fault(at, f"unknown key{did_you_mean(name, keys)}")
        for name, key in keys.items():
            if key.required and base is None and name not in table:
                self.fault(key_path(where, name), "missing")
        if rest and (unread or base is None):
            values[rest] = unread
        return values

    def struct(self, cls: type[Struct], raw: Any, where: str, base: Any = None) -> Any:
        """``raw`` as a ``cls``, or ``BAD``."""
        short = getattr(cls, "short", None)
        if short and isinstance(raw, str):
            raw = {short: raw}
        if not isinstance(raw, dict):
            return self._wrong_type("a table", raw, where)
        values = self.fields(cls, raw, where, base)
        if base is not None:
            return replace(base, **values)
        if any(key.required and key.attribute not in values for key in keys_of(cls).values()):
            self.halves[where] = values
            return BAD
        return cls(**values)

    def value(self, hint: Any, raw: Any, where: str, default: Any = None) -> Any:
        """``raw`` as ``hint`` asks, or ``BAD``."""
        base, rules = _unwrap(hint)
        if raw is False and any(rule.off for rule in rules):
            return 0.0
        value = self._typed(base, raw, where, default)
        for rule in rules:
            if value is BAD:
                break
            value = self._ruled(rule, value, where)
        return float(value) if base is float and value is not BAD else value

    def _typed(self, base: Any, raw: Any, where: str, default: Any) -> Any:
        kind = get_origin(base)
        if kind is tuple:
            if not isinstance(raw, list):
                return self._wrong_type("an array", raw, where)
            return tuple(self.value(get_args(base)[0], item, f"{where}[{i}]") for i, item in enumerate(raw))
        if kind is Literal:
            choices = [str(choice) for choice in get_args(base)]
            if raw in choices:
                return raw
            self.fault(where, f"must be one of {', '.join(choices)}; got {shown(raw)}")
            return BAD
        if kind is Mapping:
            if not isinstance(raw, dict):
                return self._wrong_type("a table", raw, where)
            return {name: self.value(str, item, key_path(where, name)) for name, item in raw.items()}
        if base is dict:
            return raw if isinstance(raw, dict) else self._wrong_type("a table", raw, where)
        if issubclass(base, Struct):
            return self.struct(base, raw, where, default if isinstance(default, base) else None)
        wanted, accepted = _SCALARS[base]
        if not isinstance(raw, accepted) or (isinstance(raw, bool) and base is not bool):
            return self._wrong_type(wanted, raw, where)
        return raw

    def _ruled(self, rule: Rule, value: Any, where: str) -> Any:
        low = (rule.above is not None and not value > rule.above) or (
            rule.least is not None and not value >= rule.least
        )
        if low or (rule.most is not None and not value <= rule.most):
            off = " (false = off)" if rule.off else ""
            words = bounds(rule.above, rule.least, rule.most)
            self.fault(where, f"must be {words}{off}, got {shown(value)}")
            return BAD
        if rule.filled and not value:
            self.fault(where, "must not be empty")
            return BAD
        if rule.shape and not re.fullmatch(rule.shape, value):
            self.fault(where, f"must be {rule.meaning}; got {shown(value)}")
            return BAD
        if rule.convert is None:
            return value
        try:
            return rule.convert(self, where, value)
        except ValueError as error:
            self.fault(where, str(error))
            return BAD

    def _wrong_type(self, wanted: str, raw: Any, where: str) -> Any:
        self.fault(where, f"expected {wanted}, got {type_of(raw)}")
        return BAD


_SCALARS: Mapping[Any, tuple[str, Any]] = {
    str: ("a string", str),
    Secret: ("a string", str),
    bool: ("true or false", bool),
    int: ("an integer", int),
    float: ("a number", (int, float)),
}


@cache
def _unwrap(hint: Any) -> tuple[Any, tuple[Rule, ...]]:
    """``hint`` without ``Annotated`` and ``| None``, and the rules found on the way."""
    rules: tuple[Rule, ...] = ()
    while True:
        kind = get_origin(hint)
        if kind is Annotated:
            hint, *extras = get_args(hint)
            rules = (*(extra for extra in extras if isinstance(extra, Rule)), *rules)
        elif kind in (Union, types.UnionType):
            hint = next(arm for arm in get_args(hint) if arm is not type(None))
        else:
            return hint, rules
