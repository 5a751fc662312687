"""The contract tests that authors get, run on every plugin installed here,
and tried on plugins that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from twisted.cred.checkers import InMemoryUsernamePasswordDatabaseDontUse
from twisted.cred.credentials import UsernamePassword
from twisted.cred.strcred import ICheckerFactory
from twisted.internet.defer import Deferred, TimeoutError, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from zope.interface import implementer

from llmgw import plugins, testing
from llmgw.errors import ConfigError, ConfigFault, ModelLoading
from llmgw.interfaces import (
    CONTRACT,
    IDiscovery,
    IDiscoveryFactory,
    IHealthSource,
    IHealthSourceFactory,
    IModelLoader,
    IModelLoaderFactory,
    IOrderingRouter,
    IRateLimiter,
    IRateLimiterFactory,
    IRouter,
    IRouterFactory,
)
from llmgw.values import Choice, Decision, HealthReport

CONTRACTS: dict[str, Callable[..., type]] = {
    "router": testing.router_contract,
    "health": testing.health_source_contract,
    "filter": testing.request_filter_contract,
    "rate-limiter": testing.rate_limiter_contract,
    "discovery": testing.discovery_contract,
    "model-loader": testing.model_loader_contract,
}

OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("model-loader", "command"): {"command": ["true"], "models": {"m": "m.gguf"}},
    ("filter", "deny-pattern"): {"words": ["forbidden"], "patterns": [r"\bdeep\b", r"(a\s)+x"]},
}
"""Options for plugins that cannot do without any."""

ELSEWHERE: set[tuple[str, str]] = {
    ("rate-limiter", "redis"),
    ("health", "prometheus"),
    ("discovery", "static"),
    ("discovery", "etcd"),
    ("discovery", "dns"),
    ("discovery", "kubernetes"),
}
"""Need a server, or answers of their own, and run the same contract in a test of their own."""

for _kind, _contract in CONTRACTS.items():
    for _name, _factory in plugins.installed(_kind).items():
        if (_kind, _name) not in ELSEWHERE:
            _tests = _contract(_factory, OPTIONS.get((_kind, _name)))
            globals()[f"Test_{_kind}_{_name}"] = _tests
            del _tests


def test_every_kind_has_a_contract() -> None:
    assert {*CONTRACTS, plugins.CREDENTIALS} == set(plugins.KINDS)


# --- the contracts notice what is wrong ---------------------------------------


class _Factory:
    contract = CONTRACT
    description = "one line"
    name = "sample"

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def _checked(self, options: Any, known: tuple[str, ...] = ()) -> Any:
        strange = [key for key in options if key not in known]
        if strange:
            raise ConfigError([ConfigFault(key, "unknown option") for key in strange])
        return options


@implementer(IRouterFactory)
class RouterFactory(_Factory):
    def build(self, options: Any) -> Any:
        self._checked(options)
        return self._make()


@implementer(IHealthSourceFactory)
class HealthFactory(_Factory):
    def build(self, options: Any, reactor: Any) -> Any:
        self._checked(options)
        return self._make(reactor)


@implementer(IRateLimiterFactory)
class LimiterFactory(_Factory):
    def build(self, options: Any, reactor: Any) -> Any:
        self._checked(options)
        return self._make(reactor)


@implementer(IDiscoveryFactory)
class DiscoveryFactory(_Factory):
    def build(self, options: Any, reactor: Any) -> Any:
        self._checked(options)
        return self._make(reactor)


@implementer(IModelLoaderFactory)
class LoaderFactory(_Factory):
    def build(self, options: Any, target: Any, reactor: Any) -> Any:
        self._checked(options)
        return self._make(target, reactor)


def run(tests: type) -> dict[str, str]:
    """Run a contract as pytest would.

    :return: test name to message, of those that fail.
    """
    failed = {}
    for name in dir(tests):
        if name.startswith("test_"):
            try:
                getattr(tests(), name)()
            except Exception as error:
                failed[name] = str(error)
    return failed


@implementer(IRouter)
class LeastBusy:
    def choose(self, request: Any, candidates: Any, now_s: float) -> Any:
        return Choice(min(candidates, key=lambda b: (b.profile.in_flight, b.id)), why="least busy")

    def observe(self, event: Any) -> None:
        pass


@implementer(IOrderingRouter)
class Ordering(LeastBusy):
    def order(self, waiting: Any, backend: Any, now_s: float) -> int:
        return 0


class Stranger(LeastBusy):
    def choose(self, request: Any, candidates: Any, now_s: float) -> Any:
        return testing.candidate("b0")


class Hoarder(LeastBusy):
    """Returns an object it kept from an earlier call."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def choose(self, request: Any, candidates: Any, now_s: float) -> Any:
        return self.kept.setdefault(candidates[0].id, candidates[0])


