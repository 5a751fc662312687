"""``llmgw demo``: three real llama-servers of unlike speed, and the gateway before them.

It makes what it needs in one folder, starts everything on loopback, shows how to
call it, streams one answer itself, and ends all of it on Ctrl-C, on SIGTERM and
after ``--seconds``, with exit status 0. What cannot be started is exit status 1
and one clear line.
"""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console
from rich.text import Text

from llmgw.demo.certificate import CertificateFiles, ensure_certificate
from llmgw.demo.fleet import start_fleet
from llmgw.demo.layout import ALIAS, FLEET, MODEL, config_text, ensure_key, ensure_model
from llmgw.demo.processes import Child, StartError, end_with_parent

LOOK_EVERY_S = 0.25
READY_WITHIN_S = 30.0
QUESTION = "What does a gateway do?"


class Ended(BaseException):
    """Somebody wants the demo to end; not an error, so no ``except Exception`` may swallow it."""


@click.command()
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="End by itself after so long.")
@click.option(
    "--servers",
    type=click.Choice(["auto", "real", "simulated"]),
    default="auto",
    show_default=True,
    help="Real llama.cpp servers, or ones that pretend; auto takes the first that works.",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".demo"),
    show_default=True,
    help="Where model, certificate, key, config and logs are kept.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8443, show_default=True, help="TLS; 0 takes a free one."
)
@click.option(
    "--admin-port",
    type=click.IntRange(0, 65535),
    default=9901,
    show_default=True,
    help="Admin and dashboard; 0 takes a free one.",
)
@click.option("--end-with-parent", "bound", is_flag=True, hidden=True, help="End when our parent ends.")
def demo(
    seconds: float | None, servers: str, directory: Path, port: int, admin_port: int, bound: bool
) -> None:
    """Run real llama-servers and a gateway before them."""
    if bound:
        end_with_parent(os.getppid(), signal.SIGTERM)
    console = Console(highlight=False, soft_wrap=True)
    try:
        with _ending_on_signals(), ExitStack() as ends:
            _run(console, ends, seconds, servers, directory, port, admin_port)
    except Ended:
        console.print("Stopped.")
    except StartError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or directory}: {error.strerror}") from None


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Within, the first signal raises :class:`Ended`; while that unwinds, more of them are ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(*_: object) -> NoReturn:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise Ended

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    console: Console,
    ends: ExitStack,
    seconds: float | None,
    servers: str,
    directory: Path,
    port: int,
    admin_port: int,
) -> None:
    port, admin_port = _free_port(port, "--port"), _free_port(admin_port, "--admin-port")
    directory.mkdir(parents=True, exist_ok=True)
    files = ensure_certificate(directory)
    key = ensure_key(directory)

    def tell(line: str) -> None:
        console.print(Text(line, style="yellow"))

    fleet, real = start_fleet(servers, lambda: ensure_model(directory), directory, tell)
    ends.callback(fleet.stop)
    console.print(
        f"[bold]Servers[/bold]   {len(FLEET)} {'real llama.cpp' if real else 'simulated'}: "
        + ", ".join(
            f"{plan.id} ({plan.share:.0%} of a core, {plan.parallel} slots, pid {fleet.servers[plan.id].pid})"
            for plan in FLEET
        )
    )
    config = directory / "llmgw.toml"
    config.write_text(config_text(fleet.urls, port, admin_port))
    gateway = Child("gateway", gateway_command(config), directory / "gateway.log", announces=False)
    ends.callback(gateway.stop, timeout_s=8.0)
    _wait_ready(gateway, admin_port)
    _introduce(console, files, directory, port, admin_port)
    ends_at_s = None if seconds is None else time.monotonic() + seconds
    try:
        _show_answer(console, files.authority, key, port)
    except ImportError as error:
        tell(f"No answer is shown: {error}; pip install 'llmgw[demo]'")
    except Exception as error:
        # Whatever the client makes of a failed call; the log has the rest.
        raise StartError(f"the first answer failed: {error}\n{gateway.log_tail()}") from error
    console.print("Ctrl-C stops everything." if seconds is None else f"Everything stops in {seconds:g} s.")
    while ends_at_s is None or time.monotonic() < ends_at_s:
        time.sleep(LOOK_EVERY_S)
        for line in fleet.watch(time.monotonic()):
            tell(line)
        if gateway.returncode() is not None:
            raise StartError(f"the gateway ended with {gateway.returncode()}\n{gateway.log_tail()}")
    raise Ended


