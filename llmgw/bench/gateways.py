"""Gateways that are started to be measured: one process per router, before the same servers."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

from msgspec import Struct

from llmgw.commands.demo import gateway_command
from llmgw.demo.layout import ServerPlan
from llmgw.demo.processes import Child, StartError

ANSWERED = re.compile(r'llmgw_requests_total\{.*backend="([^"]+)".*status="200"\S* (\S+)')

SERVERS = (
    ServerPlan("fast", 0.6, 10.0, 4),
    ServerPlan("mid", 0.3, 5.0, 2),
    ServerPlan("slow", 0.1, 1.6, 2),
)
"""Started where no backend is named: real, of unlike speed, together one core."""

READY_S = 30.0


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Backend(Struct, frozen=True):
    """One server to stand before."""

    id: str
    url: str
    weight: float = 1.0


class Gateway:
    """One gateway process with one router, on free ports of the loopback interface.

    :raise StartError: it does not start.
    :ivar url: where it listens.
    """

    def __init__(self, folder: Path, number: int, router: str, backends: Sequence[Backend]) -> None:
        name = f"gateway-{number}"
        port, self._admin = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = folder / f"{name}.toml"
        config.write_text(config_text(router, backends, port, self._admin), encoding="utf-8")
        self._child = Child(name, gateway_command(config), folder / f"{name}.log", announces=False)
        end_s = time.monotonic() + READY_S
        while not self._answers("/readyz"):
            if self._child.returncode() is not None or time.monotonic() > end_s:
                self.stop()
                raise StartError(f"{name} with {router} does not start\n{self._child.log_tail()}")
            time.sleep(0.05)

    def shares(self) -> dict[str, int]:
        """Requests answered by each backend so far."""
        found: dict[str, int] = {}
        for line in self._answers("/metrics").decode().splitlines():
            matched = ANSWERED.match(line)
            if matched:
                found[matched[1]] = found.get(matched[1], 0) + int(float(matched[2]))
        return found

    def stop(self) -> None:
        """End it."""
        self._child.stop()

    def _answers(self, path: str) -> bytes:
        try:
            with urlopen(f"http://127.0.0.1:{self._admin}{path}", timeout=5) as answer:
                return bytes(answer.read())
        except OSError:
            return b""


def config_text(router: str, backends: Sequence[Backend], port: int, admin: int) -> str:
    """The file of a gateway that anybody on this machine may ask.

    It does not count the servers' busy slots (``busy``): these are those of whoever
    was measured before it, which it would take for gateways beside it.

    :param router: ``NAME`` or ``NAME:KEY=VALUE,...``.
    """
    name, _, options = router.partition(":")
    lines = [
        f'listen = ["tcp:{port}:interface=127.0.0.1"]',
        f'admin = ["tcp:{admin}:interface=127.0.0.1"]',
        'auth = ["anonymous"]',
        f'[router]\nplugin = "{name}"',
        *(option.replace("=", " = ", 1) for option in options.split(",") if option),
        '[log]\naccess = ""\n[drain]\nlame_duck_s = 0',
        '[[health]]\nplugin = "llamacpp"\nbusy = false',
    ]
    for each in backends:
        lines.append(
            f"[[backends]]\nid = {json.dumps(each.id)}\nurl = {json.dumps(each.url)}\nweight = {each.weight}"
        )
    return "\n".join(lines) + "\n"