class Sorter(LeastBusy):
    def choose(self, request: Any, candidates: Any, now_s: float) -> Any:
        candidates.sort(key=lambda b: b.id)
        return candidates[0]


class Writer(LeastBusy):
    def choose(self, request: Any, candidates: Any, now_s: float) -> Any:
        candidates[0].profile.in_flight += 1
        return candidates[0]


class Dicer(LeastBusy):
    """Dice from elsewhere than the seed."""

    rolls = 0

    def choose(self, request: Any, candidates: Any, now_s: float) -> Any:
        Dicer.rolls += 1
        return candidates[Dicer.rolls % 7 % len(candidates)]


class Trusting(LeastBusy):
    def __init__(self) -> None:
        self.running = {f"b{n}": 0 for n in range(20)}

    def observe(self, event: Any) -> None:
        self.running[event.backend_id] += 1


class Divider(LeastBusy):
    def choose(self, request: Any, candidates: Any, now_s: float) -> Any:
        return min(candidates, key=lambda b: 1 / (b.profile.token_rate or 0))


class BadOrder(Ordering):
    def order(self, waiting: Any, backend: Any, now_s: float) -> int:
        return len(waiting)


class Refuser(LeastBusy):
    def choose(self, request: Any, candidates: Any, now_s: float) -> Any:
        return None


@pytest.mark.parametrize("router", [LeastBusy, Ordering, Refuser])
def test_a_good_router_passes(router: type) -> None:
    assert run(testing.router_contract(RouterFactory(router))) == {}


@pytest.mark.parametrize(
    ("router", "test"),
    [
        (Stranger, "test_it_picks_only_candidates"),
        (Hoarder, "test_candidates_may_change_from_call_to_call"),
        (Sorter, "test_the_candidates_are_left_alone"),
        (Writer, "test_the_candidates_are_left_alone"),
        (Dicer, "test_the_same_seed_gives_the_same_choices"),
        (Trusting, "test_events_may_come_in_any_order"),
        (Divider, "test_one_candidate_is_enough"),
        (BadOrder, "test_an_ordering_router_picks_one_that_waits"),
    ],
)
def test_a_bad_router_is_noticed(router: type, test: str) -> None:
    assert test in run(testing.router_contract(RouterFactory(router)))


def test_a_bad_factory_is_noticed() -> None:
    class Careless(RouterFactory):
        contract = 0
        shared = LeastBusy()

        def build(self, options: Any) -> Any:
            return self.shared

    failed = run(testing.router_contract(Careless(LeastBusy)))
    assert {
        "test_the_factory_keeps_its_interface",
        "test_building_twice_gives_two",
        "test_an_unknown_option_is_refused_by_name",
    } <= set(failed)


@implementer(IHealthSource)
class Poller:
    interval_s = 5.0
    cancels = True

    def __init__(self, reactor: Any) -> None:
        self.reactor = reactor
        self.call: Any = None
        self.asking: Any = None
        self.stopped = False

    def start(self, target: Any, report: Any) -> None:
        self.target, self.report = target, report
        self.look()

    def look(self) -> None:
        self.call = None
        self.asking = self.target.get("/health", 2.0)
        self.asking.addCallbacks(self.answered, self.failed)
        self.asking.addErrback(lambda failure: None)

    def answered(self, answer: tuple[int, bytes]) -> None:
        self.tell(HealthReport(alive=True, slots=4))

    def failed(self, failure: Any) -> None:
        if failure.check(TimeoutError):
            self.tell(HealthReport(alive=False, detail="silent"))
        elif not self.stopped:
            self.tell(HealthReport(alive=False, refused=bool(failure.check(ConnectionRefusedError))))

    def tell(self, report: HealthReport) -> None:
        self.asking = None
        self.report(report)
        if not self.stopped:
            self.call = self.reactor.callLater(self.interval_s, self.look)

    def stop(self) -> None:
        self.stopped = True
        if self.call is not None:
            self.call.cancel()
        if self.asking is not None and self.cancels:
            self.asking.cancel()


class Hasty(Poller):
    interval_s = 0.5


class Leaky(Poller):
    cancels = False


class Optimist(Poller):
    def failed(self, failure: Any) -> None:
        self.tell(HealthReport(alive=True))


