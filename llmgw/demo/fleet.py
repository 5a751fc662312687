"""The demo's servers: started together, kept alive, ended together."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from llmgw.demo.layout import CONTEXT_PER_SLOT, FLEET, MODEL, ServerPlan
from llmgw.demo.processes import Child, StartError

RESTART_AFTER_S = 5.0
"""A server that ended stays away so long, so that one can see what the gateway does about it."""

PREFILL_RATE, DECODE_RATE = 1300.0, 350.0
"""What a simulated server of share 1 pretends, tokens per second."""


def server_command(plan: ServerPlan, model: Path | None, port: int) -> list[str]:
    """The command of one server.

    :param model: ``None`` for a simulated one.
    :param port: 0 for a free one.
    """
    shared = [
        *("--alias", MODEL, "--port", str(port)),
        *("--parallel", str(plan.parallel), "--ctx", str(plan.parallel * CONTEXT_PER_SLOT)),
    ]
    if model is not None:
        # Small batches: a prompt whose reader has left is given up at the end of a batch.
        return [
            *(sys.executable, "-m", "llmgw.demo.llama_server"),
            *("--model", str(model), "--batch", "256"),
            *shared,
        ]
    return [
        *(sys.executable, "-m", "llmgw.demo.simulated"),
        *("--prefill", str(PREFILL_RATE * plan.share), "--decode", str(DECODE_RATE * plan.share)),
        *shared,
    ]


class Fleet:
    """The servers of :data:`~.layout.FLEET`, and the duty cycle that makes them unlike.

    :param model: a GGUF file for real servers, ``None`` for simulated ones.
    :param directory: for logs.
    """

    def __init__(self, model: Path | None, directory: Path, plans: Sequence[ServerPlan] = FLEET) -> None:
        self._model = model
        self._directory = directory
        self._plans = plans
        self.servers: dict[str, Child] = {}
        self._duty: Child | None = None
        self._restart_at_s: dict[str, float] = {}

    @property
    def urls(self) -> Mapping[str, str]:
        """Server id to base URL, the same for the fleet's life."""
        return {name: server.url for name, server in self.servers.items()}

    def start(self) -> None:
        """Start all of them and wait until they answer.

        :raise StartError: one does not start; the others are ended.
        """
        try:
            for plan in self._plans:
                self.servers[plan.id] = self._spawn(plan, 0)
            for server in self.servers.values():
                server.wait_listening()
            self._slow_down()
        except BaseException:
            self.stop()
            raise

    def watch(self, now_s: float) -> list[str]:
        """Start again what has ended; call this a few times a second.

        :param now_s: monotonic seconds.
        :return: what happened, a line each.
        """
        news: list[str] = []
        for plan in self._plans:
            server = self.servers[plan.id]
            if server.returncode() is None:
                continue
            if plan.id not in self._restart_at_s:
                news.append(
                    f"{plan.id} ended with {server.returncode()}; it starts again in {RESTART_AFTER_S:g} s"
                )
                self._restart_at_s[plan.id] = now_s + RESTART_AFTER_S
            elif now_s >= self._restart_at_s[plan.id]:
                news.append(self._restart(plan, server, now_s))
        if self._duty is not None and self._duty.returncode() is not None:
            # Killed, it may have left one stopped.
            self._slow_down()
        return news

    def stop(self) -> None:
        """End all of them."""
        self._run_freely()
        # All are asked before one is waited for.
        for server in self.servers.values():
            server.send(signal.SIGTERM)
        for server in self.servers.values():
            server.stop()
        self.servers.clear()

    def _spawn(self, plan: ServerPlan, port: int) -> Child:
        log = self._directory / f"{plan.id}.log"
        return Child(plan.id, server_command(plan, self._model, port), log)

    def _restart(self, plan: ServerPlan, ended: Child, now_s: float) -> str:
        ended.stop()
        # The configuration names the port, so it must be the same.
        server = self._spawn(plan, urlsplit(ended.url).port or 0)
        self.servers[plan.id] = server
        try:
            server.wait_listening()
        except StartError as error:
            server.url = ended.url
            self._restart_at_s[plan.id] = now_s + RESTART_AFTER_S
            return str(error)
        finally:
            self._slow_down()
        del self._restart_at_s[plan.id]
        return f"{plan.id} runs again"

    def _slow_down(self) -> None:
        self._run_freely()
        if self._model is None:
            return
        pairs = [
            f"{self.servers[plan.id].pid}:{plan.share}"
            for plan in self._plans
            if plan.share < 1 and self.servers[plan.id].returncode() is None
        ]
        if pairs:
            command = [sys.executable, "-m", "llmgw.demo.duty", *pairs]
            self._duty = Child("duty", command, self._directory / "duty.log")

    def _run_freely(self) -> None:
        if self._duty is not None:
            self._duty.stop()
            self._duty = None
        for server in self.servers.values():
            server.send(signal.SIGCONT)


Report = Callable[[str], None]
"""Tells people something, one line."""


def start_fleet(
    servers: str, make_model: Callable[[], Path], directory: Path, report: Report
) -> tuple[Fleet, bool]:
    """Start real servers, or simulated ones where that does not work.

    :param servers: ``real``, ``simulated``, or ``auto`` for the first of them that starts.
    :param make_model: gives the model file; called for real servers.
    :return: the fleet, and whether it is real.
    :raise StartError: none of what was asked for starts.
    """
    if servers != "simulated":
        try:
            fleet = Fleet(make_model(), directory)
            fleet.start()
            return fleet, True
        except (StartError, ImportError) as error:
            if servers == "real":
                raise StartError(f"no real llama-server here: {error}") from error
            why = str(error).strip().splitlines()
            report(f"No real llama-server runs here ({why[0]}; see {directory}/*.log).")
            report(
                "The servers of this demo are simulated: they keep the time of real ones and have no model."
            )
    fleet = Fleet(None, directory)
    fleet.start()
    return fleet, False
