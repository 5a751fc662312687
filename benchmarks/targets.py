"""What is measured side by side: how each gateway is started in front of the same mock server.

All of them listen on loopback, with one worker unless their name says otherwise, without an
access log but for llmgw, which runs with keys, limits, metrics and access log on.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.demo.certificate import ensure_certificate

HERE = Path(__file__).resolve().parent
SECRET = "benchmark-secret-0123456789"
HEADER = f"Authorization: Bearer {SECRET}"
BIN = Path(sys.executable).parent


@dataclass
class Target:
    """A gateway that runs.

    :ivar tls_port: where it speaks TLS, if it does.
    :ivar process: its first process; its children count too.
    """

    name: str
    port: int
    process: subprocess.Popen[bytes]
    tls_port: int | None = None
    headers: list[str] = field(default_factory=lambda: [HEADER])


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def build_tools(folder: Path) -> None:
    """Compile the load generator and the mock server.

    :raise SystemExit: no compiler, or no OpenSSL headers.
    """
    for name, libraries in (("mock_server", []), ("load", ["-lssl", "-lcrypto"])):
        source, made = HERE / "tools" / f"{name}.c", folder / name
        if made.exists() and made.stat().st_mtime > source.stat().st_mtime:
            continue
        command = ["cc", "-O2", "-w", "-o", str(made), str(source), *libraries]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise SystemExit("bench: needs a C compiler and OpenSSL's headers (gcc, libssl-dev)") from None


class Stage:
    """A folder, a mock server, and whatever is started before it. Ends all of it.

    :ivar mock_port: where the mock server listens.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ending = ExitStack()
        build_tools(folder)
        self.certificate = ensure_certificate(folder)
        self.mock_port = free_port()
        self.mock = self.run("mock", [str(folder / "mock_server"), str(self.mock_port)], self.mock_port)

    def run(self, name: str, command: list[str], *ports: int) -> subprocess.Popen[bytes]:
        """Start a program, and wait until it listens.

        :raise RuntimeError: it ended, or did not listen within 60 s.
        """
        log = self._ending.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self._ending.callback(_end, process)
        for port in ports:
            until = time.monotonic() + 60
            while True:
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", port)):
                        break
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{name} does not listen; see {log.name}")
                time.sleep(0.05)
        return process

    def close(self) -> None:
        """End everything, the mock server last."""
        self._ending.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """A stage, ended afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(folder.resolve())
    try:
        yield stage
    finally:
        stage.close()


# --- the gateways ---------------------------------------------------------------------

LLMGW = """
listen = [
  "tcp:{port}:interface=127.0.0.1",
  "llmtls:tcp:{tls_port}:interface=127.0.0.1:privateKey={key}:certKey={cert}",
]
admin = ["tcp:{admin_port}:interface=127.0.0.1"]
auth = ["keys:keys.toml"]
workers = {workers}
{more}
[[backends]]
id = "mock"
url = "http://127.0.0.1:{mock_port}"
models = ["mock"]
max_connections = 10000
[[rate_limits]]
requests_per_minute = 1e9
tokens_per_minute = 1e12
concurrent = 100000
[limits]
in_flight = 100000
in_flight_per_key = 100000
connections = 100000
backlog = 4096
[timeouts]
keepalive_requests = 1000000000
[log]
access = "access.log"
"""

NGINX = """
worker_processes 1; daemon off; pid nginx.pid; error_log nginx.err warn; worker_rlimit_nofile 40000;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_body_buffer_size 128k; client_max_body_size 64m;
  keepalive_requests 100000000; keepalive_timeout 300;
  client_body_temp_path b; proxy_temp_path p; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  upstream mock {{ server 127.0.0.1:{mock_port}; keepalive 4096; keepalive_requests 100000000; }}
  ssl_certificate {cert}; ssl_certificate_key {key}; ssl_protocols TLSv1.2 TLSv1.3;
  ssl_session_cache shared:s:10m;
  server {{
    listen 127.0.0.1:{port} backlog=4096; listen 127.0.0.1:{tls_port} ssl backlog=4096;
    location / {{
      proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 600;
    }}
  }}
}}
"""

HAPROXY = """
global
  nbthread 1
  maxconn 9000
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  option http-no-delay
  http-reuse always
frontend f
  bind 127.0.0.1:{port} backlog 4096
  bind 127.0.0.1:{tls_port} ssl crt {pem} backlog 4096
  default_backend b
backend b
  server s 127.0.0.1:{mock_port} pool-max-conn -1