class Fragile(Poller):
    def failed(self, failure: Any) -> None:
        failure.trap(ConnectionRefusedError)
        self.tell(HealthReport(alive=False, refused=True))


class Wild(Poller):
    def answered(self, answer: tuple[int, bytes]) -> None:
        self.tell(HealthReport(alive=True, kv_use=50.0))


class Mute(Poller):
    def start(self, target: Any, report: Any) -> None:
        pass


def test_a_good_health_source_passes() -> None:
    assert run(testing.health_source_contract(HealthFactory(Poller))) == {}


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (Hasty, "test_it_never_looks_more_often_than_every_two_seconds"),
        (Leaky, "test_stop_leaves_nothing"),
        (Optimist, "test_refusal_is_death"),
        (Fragile, "test_it_survives_any_answer"),
        (Wild, "test_reports_are_lawful"),
        (Mute, "test_it_reports_soon_and_again"),
    ],
)
def test_a_bad_health_source_is_noticed(source: type, test: str) -> None:
    assert test in run(testing.health_source_contract(HealthFactory(source)))


@implementer(IRateLimiter)
class Lax:
    """Lets everything pass."""

    def __init__(self, reactor: Any) -> None:
        pass

    def admit(self, subject: Any, policies: Any, cost: Any) -> Any:
        return succeed(Decision(True, object()))

    def settle(self, reservation: Any, used: Any) -> None:
        pass


class Curt(Lax):
    """Refuses without a word."""

    def admit(self, subject: Any, policies: Any, cost: Any) -> Any:
        return Decision(not policies, None if policies else object())


class Slow(Lax):
    def admit(self, subject: Any, policies: Any, cost: Any) -> Any:
        return Deferred()


class Odd(Lax):
    """Has figures that are none, and never ends."""

    def gauges(self) -> Any:
        return {"llmgw_odd": ("Odd.", "much")}

    def stop(self) -> Any:
        return Deferred()


def test_bad_rate_limiters_are_noticed() -> None:
    failed = run(testing.rate_limiter_contract(LimiterFactory(Odd)))
    assert failed["test_figures_for_a_scrape_are_figures"] == "llmgw_odd is 'much'"
    assert failed["test_it_ends"] == "stop did not end within 2 s"
    failed = run(testing.rate_limiter_contract(LimiterFactory(Lax)))
    assert "test_all_policies_are_charged_or_none" in failed
    assert "test_settling_gives_one_place_back" in failed
    failed = run(testing.rate_limiter_contract(LimiterFactory(Curt)))
    assert "refused with retry_after_s 0" in failed["test_waiting_as_told_helps"]
    failed = run(testing.rate_limiter_contract(LimiterFactory(Slow)))
    assert failed["test_without_policies_everything_passes"] == "no decision within 100 ms"


@implementer(IDiscovery)
class Noticeboard:
    """Tells what stands on a board that the test writes."""

    board: tuple[Any, ...] = ()
    forgets = True

    def __init__(self, reactor: Any) -> None:
        self.reactor = reactor

    def start(self, update: Any) -> None:
        self.update = update
        self.look()

    def look(self) -> None:
        self.update(list(Noticeboard.board))
        self.call = self.reactor.callLater(1.0, self.look)

    def stop(self) -> Any:
        if self.forgets:
            self.call.cancel()
        return succeed(None)


class Restless(Noticeboard):
    forgets = False


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("abc", "which is no sequence"),
        ({"id": "a"}, "which is no sequence"),
        (["a"], "which is no table"),
        ([{"id": 1, "url": "http://a"}], "'id' of {'id': 1, 'url': 'http://a'} is no text"),
        ([{"key": "k", "fault": 4}], "'fault' of"),
    ],
)
def test_a_discovery_that_tells_nonsense_is_noticed(told: Any, words: str) -> None:
    class Garbled(Noticeboard):
        def look(self) -> None:
            self.call = self.reactor.callLater(1.0, lambda: None)
            self.update(told)

    failed = run(testing.discovery_contract(DiscoveryFactory(Garbled)))
    assert words in failed["test_nothing_comes_after_stop"]


def test_a_discovery_that_shows_nonsense_is_noticed() -> None:
    class Shown(Noticeboard):
        contact_s = "now"

    failed = run(testing.discovery_contract(DiscoveryFactory(Shown)))
    assert failed == {"test_nothing_comes_after_stop": "contact_s is 'now'"}


