"""The server on paper: time, slots, caches, and what happens when it dies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.simulation.clock import Clock
from llmgw.simulation.node import Node, NodeSpec, Work

SPEC = NodeSpec("n", slots=2, prefill_rate=1000.0, step_s=0.010, stream_s=0.002, batch_tokens=512)


class Bench:
    """A node with a log of what it told."""

    def __init__(self, spec: NodeSpec = SPEC) -> None:
        self.clock = Clock()
        self.node = Node(spec, self.clock)
        self.first: dict[str, float] = {}
        self.done: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.works: dict[str, Work] = {}

    def at(self, at_s, name, prompt, output, *, slot=None, pieces=None, answer=None):
        pieces = pieces or ((1000 + len(self.works), prompt),)
        work = Work(
            pieces,
            prompt,
            output,
            answer or -len(self.works) - 1,
            slot,
            lambda work: self.first.__setitem__(name, self.clock.now_s),
            lambda work: self.done.__setitem__(name, self.clock.now_s),
            lambda work, reason: self.failed.__setitem__(name, reason),
        )
        self.works[name] = work
        self.clock.at(at_s, self.node.submit, work)
        return work

    def run(self):
        while self.clock.step():
            pass
        return self


def test_an_idle_server_reads_and_then_decodes():
    bench = Bench()
    bench.at(1.0, "a", 200, 11)
    bench.run()
    assert bench.first["a"] == pytest.approx(1.0 + 0.2 + 0.012)
    assert bench.done["a"] == pytest.approx(bench.first["a"] + 10 * 0.012)
    assert bench.works["a"].prompt_s == pytest.approx(SPEC.idle_ttft_s(200)) == pytest.approx(0.212)


def test_a_long_prompt_is_read_in_chunks():
    bench = Bench()
    bench.at(0.0, "a", 1200, 1)
    bench.run()
    # 512 + 512 + 176 tokens; the stream counts only in the iteration that ends the prompt.
    assert bench.first["a"] == pytest.approx(1.2 + 3 * 0.010 + 0.002) == pytest.approx(SPEC.idle_ttft_s(1200))
    assert bench.done == bench.first


def test_reading_stalls_the_streams_that_run():
    alone, disturbed = Bench(), Bench()
    for bench in (alone, disturbed):
        bench.at(0.0, "stream", 100, 50)
    disturbed.at(0.3, "long", 500, 1)
    alone.run()
    disturbed.run()
    assert disturbed.done["stream"] - alone.done["stream"] == pytest.approx(0.5 + 0.002)


def test_an_arrival_waits_for_the_end_of_the_running_iteration():
    bench = Bench()
    bench.at(0.0, "a", 100, 1000)
    bench.at(0.1 + 0.012 + 0.0305, "b", 100, 1)  # in the third decoding iteration
    bench.run()
    begun_s = 0.112 + 3 * 0.012
    assert bench.works["b"].begun_s == pytest.approx(begun_s)
    assert bench.first["b"] == pytest.approx(begun_s + 0.1 + 0.010 + 2 * 0.002)


def test_who_finds_no_slot_waits_inside_in_order():
    bench = Bench()
    for index, name in enumerate("abcd"):
        bench.at(index * 0.001, name, 10, 100)
    bench.run()
    assert list(bench.first) == ["a", "b", "c", "d"]
    assert bench.first["c"] > bench.done["a"]


def test_counts_of_slots_and_of_those_that_wait():
    bench = Bench()
    for name in "abc":
        bench.at(0.0, name, 10, 100)
    seen = []
    bench.clock.at(0.1, lambda: seen.append((bench.node.busy_slots, len(bench.node.deferred))))
    bench.run()
    assert seen == [(2, 1)]
    assert bench.node.busy_slots == 0


# --- caches ---


def test_a_prompt_that_goes_on_from_a_slot_is_read_only_from_there():
    bench = Bench()
    bench.at(0.0, "turn 1", 300, 20, pieces=((7, 300),), answer=8)
    bench.at(5.0, "turn 2", 370, 1, pieces=((7, 300), (8, 20), (9, 50)))
    bench.run()
    assert bench.works["turn 2"].cached == 320
    assert bench.works["turn 2"].prompt_s == pytest.approx(0.050 + 0.012)


def test_of_a_prompt_that_is_cached_whole_the_last_token_is_read_again():
    bench = Bench()
    bench.at(0.0, "a", 300, 5, pieces=((7, 300),))
    bench.at(5.0, "b", 300, 5, pieces=((7, 300),))
    bench.run()
    assert bench.works["b"].cached == 299


def test_the_slot_with_the_longest_common_beginning_wins_over_the_oldest():
    bench = Bench()
    bench.at(0.0, "mine", 300, 5, pieces=((7, 300),))
    bench.at(1.0, "other", 300, 5, pieces=((70, 300),))
    bench.at(2.0, "again", 300, 5, pieces=((70, 100), (71, 200)))
    bench.at(3.0, "new", 300, 5, pieces=((99, 300),))
    bench.run()
    assert [bench.works[name].cached for name in ("other", "again", "new")] == [0, 100, 0]
    # "new" took the slot that was idle longest, which was that of "mine".
    assert bench.works["new"].slot is bench.works["mine"].slot
    assert bench.works["again"].slot is bench.works["other"].slot


def test_a_tenth_or_less_in_common_is_not_worth_a_slot():
    bench = Bench()
    bench.at(0.0, "a", 300, 5, pieces=((7, 300),))
    bench.at(1.0, "b", 300, 5, pieces=((7, 30), (8, 270)))
    bench.run()
    assert bench.works["b"].slot is not bench.works["a"].slot


# --- id_slot ---


def test_a_wish_for_a_busy_slot_waits_for_it_while_others_pass():
    bench = Bench()
    bench.at(0.0, "a", 10, 100, slot=1)
    bench.at(0.1, "b", 10, 5, slot=1)
    bench.at(0.2, "c", 10, 5)
    bench.run()
    assert bench.first["b"] >= bench.done["a"]
    assert bench.done["c"] < bench.first["b"]
    assert bench.works["b"].slot.index == 1


def test_a_wish_for_a_slot_that_is_not_there_is_no_wish():
    bench = Bench()
    bench.at(0.0, "a", 10, 5, slot=7)
    bench.run()
    assert "a" in bench.done


# --- ends ---


@pytest.mark.parametrize("at_s", [0.02, 0.3])
def test_a_cancelled_request_frees_its_slot_for_the_next(at_s):
    bench = Bench()
    work = bench.at(0.0, "a", 100, 10_000)
    bench.at(0.0, "b", 100, 10_000)
    bench.at(0.01, "c", 10, 1)
    bench.clock.at(at_s, bench.node.cancel, work)
    while bench.clock.now_s < 2.0 and bench.clock.step():
        pass
    assert bench.first["c"] < 1.0
    assert "a" not in bench.done


def test_a_cancelled_request_that_waits_is_never_begun():
    bench = Bench()
    for name in "abc":
        bench.at(0.0, name, 10, 50)
    bench.clock.at(0.1, bench.node.cancel, bench.works["c"])
    bench.run()
    assert set(bench.done) == {"a", "b"}


def test_a_death_fails_all_and_empties_the_caches():
    bench = Bench()
    bench.at(0.0, "old", 300, 2, pieces=((7, 300),))
    for name in "abc":
        bench.at(2.0, name, 10, 1000)
    bench.clock.at(3.0, bench.node.cut, "reset")
    bench.at(4.0, "new", 300, 2, pieces=((7, 300),))
    bench.run()
    assert bench.failed == dict.fromkeys("abc", "reset")
    assert bench.works["new"].cached == 0
    assert "new" in bench.done


def test_slowness_counts_from_the_next_iteration():
    bench = Bench()
    bench.at(0.0, "a", 100, 101)

    def slow():
        bench.node.slowness = 10.0
        bench.node.touch()

    bench.clock.at(0.112 + 0.6, slow)  # on the edge: 50 of 100 iterations are over
    bench.run()
    assert bench.done["a"] == pytest.approx(0.112 + 0.6 + 50 * 0.12, abs=0.121)


def test_a_hang_stops_everything_for_its_time():
    bench = Bench()
    bench.at(0.0, "a", 100, 101)

    def hang():
        bench.node.hung_until_s = 20.0
        bench.node.touch()

    bench.clock.at(0.5, hang)
    bench.at(3.0, "b", 100, 1)
    bench.run()
    assert 20.0 < bench.first["b"] < 20.2
    assert bench.done["a"] == pytest.approx(0.112 + 1.2 + 19.5, abs=0.2)


# --- against the plain way ---


def plainly(spec, requests):
    """The same server one iteration at a time, without caches: when each ended."""
    waiting = sorted(requests, key=lambda each: each[0])
    reading, streams, first, done, now = [], [], {}, {}, 0.0
    while waiting or reading or streams:
        while waiting and waiting[0][0] <= now + 1e-12 and len(reading) + len(streams) < spec.slots:
            _, name, prompt, output = waiting.pop(0)
            reading.append([name, prompt, output])
        if not reading and not streams:
            now = max(now, waiting[0][0])
            continue
        room, portions = max(1, spec.batch_tokens - len(streams)), []
        for each in reading:
            portion = min(room, each[1])
            portions.append(portion)
            room -= portion
            if not room:
                break
        ending = [each for each, portion in zip(reading, portions, strict=False) if portion == each[1]]
        now += spec.step_s + spec.stream_s * (len(streams) + len(ending)) + sum(portions) / spec.prefill_rate
        for each in streams:
            each[2] -= 1
        for each, portion in zip(reading, portions, strict=False):
            each[1] -= portion
        for each in ending:
            reading.remove(each)
            first[each[0]] = now
            each[2] -= 1
            streams.append(each)
        for each in [each for each in streams if each[2] <= 0]:
            streams.remove(each)
            done[each[0]] = now
    return first, done


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 4000), st.integers(1, 1500), st.integers(1, 80)), min_size=1, max_size=12
    ),
    st.integers(1, 4),
)
def test_runs_of_iterations_are_as_exact_as_single_ones(drawn, slots):
    spec = NodeSpec("n", slots, 997.0, 0.0101, 0.0023, batch_tokens=256)
    requests = [
        (at / 1000.0 + index * 1e-5, str(index), prompt, output)
        for index, (at, prompt, output) in enumerate(sorted(drawn))
    ]
    bench = Bench(spec)
    for index, (at_s, name, prompt, output) in enumerate(requests):
        bench.at(at_s, name, prompt, output, pieces=((index + 1, prompt),))
    bench.run()
    first, done = plainly(spec, requests)
    assert bench.first == pytest.approx(first, abs=1e-6)
    assert bench.done == pytest.approx(done, abs=1e-6)
