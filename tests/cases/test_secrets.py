"""Unique strings as keys, tokens, prompts and answers: after all kinds of requests and
faults they stand nowhere but where they belong (case S-KEY-3)."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import strange_plugins
from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Gateway,
    Line,
    Received,
    Scripted,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    json_response,
    post,
)

KEY = "canary-caller-key-7f3a9b2c"
BACKEND_KEY = "canary-backend-key-51d8e0aa"
ADMIN_TOKEN = "canary-admin-token-c04412fe"
WRONG_KEY = "canary-wrong-key-93b7d6e1"
PROMPT = "canary-prompt-8e21f7d0"
ANSWER = "canary-answer-2b6c9f34"
SECRETS = (KEY, BACKEND_KEY, ADMIN_TOKEN, WRONG_KEY)
TEXTS = (PROMPT, ANSWER)


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def script(line: Line, request: Received) -> None:
    """Answers, and failures whose words hold what they should not."""
    assert request.get("authorization") == f"Bearer {BACKEND_KEY}"
    assert KEY not in request.head.decode()
    wanted = request.json.get("want", "answer")
    if wanted == "answer" and request.json.get("stream"):
        line.send(SSE_HEAD, chunk(event(ANSWER)), chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
    elif wanted == "answer":
        line.send(json_response({"choices": [{"message": {"content": ANSWER}}]}))
    elif wanted == "junk":
        line.send(f"HTTP/1.1 200 OK\r\nX-Bad : {BACKEND_KEY}\r\n\r\n{ANSWER}".encode())
        line.close()
    elif wanted == "cut":
        line.send(SSE_HEAD, chunk(event(ANSWER)))
        line.close()
    else:
        line.send(json_response({"error": {"message": f"bad {PROMPT}"}}, int(wanted)))


class Watched:
    """A gateway with canaries everywhere; what it said to clients."""

    def __init__(self, folder: Path) -> None:
        self.backend = Scripted(script)
        private(folder / "token", ADMIN_TOKEN)
        private(folder / "backend.key", BACKEND_KEY)
        private(
            folder / "keys.toml",
            f'[keys.one]\nname = "one"\nhash = "sha256:{sha256(KEY.encode()).hexdigest()}"\n',
        )
        self.config = (
            'auth = ["keys:keys.toml"]\nadmin_token_file = "token"\n'
            '[log]\naccess = "access.log"\n[retry]\nattempts = 0\n'
            "[breaker]\nconsecutive = 1000\nratio_min = 1000\n"
            + backend_table(self.backend, more='models = ["m"]\napi_key_file = "backend.key"')
        )
        self.gateway = Gateway(folder, self.config, environment=strange_plugins.installed(folder))
        self.said: list[bytes] = []

    def ask(self, raw: bytes) -> int:
        answer = self.gateway.ask(raw)
        self.said.append(repr(answer.headers).encode() + (b"" if answer.status == 200 else answer.body))
        return answer.status

    def admin(self, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
        head = (
            f"{method} {path} HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.gateway.admin_port), 10) as sock:
            sock.sendall(head.encode() + body)
            data = b""
            while not (path == "/api/events" and b"\n\n" in data) and (piece := sock.recv(1 << 20)):
                data += piece
        return int(data.split(b" ")[1]), data

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.admin("/api/state")[1].split(b"\r\n\r\n")[1])
        return found

    def everything_said(self) -> dict[str, bytes]:
        """All that can be read of it from outside."""
        folder, pid = self.gateway.folder, self.gateway.process.pid
        found = {f"answer {number}": said for number, said in enumerate(self.said)}
        for path in ("/metrics", "/api/state", "/api/events"):
            status, found[path] = self.admin(path)
            assert status == 200
        found["/api/explain"] = self.admin("/api/explain", "POST", chat_body(content=PROMPT))[1]
        for name in ("twistd.log", "access.log"):
            found[name] = (folder / name).read_bytes()
        for name in ("cmdline", "comm", "environ"):
            found[name] = Path(f"/proc/{pid}/{name}").read_bytes()
        return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    made = Watched(tmp_path_factory.mktemp("secrets"))
    yield made
    made.gateway.stop()
    made.backend.close()
    assert not made.backend.errors


def bearer(key: str = KEY) -> str:
    return f"Authorization: Bearer {key}\r\n"


def test_s_key_3_no_secret_and_no_prompt_is_seen_anywhere(watched: Watched) -> None:
    def body(**fields: object) -> bytes:
        return chat_body(messages=[{"role": "user", "content": PROMPT}], **fields)

    for stream in (False, True):
        assert watched.ask(post(body=body(stream=stream), headers=bearer())) == 200
    for want in ("junk", "cut", "400", "500", "503"):
        watched.ask(post(body=body(want=want, stream=True), headers=bearer()))
    for headers in (
        bearer(WRONG_KEY),
        f"x-api-key: {WRONG_KEY}\r\n",
        f"Authorization: Basic {WRONG_KEY}\r\n",
    ):
        assert watched.ask(post(body=body(), headers=headers)) == 401
    assert watched.ask(post(body=body(), headers=bearer() + f"x-api-key: {WRONG_KEY}\r\n")) == 401
    watched.ask(post(f"/v1/chat/completions?api_key={WRONG_KEY}", body(), bearer()))
    watched.ask(post(f"/{PROMPT}?key={WRONG_KEY}", body(), bearer()))
    watched.ask(post(body=body()[:-1], headers=bearer()))
    watched.ask(post(body=b'{"model":"m","n":"%b"}' % PROMPT.encode(), headers=bearer()))
    watched.ask(f"POST / HTTP/1.1\r\nHost: a\r\nAuthorization : {KEY}\r\n\r\n".encode())
    # Faults of plugins, whose tracebacks are logged, and of a reload.
    plain = watched.gateway.config_path.read_text()
    for table in (
        '[[filters]]\nplugin = "strange"\ndoes = "raise"\n',
        '[router]\nplugin = "strange"\ndoes = "raise"\n',
        "nonsense = 1\n",
    ):
        watched.gateway.config_path.write_text(plain + table if table[0] == "[" else table + plain)
        watched.admin("/api/reload", "POST")
        watched.ask(post(body=body(), headers=bearer()))
    watched.gateway.config_path.write_text(plain)
    assert watched.admin("/api/reload", "POST")[0] == 200
    eventually(lambda: watched.state["in_flight"] == 0)
    eventually(lambda: len((watched.gateway.folder / "access.log").read_text().splitlines()) > 15)
    said = watched.everything_said()
    assert "the filter strange raised" in said["twistd.log"].decode()
    for place, text in said.items():
        for secret in SECRETS:
            assert secret.encode() not in text, f"{secret} in {place}"
        if place.startswith("answer "):
            continue  # a backend's own error goes to its client, who wrote the prompt
        for words in TEXTS:
            assert words.encode() not in text, f"{words} in {place}"


def test_a_process_that_dies_leaves_no_memory_behind(watched: Watched) -> None:
    """No core file, and what Python says of a deadly signal holds no values."""
    limits = Path(f"/proc/{watched.gateway.process.pid}/limits").read_text()
    soft = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert soft.split()[4] == "0"
    before = set(os.listdir(watched.gateway.folder))
    watched.gateway.process.send_signal(signal.SIGABRT)
    watched.gateway.process.wait(10)
    assert not {name for name in set(os.listdir(watched.gateway.folder)) - before if "core" in name}
    for secret in (*SECRETS, *TEXTS):
        assert secret not in watched.gateway.log
