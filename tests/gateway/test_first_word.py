"""Requests for models that nobody has told of yet."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
from harness import Gateway, Scripted, backend_table, chat_body, eventually, post
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from llmgw.errors import ModelNotFound, NoBackend
from llmgw.gateway.first_word import WAIT_S, FirstWord


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.word = FirstWord(self.clock, Random(1))
        self.known = False
        self.outcome: list[Any] = []

    def ask(self) -> Deferred[Any]:
        asking = Deferred.fromCoroutine(self.word.tried_again(self.attempt))
        return asking.addCallbacks(self.outcome.append, lambda failure: self.outcome.append(failure.value))

    def attempt(self) -> str:
        if not self.known:
            raise ModelNotFound("no such model")
        return "good"


def test_it_waits_for_the_word_and_tries_again() -> None:
    scene = Scene()
    scene.ask()
    scene.clock.advance(1)
    assert not scene.outcome
    scene.known = True
    scene.word.said()
    assert scene.outcome == ["good"]
    assert not scene.clock.getDelayedCalls()


def test_what_nobody_has_is_told_when_all_have_told() -> None:
    scene = Scene()
    scene.ask()
    scene.word.said()
    scene.ask()
    assert [type(each) for each in scene.outcome] == [ModelNotFound, ModelNotFound]


def test_it_waits_no_longer_than_a_moment_after_the_start_and_then_says_come_back() -> None:
    scene = Scene()
    scene.ask()
    scene.clock.advance(WAIT_S)
    [error] = scene.outcome
    assert type(error) is NoBackend
    assert error.retry_after_s > 0
    scene.ask()  # now without a wait
    assert type(scene.outcome[1]) is NoBackend
    scene.known = True
    scene.ask()
    assert scene.outcome[2] == "good"


def test_one_that_leaves_is_forgotten() -> None:
    scene = Scene()
    asking = scene.ask()
    asking.cancel()
    assert len(scene.outcome) == 1
    scene.word.said()
    assert not scene.clock.getDelayedCalls()


@pytest.mark.parametrize("comes", [True, False])
def test_a_gateway_whose_source_is_late(tmp_path: Path, comes: bool) -> None:
    known, late = Scripted(), Scripted()
    config = """[log]\naccess = "access.log"\n[[discovery]]\nplugin = "static"\nfile = "found.toml"\n"""
    gateway = Gateway(tmp_path, config + "interval_s = 0.1\n" + backend_table(known, "k"))
    answers: list[Any] = []

    def ask() -> None:
        answers.append(gateway.ask(post(body=chat_body("late"))))

    try:
        assert gateway.ask(post()).status == 200  # what is known waits for nobody
        asking = threading.Thread(target=ask)
        asking.start()
        if comes:
            (tmp_path / "found.toml").write_text(backend_table(late, "l", 'models = ["late"]'))
        asking.join(15)
        [answer] = answers
        if comes:
            assert answer.status == 200
            assert gateway.ask(post(body=chat_body("other"))).status == 404
        else:
            assert answer.status == 503
            assert answer.json["error"]["code"] == "no_backend"
            assert int(answer.get("retry-after") or 0) > 0
            (tmp_path / "found.toml").write_text("backends = []")
            eventually(lambda: gateway.ask(post(body=chat_body("late"))).status == 404)
    finally:
        gateway.stop()
        known.close()
        late.close()
    assert "Traceback" not in gateway.log
