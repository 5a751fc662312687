"""Which file of the demo lies where, and what is in it.

Everything is in one folder, ``.demo`` by default. What is there and still good is
used again, so that the second start is quick::

    model-….gguf                the tiny model
    cert.pem key.pem ca.pem     see :mod:`.certificate`
    keys.toml key.txt           the gateway's key file, and the one key that is in it
    llmgw.toml                  the configuration, written anew at each start
    *.log                       one per process, and the access log
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from llmgw.access import credentials, key_file
from llmgw.demo import tiny_gguf
from llmgw.demo.certificate import write_private
from llmgw.errors import ConfigError

MODEL = "tiny"
"""The name that the servers give the model."""
ALIAS = "gpt-4o-mini"
LAYERS, FEED_FORWARD = 4, 768
CONTEXT_PER_SLOT = 4096


class ServerPlan(NamedTuple):
    """One server of the demo.

    :param share: of the time it may run, see :mod:`.duty`.
    """

    id: str
    share: float
    weight: float
    parallel: int


FLEET = (
    ServerPlan("fast", 1.0, 10.0, 4),
    ServerPlan("mid", 0.5, 5.0, 2),
    ServerPlan("slow", 0.15, 1.5, 2),
)


def ensure_model(directory: Path) -> Path:
    """The model file, made if it is not there.

    :raise ImportError: the extra ``demo`` is not installed.
    """
    path = directory / f"model-{tiny_gguf.REVISION}-{LAYERS}x{FEED_FORWARD}.gguf"
    if not path.exists():
        tiny_gguf.write_model(path, LAYERS, FEED_FORWARD, name=MODEL)
    return path


def ensure_key(directory: Path) -> str:
    """The demo's API key, in clear: the one in ``key.txt`` if the key file knows it, else a new one.

    Its answers tell the backend that made them.
    """
    clear, hashed = directory / "key.txt", directory / "keys.toml"
    try:
        secret = clear.read_text().strip()
        file, _ = key_file.load(str(hashed))
        wanted = _hash(secret)
        now_unix_s = datetime.now(UTC).timestamp()
        if any(key.hash == wanted and key.state(now_unix_s) == "live" for key in file.keys.values()):
            return secret
    except (OSError, ConfigError):
        pass
    key_id = credentials.new_id()
    secret = credentials.new_key(key_id)
    key = key_file.Key(
        id=key_id,
        name="demo",
        hash=_hash(secret),
        show_backend=True,
        show_decision=True,
        created=datetime.now(UTC).replace(microsecond=0),
    )
    directory.mkdir(parents=True, exist_ok=True)
    write_private(hashed, key_file.dump(key_file.KeyFile({key_id: key})).encode())
    write_private(clear, f"{secret}\n".encode())
    return secret


def _hash(secret: str) -> str:
    return f"sha256:{credentials.digest(secret, None).hex()}"


def config_text(urls: Mapping[str, str], port: int, admin_port: int) -> str:
    """The gateway's configuration.

    :param urls: server id to base URL, one for each of :data:`FLEET`.
    """
    parts = [
        "# Written by `llmgw demo` at each start; changes are lost. Paths count from this folder.",
        f'listen = ["llmtls:tcp:{port}:privateKey=key.pem:certKey=cert.pem:interface=127.0.0.1"]',
        f'admin = ["tcp:{admin_port}:interface=127.0.0.1"]',
        'auth = ["keys:keys.toml"]',
        "",
        "[log]",
        'access = "access.log"',
        "",
        "# A demo is ended by people who wait for it.",
        "[drain]",
        "lame_duck_s = 0.0",
        "finish_s = 3.0",
        "abort_s = 1.0",
        "",
        "[[health]]",
        'plugin = "llamacpp"',
        "interval_s = 2.0",
        "",
        "# Slots, context and model names are asked of the servers themselves.",
    ]
    for plan in FLEET:
        parts += [
            "[[backends]]",
            f"id = {json.dumps(plan.id)}",
            f"url = {json.dumps(urls[plan.id])}",
            f"weight = {plan.weight}",
            "",
        ]
    parts += [
        "# Callers may ask for the name on the left.",
        "[[models]]",
        f"name = {json.dumps(ALIAS)}",
        f"target = {json.dumps(MODEL)}",
        "",
    ]
    return "\n".join(parts)
