"""One llama-server: slots, continuous batching, prompt caches.

The server works in iterations. Each one decodes a token of every stream and
reads up to ``batch_tokens`` prompt tokens of those that are not streams yet;
whoever decodes waits for whoever reads, which is how a long prompt makes every
stream of the server stutter. An iteration takes ::

    step_s + stream_s x streams + prompt tokens / prefill_rate

While nobody reads, all iterations are alike, and the run up to the next end of
a stream is one event. An arrival cuts that run at the next iteration's end, so
nothing is lost in exactness.

A finished request leaves its prompt and answer in its slot. The next one goes
to the idle slot with the longest common beginning, if that is more than a tenth
of the prompt, and else to the slot that was idle longest (``slot_prompt_similarity``
and the LRU rule of llama.cpp's ``get_available_slot``). Of a prompt that is
cached whole the last token is read again. Without an idle slot a request is
deferred inside the server, first come first served; one that asked for a slot by
``id_slot`` waits for that very slot.

Left out: limits of KV memory, context shift, speculative decoding, a host-memory
prompt cache, and the slowing of decoding by long contexts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from msgspec import Struct

from llmgw.simulation.clock import Clock
from llmgw.simulation.prompt import Pieces, common

SIMILARITY = 0.1
BATCH_TOKENS = 2048


class NodeSpec(Struct, frozen=True):
    """How fast a server is, and how large.

    :param prefill_rate: prompt tokens per second.
    :param step_s: an iteration's fixed time.
    :param stream_s: what each stream adds to it.
    :param weight: what the gateways believe of it, the article's K.
    :param context_length: tokens per slot, ``None`` for no limit.
    """

    id: str
    slots: int
    prefill_rate: float
    step_s: float
    stream_s: float = 0.0
    weight: float = 1.0
    batch_tokens: int = BATCH_TOKENS
    context_length: int | None = None

    def idle_ttft_s(self, prompt_tokens: int) -> float:
        """Time to first token of an uncached prompt on the idle server, wire aside."""
        iterations = -(-prompt_tokens // self.batch_tokens)
        return self.step_s * iterations + self.stream_s + prompt_tokens / self.prefill_rate

    def requests_per_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Requests it can carry for ever, with all slots at work and nothing cached."""
        decode_s = output_tokens * (self.step_s + self.stream_s * self.slots) / self.slots
        return 1.0 / (decode_s + prompt_tokens / self.prefill_rate)


class Work:
    """One attempt as the server sees it; its owner is told by three calls.

    :ivar gone: its client has left; do not begin it.
    :ivar cached: prompt tokens found in the slot's cache.
    :ivar prompt_s: time from the first look at the prompt to the first token (``prompt_ms``).
    :ivar begun_s: when the server first read of it.
    :ivar first_s: when its first token came out.
    """

    __slots__ = (
        "answer",
        "begun_s",
        "cached",
        "done",
        "failed",
        "first",
        "first_s",
        "gone",
        "out_left",
        "output_tokens",
        "pieces",
        "prompt_left",
        "prompt_s",
        "prompt_tokens",
        "slot",
        "wish",
    )

    def __init__(
        self,
        pieces: Pieces,
        prompt_tokens: int,
        output_tokens: int,
        answer: int,
        wish: int | None,
        first: Callable[[Work], object],
        done: Callable[[Work], object],
        failed: Callable[[Work, str], object],
    ) -> None:
        self.pieces = pieces
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.answer = answer
        self.wish = wish
        self.first = first
        self.done = done
        self.failed = failed
        self.slot: Slot | None = None
        self.gone = False
        self.cached = 0
        self.prompt_left = 0
        self.out_left = output_tokens
        self.begun_s = -1.0
        self.first_s = -1.0
        self.prompt_s = 0.0


class Slot:
    """One sequence of the server, and what its cache holds."""

    __slots__ = ("index", "pieces", "used_s", "work")

    def __init__(self, index: int) -> None:
        self.index = index
        self.pieces: Pieces = ()
        self.used_s = -inf
        self.work: Work | None = None


