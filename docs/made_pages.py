"""Pages that are made from the code when the documentation is built, and never by hand.

``docs/reference/``: every key of the configuration from its structs (the prose is that of
``etc/llmgw.example.toml``, which the tests hold to the same keys), every interface of the
plugin contract, every command.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from msgspec import NODEFAULT, Struct
from zope.interface import Interface
from zope.interface.interface import InterfaceClass, Method

from llmgw import interfaces
from llmgw.commands.main import main as command
from llmgw.config import Config
from llmgw.config.reader import Rule, keys_of
from llmgw.values import Secret

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "docs" / "reference"
_WORDS = {str: "string", int: "integer", float: "number", bool: "true or false", Secret: "path of a file"}


def make() -> None:
    """Write all of them; a page that has not changed is left alone."""
    PLACE.mkdir(exist_ok=True)
    for name, text in (("config", config()), ("interfaces", contract()), ("commands", commands())):
        page = PLACE / f"{name}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


# --- configuration ------------------------------------------------------------


def config() -> str:
    """Every key: its type, its bounds, its default, what it is for."""
    prose = _prose((ROOT / "etc" / "llmgw.example.toml").read_text(encoding="utf-8"))
    parts = [
        "# Configuration, key by key",
        "Made from the structs that the gateway reads its file with. The same keys, as a file to start from: "
        "[`etc/llmgw.example.toml`](../../etc/llmgw.example.toml). Keys in `_s` are seconds, keys in "
        "`_bytes` are bytes. Unknown keys, wrong types and values out of range are errors, all told at once, "
        "each with its path.",
        "## At the top",
        *_rows(Config, "", prose),
    ]
    for path, struct, many in _tables(Config, ""):
        parts.append(f"## `{f'[[{path}]]' if many else f'[{path}]'}`")
        if about := prose.get((path, "")):
            parts.append(about)
        parts += _rows(struct, path, prose)
    return "\n\n".join(parts) + "\n"


def _tables(struct: type[Struct], path: str) -> Iterator[tuple[str, type[Struct], bool]]:
    for name, key in keys_of(struct).items():
        inner, many = _struct_of(key.hint)
        if inner is not None:
            at = f"{path}.{name}" if path else name
            yield at, inner, many
            yield from _tables(inner, at)


def _struct_of(hint: Any) -> tuple[type[Struct] | None, bool]:
    """The struct of a table, or of each table of an array."""
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if isinstance(hint, type) and issubclass(hint, Struct) and hint is not Secret:
        return hint, False
    if get_origin(hint) is tuple:
        return _struct_of(get_args(hint)[0])[0], True
    return None, False


def _rows(struct: type[Struct], path: str, prose: dict[tuple[str, str], str]) -> Iterator[str]:
    lines = ["| key | takes | default | |", "| --- | --- | --- | --- |"]
    for name, key in keys_of(struct).items():
        if _struct_of(key.hint)[0] is None:
            about = prose.get((path, name), "").replace("|", "\\|")
            default = "*required*" if key.required and "Default" not in about else _shown(key.default)
            lines.append(f"| `{name}` | {_kind(key.hint)} | {default} | {about} |")
    if hasattr(struct, "rest"):
        lines.append("| … | | | the plugin's own options |")
    if len(lines) > 2:
        yield "\n".join(lines)


def _kind(hint: Any) -> str:
    rule = Rule()
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        rule = next((extra for extra in extras if isinstance(extra, Rule)), rule)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        hint = next(each for each in arguments if each is not type(None))
        return _kind(Annotated[hint, rule]) if rule != Rule() else _kind(hint)
    if origin is Literal:
        return " or ".join(f"`{each!r}`".replace("'", '"') for each in arguments)
    if origin is tuple:
        return f"array of {_kind(arguments[0])}"
    words = _WORDS.get(hint, "table")
    bounds = []
    if rule.above is not None:
        bounds.append(f"above {rule.above:g}")
    if rule.least is not None:
        bounds.append(f"at least {rule.least:,.10g}")
    if rule.most is not None:
        bounds.append(f"at most {rule.most:,.10g}")
    if rule.meaning:
        bounds.append(rule.meaning)
    if rule.off:
        bounds.append("or `false`")
    return ", ".join([words, *bounds]).replace("|", "\\|")


def _shown(value: Any) -> str:
    if value is None or value is NODEFAULT or value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{each}"' for each in value) + "]`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{value}`" if isinstance(value, int | float) else "none"


def _prose(text: str) -> dict[tuple[str, str], str]:
    """What the example says above each key, and above each table, by (table, key)."""
    found: dict[tuple[str, str], str] = {}
    path, block, last = "", [], ""
    for line in text.splitlines():
        if table := re.match(r"#?\[\[?([a-z_.]+)\]\]?$", line):
            path, last = table[1], ""
            found.setdefault((path, ""), " ".join(block))
            block = []
        elif key := re.match(r"#?([a-z_]+) = ", line):
            # Keys without words of their own share those of the one before.
            last = " ".join(block) or last
            found[path, key[1]] = last
            block = []
        elif line.startswith("# ") and not line.startswith("# ---"):
            block.append(line[2:].strip())
        else:
            block = []
    return found


# --- the plugin contract ------------------------------------------------------


def contract() -> str:
    """Every interface, in the order of the module."""
    parts = [
        "# Interfaces",
        "The plugin contract, made from [`llmgw/interfaces.py`](../../llmgw/interfaces.py).",
        _rst(inspect.getdoc(interfaces) or ""),
    ]
    for name, interface in vars(interfaces).items():
        if isinstance(interface, InterfaceClass) and interface.__module__ == interfaces.__name__:
            bases = [base.__name__ for base in interface.__bases__ if base is not Interface]
            parts.append(f"## {name}" + (f" ({', '.join(bases)})" if bases else ""))
            parts.append(_rst(_interface(name, interface)))
    return "\n\n".join(parts) + "\n"


def _interface(name: str, interface: InterfaceClass) -> str:
    lines = [f".. py:class:: {name}", "   :no-index:", ""]
    lines += _indented(inspect.cleandoc(interface.__doc__ or ""), 3)
    for member, description in interface.namesAndDescriptions():
        if isinstance(description, Method):
            lines += ["", f"   .. py:method:: {member}{description.getSignatureString()}", "      :no-index:"]
        else:
            lines += ["", f"   .. py:attribute:: {member}", "      :no-index:"]
        lines += ["", *_indented(inspect.cleandoc(description.getDoc() or ""), 6)]
    return "\n".join(lines)


def _indented(text: str, by: int) -> list[str]:
    return [" " * by + line if line else "" for line in text.splitlines()]


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```"


# --- commands -----------------------------------------------------------------


def commands() -> str:
    """The help of every command, as the terminal shows it."""
    parts = ["# Commands", "What `llmgw … --help` says."]
    for names, each in _commands(command, ()):
        title = " ".join(("llmgw", *names))
        context = click.Context(each, info_name=title, terminal_width=96, max_content_width=96)
        parts.append(f"## {title}\n\n```text\n{each.get_help(context)}\n```")
    return "\n\n".join(parts) + "\n"


def _commands(each: click.Command, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield names, each
    if isinstance(each, click.Group):
        context = click.Context(each)
        for name in each.list_commands(context):
            inner = each.get_command(context, name)
            if inner is not None:
                yield from _commands(inner, (*names, name))
