"""Prefix hash: the same key to the same backend, within bounds of load."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from candidates import backend

from llmgw import builtins
from llmgw.errors import ConfigError
from llmgw.routing.prefix_hash import PrefixHash
from llmgw.routing.turns import MOST_REMEMBERED
from llmgw.testing import router_contract
from llmgw.values import Backend, Choice, FirstToken, Request

TestPrefixHash = router_contract(builtins.prefix_hash)


def ask(prefix: tuple[int, ...] = (), session: str | None = None, id: str = "r") -> Request:
    return Request(id, "m", prefix=prefix, session=session)


def choose(router: PrefixHash, request: Request, fleet: list[Backend]) -> str:
    choice = router.choose(request, fleet, 0.0)
    assert isinstance(choice, Choice)
    return choice.backend.id


def test_gateways_agree_without_a_word_in_whatever_order_they_see_the_fleet() -> None:
    fleet = [backend(f"b{number}") for number in range(8)]
    one, other = PrefixHash(), PrefixHash()
    for number in range(200):
        request = ask(prefix=(number,), id=f"r{number}")
        assert choose(one, request, fleet) == choose(other, request, fleet[::-1])


def test_a_session_goes_before_the_prefix_and_the_prefix_before_the_id() -> None:
    fleet = [backend(f"b{number}") for number in range(50)]
    router = PrefixHash()
    assert choose(router, ask((1,), "s"), fleet) == choose(router, ask((2,), "s"), fleet)
    assert choose(router, ask((1,), id="x"), fleet) == choose(router, ask((1,), id="y"), fleet)
    assert len({choose(router, ask(id=f"r{number}"), fleet) for number in range(100)}) > 20


def test_later_turns_of_a_conversation_keep_their_backend() -> None:
    fleet = [backend(f"b{number}") for number in range(50)]
    router = PrefixHash(blocks=2)
    assert choose(router, ask((7, 8)), fleet) == choose(router, ask((7, 8, 9, 10)), fleet)
    homes = {choose(router, ask((7, number)), fleet) for number in range(100)}
    assert len(homes) > 20


def test_keys_are_shared_out_by_weight_and_warmth() -> None:
    fleet = [backend("large", 6.0), backend("small", 2.0), backend("cold", 8.0, warmth=0.25)]
    router = PrefixHash(bound=100.0)
    shares = Counter(choose(router, ask((number,)), fleet) for number in range(4000))
    assert abs(shares["large"] / 4000 - 0.6) < 0.04
    assert abs(shares["cold"] / 4000 - 0.2) < 0.04


def test_one_that_goes_moves_its_own_keys_only() -> None:
    fleet = [backend(f"b{number}") for number in range(10)]
    router = PrefixHash(bound=100.0)
    for number in range(300):
        before = choose(router, ask((number,)), fleet)
        after = choose(router, ask((number,)), fleet[1:])
        assert after == before or before == "b0"


def test_a_popular_key_spreads_when_its_home_is_at_its_bound() -> None:
    fleet = [backend("a"), backend("b"), backend("c")]
    router = PrefixHash(bound=1.25)
    reasons = set()
    for placed in range(60):
        choice = router.choose(ask((5,)), fleet, 0.0)
        choice.backend.profile.in_flight += 1
        reasons.add(choice.why)
        most = max(each.profile.in_flight for each in fleet)
        assert most <= ceil(1.25 * (placed + 1) / 3)
    assert any(why.endswith("is at its bound") for why in reasons)


def test_without_any_weight_somebody_is_chosen_all_the_same() -> None:
    router = PrefixHash()
    assert choose(router, ask((1,)), [backend("a", warmth=0.0)]) == "a"


def test_home_is_taken_where_bounds_leave_nobody() -> None:
    router = PrefixHash()
    choice = router.choose(ask((1,)), [backend("a", 1.0, warmth=0.0, in_flight=3)], 0.0)
    assert choice.why.endswith("all at their bound")


def test_it_wants_no_events_and_forgets_ids_in_bounds() -> None:
    router = PrefixHash()
    assert router.observes is False
    router.observe(FirstToken("r", "a", 0.0, 0.1))
    for number in range(2 * MOST_REMEMBERED):
        choose(router, ask(), [backend(f"b{number}")])
    assert len(router._seeds) <= MOST_REMEMBERED + 1


@pytest.mark.parametrize("options", [{"bound": 0.5}, {"blocks": 0}, {"seed": 1}])
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        builtins.prefix_hash.build(options)
    assert [fault.where for fault in caught.value.faults] == list(options)
