"""Callers in threads: each takes a conversation, asks its turns one after the other, and takes the next.

Times are the caller's: from the sending of a request to the first event that holds
content, and to the end of the answer.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from llmgw.bench.load import Conversation

TIMEOUT_S = 120.0


class Sample(Struct, frozen=True):
    """One request.

    :param ttft_s: ``None`` if no content came.
    :param error: why it failed, ``""`` if it was answered.
    """

    ttft_s: float | None
    e2e_s: float
    error: str = ""


class Target(Struct, frozen=True):
    """Whom to ask.

    :param url: base URL, with or without ``/v1``.
    :param key: API key, ``""`` for none.
    :param insecure: do not verify the certificate.
    :param ca_file: authorities for it, in place of the system's.
    """

    url: str
    model: str
    key: str = ""
    insecure: bool = False
    ca_file: str | None = None

    def connect(self) -> tuple[http.client.HTTPConnection, str]:
        """:return: a new connection and the path's beginning."""
        parts = urlsplit(self.url)
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        host = parts.hostname or ""
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.insecure:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            return http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT_S, context=context), prefix
        return http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S), prefix

    @property
    def headers(self) -> dict[str, str]:
        """What each request carries."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        return headers


def first_model(target: Target) -> str:
    """The first model that the server names.

    :raise OSError: it does not answer, or names none; the message begins with its URL.
    """
    connection, prefix = target.connect()
    try:
        connection.request("GET", f"{prefix}/v1/models", headers=target.headers)
        answer = connection.getresponse()
        body = answer.read()
    except ssl.SSLCertVerificationError as fault:
        raise OSError(
            f"{target.url}: certificate not trusted: {fault.verify_message}; --ca-file FILE, or --insecure"
        ) from None
    except (OSError, http.client.HTTPException) as fault:
        why = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
        raise OSError(f"{target.url} does not answer: {why}") from None
    finally:
        connection.close()
    if answer.status in (401, 403):
        raise OSError(f"{target.url} wants a key: status {answer.status}; --key-file FILE")
    try:
        name = json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        name = None
    if answer.status != 200 or not isinstance(name, str):
        raise OSError(f"{target.url} names no model (status {answer.status})")
    return name


def ask(target: Target, messages: Sequence[dict[str, str]], tokens: int) -> tuple[Sample, str]:
    """One streamed request. :return: its times and the answer's text."""
    body = json.dumps({"model": target.model, "stream": True, "max_tokens": tokens, "messages": messages})
    begun_s = time.monotonic()
    first_s: float | None = None
    text: list[str] = []
    error = ""
    connection, prefix = target.connect()
    try:
        connection.request("POST", f"{prefix}/v1/chat/completions", body, target.headers)
        answer = connection.getresponse()
        if answer.status == 200:
            for piece in _contents(answer):
                if first_s is None:
                    first_s = time.monotonic() - begun_s
                text.append(piece)
            if first_s is None:
                error = "no content"
        else:
            answer.read()
            error = f"status {answer.status}"
    except (OSError, http.client.HTTPException, ValueError) as fault:
        error = type(fault).__name__
    finally:
        connection.close()
    return Sample(first_s, time.monotonic() - begun_s, error), "".join(text)


def run(
    target: Target, load: Sequence[Conversation], streams: int, progress: Callable[[], object]
) -> list[Sample]:
    """The whole load through ``streams`` callers at once.

    :param progress: called after each request, from any thread.
    """
    waiting = deque(load)
    samples: list[Sample] = []

    def call() -> None:
        while True:
            try:
                conversation = waiting.popleft()
            except IndexError:
                return
            messages: list[dict[str, str]] = []
            for turn in conversation:
                messages.append({"role": "user", "content": turn.words})
                sample, text = ask(target, messages, turn.tokens)
                messages.append({"role": "assistant", "content": text})
                samples.append(sample)
                progress()

    threads = [threading.Thread(target=call, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return samples


def _contents(lines: Iterable[bytes]) -> Iterable[str]:
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        event: Any = json.loads(line[6:])
        if "error" in event:
            raise ValueError("error event")
        for choice in event.get("choices") or ():
            content = choice.get("delta", {}).get("content")
            if content:
                yield content
