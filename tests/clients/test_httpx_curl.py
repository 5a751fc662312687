"""``httpx`` and ``curl``: what the official clients do not show of HTTP itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_gateway import MODELS, LiveGateway, wait_until

pytestmark = pytest.mark.real

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
SLOW = {"model": "big", "prompt": "The", "ignore_eos": True, "stream": True, "max_tokens": 400}


# --- httpx ------------------------------------------------------------------------


def test_every_answer_has_an_id(live_gateway: LiveGateway, http: httpx.Client) -> None:
    answers = [
        http.post(CHAT, json=BODY),
        http.get("/v1/models"),
        http.get("/health"),
        http.get("/nothing"),
        http.post(CHAT, json={"model": "unknown"}),
        http.post(CHAT, content=b"{"),
        http.post(CHAT, json=BODY, headers={"authorization": "Bearer wrong"}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 404, 404, 400, 401]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    assert http.get("/health", headers={"x-request-id": "it-1"}).headers["x-request-id"] == "it-1"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"model": "tiny",}', b'{"model": "tiny", "model": "big"}', b"\xff", b"null"],
)
def test_what_is_no_json_object_is_refused_by_the_gateway(http: httpx.Client, content: bytes) -> None:
    for path, form in ((CHAT, "openai"), ("/v1/messages", "anthropic")):
        answer = http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.headers["content-type"].startswith("application/json")
        assert "x-llmgw-backend" not in answer.headers
        body = answer.json()
        if form == "openai":
            assert body["error"].keys() == {"message", "type", "code", "param"}
            assert body["error"]["code"] == "invalid_request"
        else:
            assert body["type"] == "error"
            assert body["error"]["type"] == "invalid_request_error"


def test_what_llama_servers_keep_to_themselves_is_not_found(http: httpx.Client) -> None:
    for path in (
        "/slots",
        "/props",
        "/metrics",
        "/lora-adapters",
        "/models/load",
        "/api/state",
        "/readyz",
        "/",
    ):
        for method in ("GET", "POST"):
            answer = http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_methods(http: httpx.Client) -> None:
    refused = http.get(CHAT)
    assert refused.status_code == 405
    assert refused.headers["allow"] == "POST, OPTIONS"
    head = http.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(http.get("/v1/models").content)
    assert http.options(CHAT).status_code == 204


def test_models_and_one_model(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == MODELS
    assert http.get("/v1/models/capped").json()["id"] == "capped"
    assert http.get("/v1/models/org%2Fmodel").json()["error"]["code"] == "model_not_found"


def test_without_a_key_only_health_answers(live_gateway: LiveGateway) -> None:
    with live_gateway.client(None) as http:
        assert http.get("/health").json() == {"status": "ok"}
        for answer in (http.get("/v1/models"), http.post(CHAT, json=BODY)):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
def test_other_places_for_a_key(live_gateway: LiveGateway, header: str) -> None:
    with live_gateway.client(None) as http:
        headers = {header: live_gateway.keys["all"]}
        assert http.post(CHAT, json=BODY, headers=headers).status_code == 200
        two = {**headers, "authorization": f"Bearer {live_gateway.keys['scoped']}"}
        assert http.post(CHAT, json=BODY, headers=two).status_code == 401


def test_a_backends_own_headers_stay_behind(http: httpx.Client) -> None:
    for body in (BODY, {**BODY, "stream": True}):
        headers = http.post(CHAT, json=body).headers
        assert "server" not in headers
        assert "keep-alive" not in headers
        assert "access-control-allow-origin" not in headers
        assert headers["x-llmgw-backend"] in ("wide", "narrow")
        assert headers["x-llmgw-decision"].startswith(headers["x-llmgw-backend"])


def test_a_connection_is_used_again(live_gateway: LiveGateway, http: httpx.Client) -> None:
    http.post(CHAT, json=BODY)
    before = live_gateway.state()["connections"]
    for body in (BODY, {**BODY, "stream": True}, {"model": "unknown"}) * 3:
        http.post(CHAT, json=body)
    assert live_gateway.state()["connections"] == before


def test_a_chunked_body_is_taken(http: httpx.Client) -> None:
    raw = json.dumps(BODY).encode()
    answer = http.post(
        CHAT,
        content=(raw[at : at + 7] for at in range(0, len(raw), 7)),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 200


def test_a_compressed_body_is_refused(http: httpx.Client) -> None:
    answer = http.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


def test_events_come_as_they_are_made(http: httpx.Client) -> None:
    arrived: list[float] = []
    with http.stream("POST", "/v1/completions", json=SLOW) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                arrived.append(time.monotonic())
    assert len(arrived) > 400
    whole_s = arrived[-1] - arrived[0]
    assert whole_s > 0.05
    # Held together, they would all come at the end.
    assert arrived[len(arrived) // 2] - arrived[0] < 0.9 * whole_s


def test_many_at_once_are_answered_or_told_to_come_back(live_gateway: LiveGateway) -> None:
    async def talk() -> list[httpx.Response]:
        headers = {"authorization": f"Bearer {live_gateway.keys['all']}"}
        async with httpx.AsyncClient(
            base_url=live_gateway.url, headers=headers, verify=live_gateway.tls, trust_env=False, timeout=30
        ) as client:
            bodies = [{**BODY, "max_tokens": 60, "stream": bool(number % 2)} for number in range(40)]
            return await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))

    answers = asyncio.run(talk())
    assert {answer.status_code for answer in answers} <= {200, 503}
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(served) >= 6
    for answer in served:
        assert answer.text.endswith("data: [DONE]\n\n") or answer.json()["choices"]
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after-ms"]) > 0
    assert wait_until(live_gateway.is_idle, 1)


# --- curl ---------------------------------------------------------------------------

Curl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def curl(live_gateway: LiveGateway) -> Curl:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("no curl")

    def run(path: str, *options: str, ca: Path = live_gateway.ca) -> subprocess.CompletedProcess[str]:
        command = [program, "-sS", "-q", "--noproxy", "*", "-m", "20", "--cacert", str(ca)]
        command += [
            "-H",
            f"Authorization: Bearer {live_gateway.keys['all']}",
            *options,
            live_gateway.url + path,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    return run


JSON = ("-H", "Content-Type: application/json", "-d")


def test_the_line_that_the_demo_prints(curl: Curl) -> None:
    ended = curl(CHAT, "-N", *JSON, json.dumps({**BODY, "stream": True}))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("data: {")
    assert ended.stdout.endswith("data: [DONE]\n\n")


def test_verbose_says_what_was_agreed(curl: Curl) -> None:
    ended = curl(CHAT, "-v", *JSON, json.dumps(BODY))
    assert "TLSv1.3" in ended.stderr
    assert "< HTTP/1.1 200 OK" in ended.stderr
    assert json.loads(ended.stdout)["choices"]


@pytest.mark.parametrize("size", [2_000_000])
def test_a_large_body_waits_for_100_continue(curl: Curl, tmp_path: Path, size: int) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({**BODY, "ignored": "x" * size}))
    ended = curl(CHAT, "-v", "-H", "Expect: 100-continue", *JSON, f"@{body}")
    assert ended.returncode == 0
    assert "< HTTP/1.1 100 Continue" in ended.stderr
    assert json.loads(ended.stdout)["choices"]


def test_a_large_body_of_a_stranger_is_refused_before_it_is_sent(curl: Curl, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({**BODY, "ignored": "x" * 2_000_000}))
    ended = curl(CHAT, "-v", "-H", "Expect: 100-continue", "-H", "x-api-key: another", *JSON, f"@{body}")
    assert "< HTTP/1.1 401" in ended.stderr
    assert "100 Continue" not in ended.stderr


def test_http_1_0_gets_an_answer_that_ends_by_close(curl: Curl) -> None:
    ended = curl(CHAT, "-0", "-i", *JSON, json.dumps({**BODY, "stream": True}))
    assert ended.returncode == 0, ended.stderr
    head, _, body = ended.stdout.partition("\n\n")
    assert "transfer-encoding" not in head.lower()
    assert body.endswith("data: [DONE]\n\n")


def test_chunked_upload(curl: Curl) -> None:
    ended = curl(CHAT, "-H", "Transfer-Encoding: chunked", *JSON, json.dumps(BODY))
    assert json.loads(ended.stdout)["choices"]


def test_two_requests_on_one_connection(curl: Curl, live_gateway: LiveGateway) -> None:
    ended = curl("/v1/models", live_gateway.url + "/health", "-v")
    assert ended.returncode == 0, ended.stderr
    assert "Re-using existing connection" in ended.stderr
    assert '{"status":"ok"}' in ended.stdout


def test_curl_does_not_trust_another_authority(curl: Curl, tmp_path: Path) -> None:
    from llmgw.demo.certificate import ensure_certificate

    assert curl("/health", ca=ensure_certificate(tmp_path).authority).returncode == 60


def test_old_tls_is_refused(curl: Curl) -> None:
    assert curl("/health", "--tls-max", "1.1").returncode == 35


def test_sound_goes_to_a_server_that_says_it_has_no_ears(curl: Curl, tmp_path: Path) -> None:
    sound = tmp_path / "a.wav"
    sound.write_bytes(b"RIFF" + bytes(40))
    ended = curl("/v1/audio/transcriptions", "-i", "-F", f"file=@{sound}", "-F", "model=tiny")
    head, _, body = ended.stdout.partition("\n\n")
    assert "x-llmgw-backend: " in head
    assert json.loads(body)["error"]


def test_curl_interrupted_frees_its_place(curl: Curl, live_gateway: LiveGateway) -> None:
    endless: dict[str, Any] = {**SLOW}
    del endless["max_tokens"]
    assert curl("/v1/completions", "-N", "-m", "0.5", *JSON, json.dumps(endless)).returncode == 28
    assert wait_until(live_gateway.is_idle, 1)
