"""The contract of credentials checkers (``twisted.cred``), as tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.cred.checkers import ICredentialsChecker
from twisted.cred.error import UnauthorizedLogin
from twisted.cred.strcred import ICheckerFactory, InvalidAuthArgumentString
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.python.failure import Failure
from zope.interface.verify import verifyObject

from llmgw.errors import ConfigError
from llmgw.testing.shared import contract


class CredentialsContract:
    """What every checker must keep.

    :cvar factory: the ``ICheckerFactory``.
    :cvar argument: what stands after the first colon of the ``auth`` entry.
    :cvar good: credentials that are right.
    :cvar bad: credentials that are wrong.
    """

    factory: Any
    argument = ""
    wrong_argument: str | None = None
    good: Sequence[Any] = ()
    bad: Sequence[Any] = ()

    def test_the_factory_keeps_its_interface(self) -> None:
        """As ``twisted.cred.strcred`` wants it."""
        verifyObject(ICheckerFactory, self.factory)
        assert self.factory.authType, "no authType"
        assert ":" not in self.factory.authType, "authType holds a colon"

    def test_it_checks_what_it_says_it_checks(self) -> None:
        """Factory and checker name the same credential interfaces."""
        checker = self._checker()
        verifyObject(ICredentialsChecker, checker)
        for interface in self.factory.credentialInterfaces:
            assert interface in checker.credentialInterfaces, f"the checker does not take {interface}"

    def test_a_wrong_argument_is_told(self) -> None:
        """Only where ``wrong_argument`` is given."""
        if self.wrong_argument is None:
            return
        try:
            self.factory.generateChecker(self.wrong_argument)
        except (InvalidAuthArgumentString, ConfigError):
            return
        raise AssertionError(f"{self.wrong_argument!r} was accepted")

    def test_right_credentials_have_an_avatar_id(self) -> None:
        """And the same one each time."""
        for credentials in self.good:
            checker = self._checker()
            first, second = (self._ask(checker, credentials) for _ in range(2))
            assert not isinstance(first, Failure), f"{credentials!r} was refused: {first}"
            assert first == second, "the same credentials gave two avatar ids"

    def test_wrong_credentials_are_unauthorized(self) -> None:
        """``UnauthorizedLogin``, and nothing else."""
        for credentials in self.bad:
            answer = self._ask(self._checker(), credentials)
            assert isinstance(answer, Failure), f"{credentials!r} was accepted"
            assert answer.check(UnauthorizedLogin), f"{credentials!r} failed with {answer.value!r}"

    def _checker(self) -> Any:
        return self.factory.generateChecker(self.argument)

    def _ask(self, checker: Any, credentials: Any) -> Any:
        answer: Deferred[Any] = maybeDeferred(checker.requestAvatarId, credentials)
        results: list[Any] = []
        answer.addBoth(results.append)
        assert results, "no answer at once"
        return results[0]


def credentials_contract(
    factory: Any,
    argument: str = "",
    *,
    good: Sequence[Any] = (),
    bad: Sequence[Any] = (),
    wrong_argument: str | None = None,
) -> type[CredentialsContract]:
    """Tests for a credentials checker's factory."""
    return contract(
        CredentialsContract,
        f"Test{factory.authType.title()}CredentialsContract",
        factory=factory,
        argument=argument,
        wrong_argument=wrong_argument,
        good=good,
        bad=bad,
    )