"""


def llmgw(
    stage: Stage, name: str, *, workers: int = 1, reactor: str = "", more: str = "", options: str = ""
) -> Target:
    """llmgw with everything on."""
    folder = stage.folder / name
    folder.mkdir(exist_ok=True)
    keys = folder / "keys.toml"
    if not keys.exists():
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_text(SECRET)
        new = [str(BIN / "llmgw"), "keys", "new", "--file", str(keys), "--secret-file", str(secret), "bench"]
        subprocess.run(new, check=True, capture_output=True)
    port, tls_port, admin_port = free_port(), free_port(), free_port()
    text = LLMGW.format(
        port=port,
        tls_port=tls_port,
        admin_port=admin_port,
        key=stage.certificate.key,
        cert=stage.certificate.certificate,
        workers=workers,
        mock_port=stage.mock_port,
        more=more,
    )
    (folder / "llmgw.toml").write_text(text)
    command = [str(BIN / "twistd"), *([f"--reactor={reactor}"] if reactor else []), "-n", "--pidfile="]
    command += ["llmgw", "-c", str(folder / "llmgw.toml"), *options.split()]
    return Target(name, port, stage.run(name, command, port, tls_port), tls_port)


def llmgw_redis(stage: Stage, name: str) -> Target:
    """llmgw with its limits in a Redis of its own."""
    port = free_port()
    command = [_program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    stage.run("redis", command, port)
    limiter = f'[rate_limiter]\nplugin = "redis"\nurl = "redis://127.0.0.1:{port}"\n'
    return llmgw(stage, name, more=limiter)


def direct(stage: Stage, name: str) -> Target:
    """Nobody between: the mock server itself, for what the others add to its latency."""
    return Target(name, stage.mock_port, stage.mock)


def nginx(stage: Stage, name: str) -> Target:
    """nginx with one worker."""
    port, tls_port = free_port(), free_port()
    config = stage.folder / "nginx.conf"
    config.write_text(
        NGINX.format(
            port=port,
            tls_port=tls_port,
            mock_port=stage.mock_port,
            cert=stage.certificate.certificate,
            key=stage.certificate.key,
        )
    )
    command = [_program("nginx"), "-c", str(config), "-p", str(stage.folder)]
    return Target(name, port, stage.run(name, command, port), tls_port)


def haproxy(stage: Stage, name: str) -> Target:
    """HAProxy with one thread."""
    port, tls_port = free_port(), free_port()
    pem = stage.folder / "both.pem"
    pem.touch(0o600)
    pem.write_text(stage.certificate.certificate.read_text() + stage.certificate.key.read_text())
    config = stage.folder / "haproxy.cfg"
    config.write_text(HAPROXY.format(port=port, tls_port=tls_port, pem=pem, mock_port=stage.mock_port))
    return Target(
        name, port, stage.run(name, [_program("haproxy"), "-db", "-f", str(config)], port), tls_port
    )


def vllm_router(stage: Stage, name: str) -> Target:
    """vllm-router (PyPI), round robin."""
    port = free_port()
    command = [_program("vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--worker-urls", f"http://127.0.0.1:{stage.mock_port}", "--log-level", "error"]
    return Target(name, port, stage.run(name, command, port))


def sglang_router(stage: Stage, name: str) -> Target:
    """sglang-router (PyPI), round robin. Its metrics get a port of their own: the usual one may be taken."""
    port = free_port()
    command = [_program("python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--policy", "round_robin", "--log-level", "error"]
    command += ["--prometheus-port", str(free_port())]
    command += ["--worker-urls", f"http://127.0.0.1:{stage.mock_port}"]
    return Target(name, port, stage.run(name, command, port))


def litellm(stage: Stage, name: str) -> Target:
    """LiteLLM's proxy (PyPI, 1.80.0), one worker, no database."""
    port = free_port()
    config = stage.folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: mock\n    litellm_params:\n      model: openai/mock\n"
        f"      api_base: http://127.0.0.1:{stage.mock_port}/v1\n      api_key: x\n"
        f"general_settings:\n  master_key: {SECRET}\n"
    )
    command = [_program("litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    return Target(name, port, stage.run(name, command, port))


def portkey(stage: Stage, name: str) -> Target:
    """Portkey's gateway (npm, 1.15.2), as it comes: no keys, no limits."""
    port = free_port()
    script = (
        HERE / "build" / "portkey" / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    )
    if not script.exists():
        raise RuntimeError("portkey is not installed")
    command = [_program("node"), str(script), f"--port={port}", "--headless"]
    headers = ["x-portkey-provider: openai", f"x-portkey-custom-host: http://127.0.0.1:{stage.mock_port}/v1"]
    return Target(name, port, stage.run(name, command, port), headers=[HEADER, *headers])


PEERS = HERE / "build" / "peers" / "bin"
"""A virtual environment of their own, for the peers that PyPI has (benchmarks/README.md)."""


def _program(name: str) -> str:
    found = shutil.which(name, path=str(PEERS)) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed")
    return found


TARGETS: dict[str, Callable[[Stage, str], Target]] = {
    "direct": direct,
    "nginx": nginx,
    "haproxy": haproxy,
    "llmgw": llmgw,
    "llmgw-uvloop": lambda stage, name: llmgw(stage, name, reactor="uvloop"),
    "llmgw-redis": llmgw_redis,
    "llmgw-2": lambda stage, name: llmgw(stage, name, workers=2),
    "llmgw-prefix": lambda stage, name: llmgw(stage, name, more='[router]\nplugin = "expected-ttft"\n'),
    "vllm-router": vllm_router,
    "sglang-router": sglang_router,
    "litellm": litellm,
    "portkey": portkey,
}
"""By the name that ``compare.py`` takes."""
