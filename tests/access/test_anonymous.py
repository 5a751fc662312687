"""Callers without a key."""

from __future__ import annotations

import pytest
from twisted.cred.credentials import Anonymous
from twisted.cred.error import UnauthorizedLogin
from twisted.internet.defer import Deferred
from twisted.plugins.cred_anonymous import theAnonymousCheckerFactory

from llmgw.access.anonymous import ANONYMOUS_CALLER, caller
from llmgw.values import Caller


def test_the_checker_that_twisted_brings_leads_to_the_anonymous_caller() -> None:
    found: list[object] = []
    avatar_id = theAnonymousCheckerFactory.generateChecker("").requestAvatarId(Anonymous())
    assert isinstance(avatar_id, Deferred)
    avatar_id.addCallback(found.append)
    assert caller(found[0]) is ANONYMOUS_CALLER  # type: ignore[arg-type]


def test_an_anonymous_caller_has_no_limits_of_its_own_and_no_privileges() -> None:
    assert Caller(id="anonymous") == ANONYMOUS_CALLER


@pytest.mark.parametrize("somebody", [b"k7m2p9xa", b"", None])
def test_nobody_else_becomes_anonymous(somebody: bytes) -> None:
    with pytest.raises(UnauthorizedLogin):
        caller(somebody)
