"""What a parent and a worker tell each other, without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from twisted.internet.testing import StringTransport

from llmgw.errors import ConfigError, ConfigFault, GatewayError, ModelNotFound, PluginError
from llmgw.workers.faults import as_error, as_values
from llmgw.workers.link import Link, LinkLost
from llmgw.workers.messages import (
    Answer,
    Begin,
    Call,
    Drain,
    Hurry,
    Reload,
    Setup,
    Status,
    encode,
    read_as_parent,
    read_as_worker,
)
from llmgw.workers.setup import Recorder, as_worker, config_of


def setup_of(path: Path | None, **more: Any) -> Setup:
    given = {"listen": [], "admin": [], "backends": [], "auth": [], "workers": None, **more}
    return Setup(path=None if path is None else str(path), working_dir="/", **given)


def test_messages_come_through_whole() -> None:
    setup = setup_of(None, backends=["http://127.0.0.1:1"])
    for message in (
        Begin(1, setup, [("tcp:0", 4)]),
        Drain(relieved=True),
        Hurry(),
        Call(1, "state"),
        Reload(2, setup),
    ):
        assert read_as_worker(encode(message)) == message
    status = Status(True, "", False, 1, 2)
    assert read_as_parent(encode(status)) == status


def test_what_a_newer_side_adds_is_ignored() -> None:
    assert read_as_worker(b'{"is":"hurry","more":1}') == Hurry()


@pytest.mark.parametrize(
    "error",
    [
        ModelNotFound("no such model", param="model"),
        GatewayError("wait", status=503, code="overloaded", retry_after_s=2.0),
        ConfigError([ConfigFault("a.b", "wrong"), ConfigFault("c", "too")], "/etc/x"),
        PluginError("no such plugin"),
    ],
)
def test_errors_come_through_as_what_they_are(error: Exception) -> None:
    back = as_error(as_values(error))
    assert str(back) == str(error)
    for name in ("status", "code", "type", "param", "retry_after_s", "source"):
        assert getattr(back, name, None) == getattr(error, name, None), name


def test_an_unforeseen_error_is_its_words() -> None:
    back = as_error(as_values(KeyError("x")))
    assert isinstance(back, GatewayError)
    assert "KeyError: 'x'" in back.message


def test_answers_find_their_question_and_the_end_of_the_line_answers_the_rest() -> None:
    heard: list[Any] = []
    lost: list[None] = []
    link = Link(read_as_parent, heard.append, lambda: lost.append(None))
    transport = StringTransport()
    link.makeConnection(transport)
    first, second, third = (link.call("state") for _ in range(3))
    ids = [read_as_worker(line).id for line in transport.value().splitlines()]
    link.dataReceived(
        encode(Answer(ids[1], "two")) + b"\nnot json\n" + encode(Answer(99, "nobody's")) + b"\n"
    )
    link.dataReceived(encode(Answer(ids[0], error=as_values(ModelNotFound("no")))) + b"\n")
    assert second.result == "two"
    first.addErrback(lambda failure: failure.value.status)
    assert first.result == 404
    link.dataReceived(encode(Status(True, "", False, 0, 0)) + b"\n")
    assert heard == [Status(True, "", False, 0, 0)]
    link.connectionLost()
    for late in (third, link.call("state")):
        assert isinstance(late.result.value, LinkLost)
        late.addErrback(lambda _: None)
    assert lost == [None]


def test_a_setup_is_its_files_as_they_were(tmp_path: Path) -> None:
    key = tmp_path / "backend.key"
    key.write_text("the-secret\n")
    key.chmod(0o600)
    path = tmp_path / "gw.toml"
    path.write_text('[[backends]]\nid = "b"\nurl = "http://127.0.0.1:1"\napi_key_file = "backend.key"\n')
    recorder = Recorder()
    config = config_of(setup_of(path), recorder)
    sent = read_as_worker(encode(Reload(1, setup_of(path, files=recorder.files)))).setup
    path.write_text("half a fi")
    key.unlink()
    assert config_of(sent) == config
    assert config.backends[0].api_key.reveal() == "the-secret"  # type: ignore[union-attr]
    with pytest.raises(ConfigError):
        config_of(setup_of(path))


def test_a_worker_counts_with_the_others_and_has_no_admin_listener() -> None:
    setup = setup_of(None, backends=["http://127.0.0.1:1"], admin=["tcp:0:interface=127.0.0.1"], workers=4)
    worker = as_worker(config_of(setup), "unix:///the/store")
    assert (worker.workers, worker.admin) == (1, ())
    assert (worker.rate_limiter.plugin, worker.store.url) == ("redis", "unix:///the/store")


def test_a_store_of_the_operators_wins(tmp_path: Path) -> None:
    path = tmp_path / "gw.toml"
    path.write_text('[store]\nurl = "redis://127.0.0.1:1/0"\n')
    assert as_worker(config_of(setup_of(path)), "unix:///ours").store.url == "redis://127.0.0.1:1/0"
    path.write_text('[rate_limiter]\nplugin = "redis"\nurl = "redis://127.0.0.1:1/0"\n')
    assert not as_worker(config_of(setup_of(path)), "unix:///ours").store