def _free_port(port: int, option: str) -> int:
    """``port`` if nobody listens there; a free one for 0.

    :raise StartError: somebody does.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StartError(
                f"port {port} on 127.0.0.1 cannot be taken ({error.strerror}); choose another with {option}"
            ) from None
        taken: int = probe.getsockname()[1]
        return taken


def gateway_command(config: Path) -> list[str]:
    """What starts the daemon: ``twistd``, wherever its script was installed."""
    reactor = ["--reactor=uvloop"] if find_spec("uvloop") else []
    return [
        *(sys.executable, "-c", "from twisted.scripts.twistd import run; run()"),
        *("--nodaemon", "--pidfile=", *reactor),
        *("llmgw", "-c", str(config.absolute())),
    ]


def _wait_ready(gateway: Child, admin_port: int) -> None:
    """Ask ``/readyz`` until it says yes.

    :raise StartError: the gateway ended or the time is up.
    """
    deadline_s = time.monotonic() + READY_WITHIN_S
    answer = "nobody answers"
    while time.monotonic() < deadline_s:
        if gateway.returncode() is not None:
            raise StartError(f"the gateway ended with {gateway.returncode()}\n{gateway.log_tail()}")
        # Not urllib, which would ask a proxy of the environment.
        connection = http.client.HTTPConnection("127.0.0.1", admin_port, timeout=2)
        try:
            connection.request("GET", "/readyz")
            response = connection.getresponse()
            if response.status == 200:
                return
            answer = f"{response.status} {response.read(200).decode(errors='replace').strip()}"
        except (OSError, http.client.HTTPException) as error:
            answer = str(error)
        finally:
            connection.close()
        time.sleep(0.05)
    raise StartError(f"the gateway is not ready ({answer})\n{gateway.log_tail()}")


def _introduce(
    console: Console, files: CertificateFiles, directory: Path, port: int, admin_port: int
) -> None:
    """Print how to call it. The key is shown by the path of its file: screens are shared."""
    url = f"https://127.0.0.1:{port}/v1"
    body = f'{{"model": "{MODEL}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    curl = (
        f"curl -N --cacert {shlex.quote(str(files.authority))} {url}/chat/completions"
        f' -H "Authorization: Bearer $(cat {shlex.quote(str(directory / "key.txt"))})"'
        f" -H 'Content-Type: application/json' -d '{body}'"
    )
    snippet = f"""\
import ssl
from openai import DefaultHttpxClient, OpenAI

tls = ssl.create_default_context(cafile={str(files.authority.absolute())!r})
client = OpenAI(
    base_url="{url}",
    api_key=open({str((directory / "key.txt").absolute())!r}).read().strip(),
    http_client=DefaultHttpxClient(verify=tls),
)
for chunk in client.chat.completions.create(
    model="{MODEL}", messages=[{{"role": "user", "content": "Hello"}}], stream=True
):
    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)"""
    console.print(Text.assemble(("Gateway   ", "bold"), f"{url} (models {MODEL} and {ALIAS})"))
    console.print(Text.assemble(("Dashboard ", "bold"), (f"http://127.0.0.1:{admin_port}/", "underline")))
    console.print(Text.assemble(("Files     ", "bold"), f"{directory}/ (llmgw.toml, keys, logs)"))
    console.print(Text("\nTry it:", style="bold"))
    console.print(Text(curl, style="cyan"))
    console.print(Text("\nOr from Python:", style="bold"))
    console.print(Text(snippet, style="cyan"))


def _show_answer(console: Console, authority: Path, key: str, port: int) -> None:
    """Stream one answer through the gateway, as a customer would, and print it.

    :raise ImportError: the ``openai`` package is not installed.
    """
    import openai

    tls = ssl.create_default_context(cafile=str(authority))
    with openai.OpenAI(
        base_url=f"https://127.0.0.1:{port}/v1",
        api_key=key,
        # Proxies of the environment have no way to our loopback.
        http_client=openai.DefaultHttpxClient(verify=tls, trust_env=False),
        timeout=20,
    ) as client:
        console.print(Text.assemble("\n", (QUESTION, "bold")))
        # The clock shall not show the client's own start and the TLS handshake.
        client.models.list()
        started_s = time.monotonic()
        first_s: float | None = None
        # Raw, for the sake of the headers.
        with client.chat.completions.with_streaming_response.create(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], stream=True
        ) as response:
            backend = response.headers.get("x-llmgw-backend", "?")
            for chunk in response.parse():
                text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if text and first_s is None:
                    first_s = time.monotonic() - started_s
                console.print(Text(text, style="green"), end="")
        total_s = time.monotonic() - started_s
    if first_s is None:
        raise StartError("the answer was empty")
    times = f"first token after {first_s * 1000:.0f} ms, complete after {total_s * 1000:.0f} ms"
    console.print(Text(f"\nbackend {backend}, {times}\n", style="dim"))
