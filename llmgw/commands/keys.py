"""``llmgw keys``: make, list and revoke API keys.

Standard output carries what a script wants (the new key, the table, the JSON)
and nothing else; everything said to people goes to standard error.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmgw.access import credentials, key_file
from llmgw.errors import ConfigError

if TYPE_CHECKING:
    from typing import IO

Result = TypeVar("Result")

_SPANS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_STYLES = {"live": "green", "expired": "yellow", "revoked": "red"}
_LONGEST_SECRET_BYTES = 4096
RELOAD_NOTE = "The gateway heeds it after its next reload (SIGHUP or POST /api/reload)."


class Expiry(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A span from now (``30d``) or a moment with its offset (RFC 3339)."""

    name = "30d|RFC3339"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        now = datetime.now(UTC)
        span = re.fullmatch(r"(\d{1,6})([mhdw])", value)
        try:
            if span:
                moment = (now + timedelta(seconds=int(span[1]) * _SPANS[span[2]])).replace(microsecond=0)
            else:
                moment = datetime.fromisoformat(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither a span such as 30d nor a time such as 2027-01-31T12:00:00Z")
        if moment.tzinfo is None:
            self.fail(f"{value!r} has no offset; write 2027-01-31T12:00:00Z")
        if moment <= now:
            self.fail(f"{value!r} has passed")
        return moment


class Above0(click.FloatRange):
    """A limit per minute."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=1e12)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail("must be a number")
        # 600 looks better in the file than 600.0.
        return int(number) if number.is_integer() else number


file_option = click.option(
    "--file", "path", required=True, type=click.Path(dir_okay=False), help="The key file, such as keys.toml."
)


@click.group()
def keys() -> None:
    """Make, list and revoke API keys."""


@keys.command()
@file_option
@click.argument("name")
@click.option("--models", metavar="A,B", help="Models and aliases it may use.  [default: all]")
@click.option("--requests-per-minute", type=Above0(), metavar="N", help="A limit of its own.")
@click.option("--tokens-per-minute", type=Above0(), metavar="N", help="A limit of its own.")
@click.option("--concurrent", type=click.IntRange(min=1), metavar="N", help="Requests under way at once.")
@click.option(
    "--expires", type=Expiry(), metavar="30d|RFC3339", help="A span (m, h, d, w) or a time.  [default: never]"
)
@click.option(
    "--secret-file",
    type=click.File("rb"),
    help="Import the secret in this file (`-`: standard input) instead of making one.",
)
@click.option("--show-backend", is_flag=True, help="Answers carry x-llmgw-backend.")
@click.option("--show-decision", is_flag=True, help="Answers carry x-llmgw-decision.")
@click.option("--interim", is_flag=True, help="May be sent 102 Processing while it waits.")
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), metavar="N", help="Of one request.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Of output of one request.")
@click.option("--max-n", type=click.IntRange(min=1), metavar="N", help="Choices of one request.")
@click.option("--max-stop", type=click.IntRange(min=0), metavar="N", help="Stop sequences of one request.")
@click.option("--max-tools", type=click.IntRange(min=0), metavar="N", help="Tools of one request.")
@click.option("--max-logprobs", type=click.IntRange(min=0), metavar="N", help="0 allows none.")
@click.option("--max-response-bytes", type=click.IntRange(min=1), metavar="N", help="Of one answer.")
@click.option(
    "--no-grammar", "grammar", flag_value=False, default=None, help="No grammars and no JSON schemas."
)
@click.option(
    "--criticality",
    type=click.Choice(key_file.CRITICALITIES),
    help="Who is refused first, and who last, under overload.  [default: standard]",
)
@click.option("--loaded-only", is_flag=True, help="Never causes a model to be loaded.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; `key` is null for an imported one.")
def new(
    path: str,
    name: str,
    models: str | None,
    secret_file: IO[bytes] | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Make a key for NAME and print it, this one time.

    The key file keeps only a hash. If there is no file yet, one is made that you alone may read.
    """
    imported = None if secret_file is None else _imported(secret_file)
    if imported is None and sys.stdout is None:
        raise click.ClickException("standard output is closed: the key would be shown to nobody")
    chosen = None if models is None else tuple(filter(None, map(str.strip, models.split(","))))
    if chosen == ():
        raise click.BadParameter("names no model; leave it out to allow all", param_hint="--models")
    made = []

    def add(text: str) -> str:
        file = key_file.parse(text, path)
        key_id = credentials.new_id()
        while key_id in file.keys:
            key_id = credentials.new_id()
        secret = imported or credentials.Secret(credentials.new_key(key_id))
        pepper = None if file.pepper_file is None else _attempt(lambda: key_file.load(path))[1]
        kind = "sha256" if pepper is None else "hmac-sha256"
        key = key_file.Key(
            id=key_id,
            name=name,
            hash=f"{kind}:{credentials.digest(secret.reveal(), pepper).hex()}",
            models=chosen,
            created=_now(),
            **fields,
        )
        made.append((key_id, secret))
        return key_file.add(text, key, path)

    _attempt(lambda: key_file.edit(path, add, create=True))
    key_id, secret = made[0]
    shown = secret.reveal() if imported is None else None
    try:
        if as_json:
            click.echo(json.dumps({"id": key_id, "name": name, "file": path, "key": shown}))
        elif shown is not None:
            click.echo(f"Key {key_id} for {name}, written to {path}. It is shown only now:", err=True)
            click.echo(shown)
        else:
            click.echo(f"Key {key_id} for {name}: the secret was imported into {path}.", err=True)
    except OSError as error:
        if shown is None:
            raise
        cure = f"`llmgw keys revoke --file {path} {key_id}`"
        raise click.ClickException(
            f"nobody was shown the key ({error.strerror}): {cure}, and make another"
        ) from None
    click.echo(RELOAD_NOTE, err=True)


@keys.command(name="list")
@file_option
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def list_keys(path: str, as_json: bool) -> None:
    """Show the keys of a file, never a secret."""
    file, _ = _attempt(lambda: key_file.load(path))
    now_unix_s = time.time()
    if as_json:
        click.echo(json.dumps([_as_json(key, now_unix_s) for key in file.keys.values()], indent=2))
    else:
        _print_table(file.keys.values(), now_unix_s)


@keys.command()
@file_option
@click.argument("name_or_id")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def revoke(path: str, name_or_id: str, as_json: bool) -> None:
    """Make a key worthless; its table stays in the file, with the time."""
    revoked = []

    def mark(text: str) -> str:
        key = _find(key_file.parse(text, path), name_or_id)
        revoked.append(key)
        return key_file.revoke(text, key.id, _now(), path)

    _attempt(lambda: key_file.edit(path, mark))
    key = revoked[0]
    if as_json:
        click.echo(json.dumps({"id": key.id, "name": key.name, "was_revoked": key.revoked is not None}))
    elif key.revoked is not None:
        click.echo(f"Key {key.id} ({key.name}) was revoked on {key.revoked:%Y-%m-%d} already.", err=True)
    else:
        click.echo(f"Key {key.id} ({key.name}) is revoked. {RELOAD_NOTE}", err=True)


def _find(file: key_file.KeyFile, name_or_id: str) -> key_file.Key:
    if name_or_id in file.keys:
        return file.keys[name_or_id]
    named = [key for key in file.keys.values() if key.name == name_or_id]
    # During a change of keys two have the name, of which one is often gone already.
    live = [key for key in named if key.revoked is None] or named[:1]
    if len(live) > 1:
        ids = ", ".join(key.id for key in live)
        raise click.ClickException(f"several keys have that name; say which by its id: {ids}")
    if not live:
        # What was typed is not repeated: it may be a key.
        raise click.ClickException("no key has that name or id; `llmgw keys list` shows them")
    return live[0]


def _imported(file: IO[bytes]) -> credentials.Secret:
    raw = file.read(_LONGEST_SECRET_BYTES + 1)
    if len(raw) > _LONGEST_SECRET_BYTES:
        raise click.ClickException(f"the secret file is longer than {_LONGEST_SECRET_BYTES} bytes")
    # Latin-1 takes any byte, so that the check below finds what is not ASCII.
    text = raw.decode("latin-1").rstrip("\r\n")
    fault = credentials.import_fault(text)
    if fault is not None:
        raise click.ClickException(f"the secret file cannot be imported: {fault}")
    return credentials.Secret(text)


def _attempt(action: Callable[[], Result]) -> Result:
    try:
        return action()
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _as_json(key: key_file.Key, now_unix_s: float) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": key.id, "name": key.name, "state": key.state(now_unix_s)}
    for field in key.__struct_fields__:
        if field not in ("id", "name", "hash"):
            value = getattr(key, field)
            shown[field] = value.isoformat() if isinstance(value, datetime) else value
    return shown


def _print_table(shown: Any, now_unix_s: float) -> None:
    # Half of this command's time would go into this import when a script wants JSON.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("id", "name", "state", "models", "limits", "expires", "created")
    for key in shown:
        state = key.state(now_unix_s)
        limits = [
            f"{figure:,} {unit}"
            for figure, unit in (
                (key.requests_per_minute, "req/min"),
                (key.tokens_per_minute, "tok/min"),
                (key.concurrent, "at once"),
            )
            if figure is not None
        ]
        # Text, so that a name with [brackets] is shown and not obeyed.
        table.add_row(
            Text(key.id, no_wrap=True),
            Text(key.name),
            Text(state, style=_STYLES[state]),
            Text("all" if key.models is None else ", ".join(key.models)),
            Text(", ".join(limits) or "-"),
            "never" if key.expires is None else f"{key.expires.astimezone(UTC):%Y-%m-%d %H:%M}Z",
            "-" if key.created is None else f"{key.created.astimezone(UTC):%Y-%m-%d}",
        )
    # A pipe has no width; 80 columns would break the ids that somebody greps for.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