class Node:
    """A server at work.

    :ivar slowness: factor on every iteration that begins from now on.
    :ivar hung_until_s: no iteration begins before.
    """

    def __init__(self, spec: NodeSpec, clock: Clock) -> None:
        self.spec = spec
        self.slowness = 1.0
        self.hung_until_s = -inf
        self.slots = [Slot(index) for index in range(spec.slots)]
        self.deferred: deque[Work] = deque()
        self._clock = clock
        self._q = 1.0 / spec.prefill_rate
        self._reading: list[Work] = []
        self._streams: list[Work] = []
        self._portions: list[tuple[Work, int]] = []
        self._steps = 0  # planned iterations of the present run; 0 while idle
        self._began_s = 0.0
        self._step_s = 0.0
        self._run = 0  # number of the present run; calls for others are stale

    @property
    def busy_slots(self) -> int:
        """Slots at work."""
        return sum(slot.work is not None for slot in self.slots)

    # --- what comes from outside --------------------------------------------------

    def submit(self, work: Work) -> None:
        """A request arrives."""
        slot = self._slot_for(work)
        if slot is None:
            self.deferred.append(work)
            return
        self._seat(work, slot)
        self._join()

    def cancel(self, work: Work) -> None:
        """Its client left: the slot is free at the next iteration, the cache keeps what was read."""
        slot = work.slot
        if slot is None:
            if work in self.deferred:
                self.deferred.remove(work)
            return
        if slot.work is work:
            self._reading = [each for each in self._reading if each is not work]
            self._streams = [each for each in self._streams if each is not work]
            self._portions = [each for each in self._portions if each[0] is not work]
            self._leave(work)
            self._join()

    def cut(self, reason: str) -> list[Work]:
        """The process dies: everything under way fails, every cache is lost."""
        lost = [slot.work for slot in self.slots if slot.work is not None] + list(self.deferred)
        self.slots = [Slot(index) for index in range(self.spec.slots)]
        self.deferred.clear()
        self._reading = []
        self._streams = []
        self._portions = []
        self._steps = 0
        self._run += 1
        for work in lost:
            work.slot = None
            work.failed(work, reason)
        return lost

    def touch(self) -> None:
        """Its speed has changed: end the present run with the present iteration."""
        self._join()

    # --- slots --------------------------------------------------------------------

    def _slot_for(self, work: Work) -> Slot | None:
        slots = self.slots
        wish = work.wish
        if wish is not None and 0 <= wish < len(slots):
            return slots[wish] if slots[wish].work is None else None
        best: Slot | None = None
        longest = SIMILARITY * work.prompt_tokens
        oldest: Slot | None = None
        oldest_s = inf
        pieces = work.pieces
        head = pieces[0][0]
        for slot in slots:
            if slot.work is not None:
                continue
            if slot.used_s < oldest_s:
                oldest, oldest_s = slot, slot.used_s
            held = slot.pieces
            if held and held[0][0] == head:
                tokens = common(held, pieces)
                if tokens > longest:
                    best, longest = slot, tokens
        return best or oldest

    def _seat(self, work: Work, slot: Slot) -> None:
        slot.work = work
        work.slot = slot
        cached = common(slot.pieces, work.pieces)
        work.cached = cached = min(cached, work.prompt_tokens - 1)
        work.prompt_left = work.prompt_tokens - cached
        slot.pieces = ()
        self._reading.append(work)

    def _leave(self, work: Work) -> None:
        """Free its slot, and give it to whoever waits for it."""
        slot = work.slot
        assert slot is not None
        made = work.output_tokens - work.out_left
        slot.pieces = (*work.pieces, (work.answer, made)) if made else ()
        slot.used_s = self._clock.now_s
        slot.work = None
        if self.deferred:
            for waiting in self.deferred:
                wish = waiting.wish
                if wish is None or wish == slot.index or not 0 <= wish < len(self.slots):
                    self.deferred.remove(waiting)
                    self._seat(waiting, slot)
                    break

    # --- iterations ---------------------------------------------------------------

    def _join(self) -> None:
        """Somebody came or left: begin a run, or cut the present one at the next iteration's end."""
        clock = self._clock
        if self._steps == 0:
            self._plan()
        elif self._steps > 1:
            passed = int((clock.now_s - self._began_s) / self._step_s) + 1
            if passed < self._steps:
                self._steps = passed
                self._run += 1
                clock.at(self._began_s + passed * self._step_s, self._finish_run, self._run)

    def _plan(self) -> None:
        """Decide the next run and book its end."""
        clock, spec, streams = self._clock, self.spec, self._streams
        now_s = clock.now_s
        self._run = run = self._run + 1
        if now_s < self.hung_until_s:
            self._steps = 1
            self._portions = []
            self._began_s, self._step_s = now_s, self.hung_until_s - now_s
            clock.at(self.hung_until_s, self._wake, run)
            return
        if self._reading:
            room = max(1, spec.batch_tokens - len(streams))
            tokens = finishing = 0
            portions = []
            for work in self._reading:
                portion = work.prompt_left if work.prompt_left < room else room
                if work.begun_s < 0.0:
                    work.begun_s = now_s
                portions.append((work, portion))
                tokens += portion
                room -= portion
                finishing += portion == work.prompt_left
                if not room:
                    break
            self._portions = portions
            self._steps = 1
            self._step_s = self.slowness * (
                spec.step_s + spec.stream_s * (len(streams) + finishing) + tokens * self._q
            )
        elif streams:
            self._steps = min(work.out_left for work in streams)
            self._step_s = self.slowness * (spec.step_s + spec.stream_s * len(streams))
        else:
            self._steps = 0
            return
        self._began_s = now_s
        clock.at(now_s + self._steps * self._step_s, self._finish_run, run)

    def _wake(self, run: int) -> None:
        if run == self._run:
            self._plan()

    def _finish_run(self, run: int) -> None:
        """All planned iterations are over: hand out what they made."""
        if run != self._run:
            return
        now_s = self._clock.now_s
        steps = self._steps
        ended: list[Work] = []
        stays: list[Work] = []
        for work in self._streams:
            work.out_left = left = work.out_left - steps
            (stays if left > 0 else ended).append(work)
        firsts: list[Work] = []
        if self._portions:
            for work, portion in self._portions:
                work.prompt_left -= portion
                if not work.prompt_left:
                    firsts.append(work)
                    work.first_s = now_s
                    work.prompt_s = now_s - work.begun_s
                    work.out_left -= 1
                    (stays if work.out_left > 0 else ended).append(work)
            self._portions = []
            self._reading = [work for work in self._reading if work.prompt_left]
        self._streams = stays
        for work in ended:
            self._leave(work)
        self._plan()
        for work in firsts:
            work.first(work)
        for work in ended:
            work.done(work)
