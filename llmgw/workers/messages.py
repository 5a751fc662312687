"""What a parent and its workers tell each other: one JSON object a line, in both directions.

The line is a connected pair of UNIX sockets. Its end is a message too: a worker
whose parent is gone finishes what it has and ends. Numbers of descriptors are those
of the worker, which inherits them.

A message has its name under ``is``. Unknown fields are ignored, since after an
upgrade a parent may be newer than a worker that still finishes its streams.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class File(Struct, frozen=True, array_like=True):
    """A file as the parent read it. ``None``: it was only looked at."""

    mode: int
    content: bytes | None = None


class Setup(Struct, frozen=True):
    """All that a configuration is made of: the command line, and files as they were read.

    A worker that starts anew gets what was verified, whatever the files hold by now.

    :param path: of the configuration file, as it was given; ``None`` for none.
    :param working_dir: what relative paths of the command line count from.
    :param files: by absolute path.
    """

    path: str | None
    listen: list[str]
    admin: list[str]
    backends: list[str]
    auth: list[str]
    workers: int | None
    working_dir: str
    files: dict[str, File] = {}


class Begin(Struct, frozen=True, tag_field="is", tag="begin"):
    """The first message: serve.

    :param number: of the worker's place, from 1.
    :param sockets: name of the endpoint and descriptor, in the order of the parent's.
    :param store: URL of the store that the parent runs for all; empty for the configured one.
    :param drained: backends that the operator has drained.
    """

    number: int
    setup: Setup
    sockets: list[tuple[str, int]]
    store: str = ""
    drained: list[str] = []


class Reload(Struct, frozen=True, tag_field="is", tag="reload"):
    """Take over another configuration. Answered with what needs a restart."""

    id: int
    setup: Setup


class Call(Struct, frozen=True, tag_field="is", tag="call"):
    """Ask the worker's :class:`~llmgw.operations.Operations`; answered with what it returns.

    :param what: a method's name, one of :data:`CALLS`.
    """

    id: int
    what: str
    arguments: list[Any] = []


class Drain(Struct, frozen=True, tag_field="is", tag="drain"):
    """Finish and end. Said twice, it changes nothing.

    :param interrupted: as SIGINT rather than as SIGTERM.
    :param relieved: another worker accepts on the same sockets: stop at once.
    """

    interrupted: bool = False
    relieved: bool = False


class Hurry(Struct, frozen=True, tag_field="is", tag="hurry"):
    """Skip the waiting of a drain."""


class Status(Struct, frozen=True, tag_field="is", tag="status"):
    """From the worker, once a second, when it becomes ready or is not any more, and before its figures.

    :param why: it is not ready.
    """

    ready: bool
    why: str
    draining: bool
    in_flight: int
    connections: int


class Answer(Struct, frozen=True, tag_field="is", tag="answer"):
    """From the worker, to a :class:`Call` or :class:`Reload`.

    :param value: what it returned.
    :param error: or what it raised: ``[kind, fields]`` (see :mod:`llmgw.workers.faults`).
    """

    id: int
    value: Any = None
    error: list[Any] | None = None


class Failed(Struct, frozen=True, tag_field="is", tag="failed"):
    """From the worker: it cannot start, and ends now."""

    why: str


class Farewell(Struct, frozen=True, tag_field="is", tag="farewell"):
    """From the worker, as its last: all is closed, and this is what it has counted."""

    metrics: str


ToWorker = Begin | Reload | Call | Drain | Hurry
ToParent = Status | Answer | Failed | Farewell

encode = msgspec.json.Encoder(enc_hook=str).encode
read_as_worker = msgspec.json.Decoder(ToWorker).decode
read_as_parent = msgspec.json.Decoder(ToParent).decode

CALLS = frozenset({"state", "metrics_text", "exemplars", "explain", "drain_backend", "load_model", "news"})
"""What may be asked of a worker by :class:`Call`."""

ALIVE_EVERY_S = 1.0
"""How often a worker tells its status."""
