"""Fleet files, and fleets read from a gateway's state."""

from pathlib import Path

import pytest

from llmgw.errors import ConfigError
from llmgw.simulation.fleets import article_fleet, fleet_of_state, mixed_fleet, parse_fleet

ETC = Path(__file__).parents[2] / "etc" / "fleets"
NODE = '[[nodes]]\nid = "a"\nslots = 4\nprefill_rate = 1000\ntoken_rate = 50\n'


def test_rates_come_out_as_they_were_put_in():
    (node,) = parse_fleet(
        NODE + "full_token_rate = 25\nweight = 3\nbatch_tokens = 64\ncontext_length = 100\n"
    )
    assert 1 / (node.step_s + node.stream_s) == pytest.approx(50)
    assert 1 / (node.step_s + 4 * node.stream_s) == pytest.approx(25)
    assert (node.weight, node.batch_tokens, node.context_length) == (3.0, 64, 100)


def test_a_full_server_is_slower_where_nothing_is_said():
    (node,) = parse_fleet(NODE)
    assert 1 / (node.step_s + 4 * node.stream_s) == pytest.approx(30)


def test_one_slot_has_one_rate():
    (node,) = parse_fleet(NODE.replace("slots = 4", "slots = 1"))
    assert (node.step_s, node.stream_s) == (0.02, 0.0)


def test_a_count_makes_as_many():
    assert [node.id for node in parse_fleet(NODE + "count = 3\n")] == ["a-1", "a-2", "a-3"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the file is empty"),
        ("nodes = 3", "nodes: expected an array"),
        ("nodes = []", "nodes: must not be empty"),
        ("x = 1\n" + NODE, "x: unknown key"),
        (NODE + "slot = 3\n", "nodes[0].slot: unknown key; did you mean slots?"),
        (NODE.replace("slots = 4", "slots = 0"), "nodes[0].slots: must be"),
        (NODE.replace("prefill_rate = 1000\n", ""), "nodes[0].prefill_rate: missing"),
        (NODE + NODE, "nodes[1].id: a is there already"),
        (NODE + "full_token_rate = 51\n", "nodes[0].full_token_rate: must not be above token_rate"),
        ("[[nodes", "not TOML"),
    ],
)
def test_faults_name_the_key(text, fault):
    with pytest.raises(ConfigError) as caught:
        parse_fleet(text, "fleet.toml")
    assert f"fleet.toml: {fault}" in str(caught.value)


@pytest.mark.parametrize("path", sorted(ETC.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_are_good(path):
    assert len(parse_fleet(path.read_text())) >= 3


@pytest.mark.parametrize(("name", "built_in"), [("article", article_fleet()), ("mixed", mixed_fleet())])
def test_the_examples_are_the_built_in_fleets(name, built_in):
    for read, built in zip(parse_fleet((ETC / f"{name}.toml").read_text()), built_in, strict=False):
        assert read.prefill_rate == built.prefill_rate
        assert (read.slots, read.weight) == (built.slots, built.weight)
        assert read.idle_ttft_s(200) == pytest.approx(built.idle_ttft_s(200), rel=0.01)


STATE = {
    "backends": [
        {"id": "a", "slots": 4, "cap": 64, "prefill_rate": 900.0, "token_rate": 40.0, "weight": 2.0}
        | {"context_length": 4096, "removed": False},
        {"id": "gone", "removed": True},
        {
            "id": "b",
            "slots": None,
            "cap": 8,
            "prefill_rate": 100.0,
            "token_rate": 4.0,
            "context_length": None,
        },
    ]
}


def test_a_state_gives_the_fleet_at_measured_speed():
    a, b = fleet_of_state(STATE)
    assert (a.id, a.slots, a.prefill_rate, a.weight, a.context_length) == ("a", 4, 900.0, 2.0, 4096)
    assert 1 / (a.step_s + a.stream_s) == pytest.approx(40.0)
    assert (b.id, b.slots, b.weight, b.context_length) == ("b", 8, 1.0, None)


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ({}, "backends: there are none"),
        ({"backends": "abc"}, "backends: there are none"),
        ({"backends": [1]}, "backends[0]: is not a backend"),
        (
            {"backends": [{"id": "a", "slots": 4, "token_rate": None}]},
            "backends[0]: a: its slots or its speed",
        ),
    ],
)
def test_a_state_that_does_not_tell_enough_is_refused(state, fault):
    with pytest.raises(ConfigError) as caught:
        fleet_of_state(state, "url")
    assert f"url: {fault}" in str(caught.value)
