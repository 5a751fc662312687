"""Traces of three kinds, and what is wrong with broken ones."""

import json

import pytest

from llmgw.errors import ConfigError
from llmgw.simulation.fleets import article_fleet
from llmgw.simulation.logged import logged
from llmgw.simulation.prompt import common
from llmgw.simulation.trace import Span, read_trace, workload_of

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:06.6805900,9000,1
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 4000, "input_length": 1500, "output_length": 3, "hash_ids": [0, 1, 3]},
    {"timestamp": 8000, "input_length": 30, "output_length": 9, "hash_ids": [4]},
]
LOG = [
    {"at": 100.5, "id": "x", "status": 200, "outcome": "done", "key": "k", "model": "m"}
    | {"prompt_tokens": 17, "cached_tokens": 16, "output_tokens": 4, "why": "score 4"},
    {"at": 100.0, "id": "y", "status": 503, "outcome": "overloaded"},
    {"at": 100.0, "id": "z", "status": 200, "outcome": "done", "key": "k", "model": "m"}
    | {"prompt_tokens": 40, "cached_tokens": 12, "output_tokens": 4},
    {"at": 103.0, "id": "z", "status": 200, "outcome": "done", "key": "other", "model": "m"}
    | {"prompt_tokens": 40, "output_tokens": 4},
]


def lines(tables):
    return "".join(json.dumps(table, separators=(",", ":")) + "\n" for table in tables)


@pytest.fixture
def write(tmp_path):
    def written(text):
        path = tmp_path / "trace"
        path.write_text(text)
        return str(path)

    return written


def test_azure(write):
    arrivals = read_trace(write(AZURE), Span(longest=2000))
    assert [(a.prompt_tokens, a.output_tokens) for a in arrivals] == [(374, 44), (396, 109), (2000, 1)]
    assert [a.at_s for a in arrivals] == pytest.approx([0.0, 4.314579, 20.0])


def test_mooncake_shares_what_its_ids_share(write):
    workload = workload_of(read_trace(write(lines(MOONCAKE))), "moon", 1, article_fleet())
    one, two, three = workload.jobs
    assert (one.prompt_tokens, two.prompt_tokens, three.prompt_tokens) == (1100, 1500, 30)
    assert common(one.pieces, two.pieces) == 1024
    assert common(one.pieces, three.pieces) == 0
    assert [job.at_s for job in workload.jobs] == pytest.approx([0.0, 4.0, 8.0])


def test_a_cut_prompt_keeps_its_beginning(write):
    arrivals = read_trace(write(lines(MOONCAKE)), Span(longest=600))
    one, two, three = arrivals
    assert one.pieces == two.pieces
    assert one.prompt_tokens == sum(tokens for _, tokens in one.pieces) == 600
    assert three.prompt_tokens == 30


def test_an_access_log_among_the_lines_of_the_daemon(write):
    """Both go to standard output unless the configuration says otherwise."""
    daemon = "2026-11-30T13:19:21+0000 [llmgw.service.GatewayService#info] llmgw serves …\n"
    trace = "2026-11-30T13:19:23+0000 [-] Unhandled Error\n\tTraceback (most recent call last):\n\n"
    alone = read_trace(write(lines(LOG)))
    mixed = write(daemon + daemon + lines(LOG[:2]) + trace + lines(LOG[2:]) + daemon)
    assert read_trace(mixed) == alone
    assert logged(mixed, Span())["requests"] == 3
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(write(lines(LOG[:1]) + "nonsense\n" + daemon))


def test_an_access_log_gives_those_that_were_answered_in_order_of_arrival(write):
    workload = workload_of(read_trace(write(lines(LOG))), "log", 1, article_fleet(), speed=2.0)
    assert workload.size == 3
    assert [job.at_s for job in workload.jobs] == pytest.approx([0.0, 0.25, 1.5])
    first, second, third = workload.jobs
    assert (first.prompt_tokens, second.prompt_tokens) == (40, 17)
    assert common(first.pieces, second.pieces) == 12  # one caller's prompts are taken to begin alike
    assert common(first.pieces, third.pieces) == 0


def test_skip_and_count(write):
    arrivals = read_trace(write(AZURE), Span(skip=1, count=1))
    assert [a.prompt_tokens for a in arrivals] == [396]


def test_load_rescales_the_whole_and_keeps_the_pattern(write):
    arrivals = read_trace(write(AZURE))
    half, full = (workload_of(arrivals, "a", 1, article_fleet(), load=load) for load in (0.5, 1.0))
    assert half.jobs[1].at_s / half.jobs[2].at_s == pytest.approx(4.314579 / 20.0)
    assert half.jobs[2].at_s / full.jobs[2].at_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "line 1: neither"),
        ("hello\n", "line 1: neither"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "line 2: must be"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", "line 2: must be"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: must be"),
        (lines(MOONCAKE) + "{\n", "line 4: is not a JSON object"),
        (lines([MOONCAKE[0], MOONCAKE[0] | {"input_length": -1}]), "line 2: input_length must be"),
        (lines([MOONCAKE[0] | {"hash_ids": ["a"]}]), "line 1: hash_ids"),
        (lines([LOG[0], LOG[0] | {"at": None}]), "line 2: at must be"),
        (lines([LOG[0]]) + "[]\n", "line 2: is not a JSON object"),
        (lines([LOG[0]]) + "[" * 5000 + "\n", "line 2: is not a JSON object"),
    ],
)
def test_faults_name_the_line(write, text, where):
    with pytest.raises(ConfigError) as caught:
        read_trace(write(text))
    assert where in str(caught.value)


def test_a_trace_without_usable_requests_is_refused(write):
    with pytest.raises(ConfigError, match="no request"):
        workload_of(read_trace(write(lines([LOG[1]]))), "log", 1, article_fleet())