def test_discoveries_are_tried_with_the_authors_hook() -> None:
    def know(self: Any, clock: Any, entries: Any) -> None:
        Noticeboard.board = tuple(entries)

    good = testing.discovery_contract(DiscoveryFactory(Noticeboard))
    assert run(good) == {}
    assert run(type("WithHook", (good,), {"know": know})) == {}
    bad = testing.discovery_contract(DiscoveryFactory(Restless))
    assert set(run(type("WithHook", (bad,), {"know": know}))) == {
        "test_it_tells_the_whole_set_at_each_change",
        "test_nothing_comes_after_stop",
    }


@implementer(IModelLoader)
class Shelf:
    strict = True

    def __init__(self, target: Any, reactor: Any) -> None:
        self.reactor = reactor
        self.states = {"m": "unloaded"}

    def models(self) -> Any:
        return succeed(self.states)

    def load(self, model: str) -> Any:
        if self.strict and model not in self.states:
            raise_later: Deferred[None] = Deferred()
            raise_later.errback(ModelLoading(f"no model {model}"))
            return raise_later
        result: Deferred[None] = Deferred(lambda _: call.cancel())
        call = self.reactor.callLater(3.0, result.callback, None)
        return result

    def unload(self, model: str) -> Any:
        return succeed(None)


class Wishful(Shelf):
    strict = False

    def models(self) -> Any:
        return succeed({"m": "nearly there"})


def test_model_loaders_are_tried_with_a_model() -> None:
    assert run(testing.model_loader_contract(LoaderFactory(Shelf), model="m")) == {}
    failed = run(testing.model_loader_contract(LoaderFactory(Wishful), model="m"))
    assert set(failed) == {"test_models_have_known_states", "test_a_load_that_cannot_be_fails_clearly"}
    assert run(testing.model_loader_contract(LoaderFactory(Wishful))) == {}


def test_credentials_checkers_are_tried_with_credentials() -> None:
    memory = plugins.find("credentials", "memory")
    good, bad = UsernamePassword("anna", "secret"), UsernamePassword("anna", "wrong")
    tests = testing.credentials_contract(
        memory, "anna:secret", good=[good], bad=[bad], wrong_argument="no-colon"
    )
    assert run(tests) == {}

    @implementer(ICheckerFactory)
    class Careless:
        authType = "care:less"
        authHelp = argStringFormat = ""
        credentialInterfaces = InMemoryUsernamePasswordDatabaseDontUse.credentialInterfaces

        def generateChecker(self, argument: str) -> Any:
            checker = InMemoryUsernamePasswordDatabaseDontUse()
            checker.addUser("anna", "wrong")
            return checker

    failed = run(testing.credentials_contract(Careless(), "", good=[good], bad=[bad], wrong_argument="x"))
    assert set(failed) == {
        "test_the_factory_keeps_its_interface",
        "test_a_wrong_argument_is_told",
        "test_right_credentials_have_an_avatar_id",
        "test_wrong_credentials_are_unauthorized",
    }


# --- fakes --------------------------------------------------------------------


def test_a_candidate_takes_fields_of_its_profile() -> None:
    backend = testing.candidate("gpu-0", weight=4.0, in_flight=2, ttft_s=0.3)
    assert (backend.id, backend.weight, backend.profile.in_flight, backend.profile.ttft_s) == (
        "gpu-0",
        4.0,
        2,
        0.3,
    )
    with pytest.raises(TypeError):
        testing.candidate(no_such_field=1)


def test_the_fake_target_answers_in_a_later_turn() -> None:
    clock = Clock()
    target = testing.FakeHealthTarget(clock, {"/a": (200, b"x"), "/gone": OSError("x"), "/silent": None})
    seen: list[Any] = []
    for path in ("/a", "/gone", "/silent", "/other"):
        target.get(path, 2.0).addBoth(seen.append)
    assert seen == []
    clock.advance(0)
    assert seen[0] == (200, b"x")
    assert seen[1].check(OSError)
    assert seen[2] == (404, b"{}")
    assert len(target.waiting) == 1
    clock.advance(2.0)
    assert seen[3].check(TimeoutError)
    assert [path for _, path in target.asked] == ["/a", "/gone", "/silent", "/other"]


def test_a_cancelled_question_leaves_nothing() -> None:
    clock = Clock()
    target = testing.FakeHealthTarget(clock, otherwise=None)
    asking = target.get("/health", 2.0).addErrback(lambda failure: None)
    asking.cancel()
    assert not target.waiting
    assert not clock.getDelayedCalls()
