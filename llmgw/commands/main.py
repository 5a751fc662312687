"""``llmgw``: the group that the commands hang on.

Each command's module is imported only when that command runs, so that a missing
extra (the demo's, say) never breaks another command, and ``--help`` is quick.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from msgspec import Struct

from llmgw import __version__


class Lazy(Struct, frozen=True):
    """A command that is not imported yet.

    :param target: ``module:attribute`` of the click command.
    :param help: its line in ``llmgw --help``.
    :param extra: the extra whose packages it may lack.
    """

    target: str
    help: str
    extra: str = ""


CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

COMMANDS: Mapping[str, Lazy] = {
    "bench": Lazy("llmgw.commands.bench:bench", "Measure real servers, or routers before them.", "demo"),
    "check": Lazy("llmgw.commands.check:check", "Check a config file and tell every fault."),
    "demo": Lazy("llmgw.commands.demo:demo", "Run real llama-servers and a gateway before them.", "demo"),
    "explain": Lazy("llmgw.commands.explain:explain", "Say who would take a request now, and why."),
    "keys": Lazy("llmgw.commands.keys:keys", "Make, list and revoke callers' keys."),
    "plugins": Lazy("llmgw.commands.plugins:plugins", "List installed plugins and explain broken ones."),
    "register": Lazy("llmgw.commands.register:register", "Keep a model server in etcd while it is well."),
    "replay": Lazy("llmgw.commands.replay:replay", "Try routers on the requests of an access log."),
    "simulate": Lazy("llmgw.commands.simulate:simulate", "Try routers on a simulated fleet."),
    "top": Lazy("llmgw.commands.top:top", "Show the fleet of a running gateway, live."),
}


class LazyGroup(click.Group):
    """A click group over a table of :class:`Lazy` commands."""

    lazy: Mapping[str, Lazy] = COMMANDS

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what its output cannot take is no traceback."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a locale without our bars and arrows
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
            raise click.ClickException(f"cannot write: {error.strerror}") from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, sorted."""
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command.

        :raise click.ClickException: something it needs is not installed.
        """
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        entry = self.lazy[cmd_name]
        module, _, attribute = entry.target.partition(":")
        try:
            command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing == "llmgw" and error.name != module:
                raise  # a fault of ours, not of the installation
            cure = f"; pip install 'llmgw[{entry.extra}]'" if entry.extra and missing != "llmgw" else ""
            raise click.ClickException(f"`llmgw {cmd_name}` is not available: {error}{cure}") from error
        assert isinstance(command, click.Command), entry.target
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        rows = []
        for name in self.list_commands(ctx):
            if name in self.lazy:
                rows.append((name, self.lazy[name].help))
            else:
                command = super().get_command(ctx, name)
                rows.append((name, command.get_short_help_str() if command else ""))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=LazyGroup)
@click.version_option(__version__, prog_name="llmgw")
def main() -> None:
    """An inference gateway for fleets of self-hosted language models.

    The daemon itself is started with `twistd -n llmgw -c FILE`.
    """
