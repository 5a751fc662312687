"""What the model of expected time to first token says of requests and of a whole fleet."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from llmgw.routing.line import Line

HERD_GAIN, HERD_MOST = 0.05, 16.0
"""Weight of the newest counts in the mean ones, told at every health report; and the largest herd."""

HERD_NONE_GAIN = 0.3
"""The same where no backend has any of others: who is not alone hardly ever sees that under load."""

HERD_LEAST = 1.15
"""Fewer requests of others, for each of ours, are taken for late counts."""

GUESS_OVERHEAD_S = 0.02
GUESS_TOKENS_PER_S = 1000.0
GUESS_STEP_S = 0.02
"""Speed of a backend of the first seen weight, before anything was measured anywhere."""


COUNT_KEPT, COUNT_LEAST = 0.995, 10_000.0
"""What remains of the tokens counted so far at each new answer, and so many stand at first for
estimates that are right."""

COUNT_NEAR, COUNT_MOST = 1.1, 4.0
"""Estimates wrong by a smaller factor are left as they are; and the largest correction, either way."""


class Prices(Struct, frozen=True):
    """What else than its own time to first token a request is made to pay for.

    :param output: share of the expected time for output, so that the end counts too.
    :param stall: per stream that stands still while this prompt is read, a share of that time.
    :param tail: of the square of the time to first token, over its mean.
    """

    output: float = 0.08
    stall: float = 0.3
    tail: float = 0.08


class Flight(Struct):
    """One request on its way to a backend, or thought of for it.

    :param prompt: its prompt tokens, as estimated and corrected.
    :param tokens: of these, the ones believed uncached.
    :param marks: landmarks of its prompt.
    :param matched: share of the prompt that the index found there.
    :param distance: class of how long ago that was read.
    :param slot: which was asked for.
    :param streaming: its answer comes as a stream for certain.
    :param whole: its answer is expected in one piece, so that no first token will be seen.
    :param ahead: tokens that others were waiting to have read.
    :param beside: streams that were there while its own ran, this one included.
    :param expected_s: predicted time to first token for a backend as it usually is.
    :param waited: it had to wait for a slot.
    :param first_s: when its first token came.
    :param streams_s: sum of the streams' times there until then.
    :param told_s: of one expected in one piece, the time to first token if there was one all the same.
    :param stood_s: time for which streams stood still until then; at the end, for which its own one did.
    """

    backend_id: str
    prompt: float
    tokens: float
    marks: Sequence[int] = ()
    matched: float = 0.0
    distance: int = 0
    slot: int | None = None
    streaming: bool = True
    whole: bool = False
    ahead: float = 0.0
    beside: float = 1.0
    expected_s: float = 0.0
    started_s: float = 0.0
    ttft_s: float | None = None
    waited: bool = False
    first_s: float = 0.0
    streams_s: float = 0.0
    stood_s: float = 0.0
    told_s: float | None = None


class Pace:
    """What the fleet has in common: the size of requests, and speed for a weight.

    :ivar sent: requests of ours that were sent so far.
    :ivar herd: requests of all gateways for each of ours; 1 if we are alone.
    :ivar counted: prompt tokens as backends count them for each that was estimated.
    :ivar output: mean output tokens of a request.
    :ivar uncached: mean uncached prompt tokens of a request.
    :ivar overhead_s: mean of the backends' overheads.
    :ivar per_token_s: seconds to read a token, at weight 1.
    :ivar step_s: seconds between two output tokens, at weight 1.
    :ivar ttft_s: mean time to first token.
    """

    __slots__ = (
        "_answers",
        "_counted",
        "_estimated",
        "_others",
        "_own",
        "_samples",
        "_sent_then",
        "counted",
        "herd",
        "output",
        "overhead_s",
        "per_token_s",
        "sent",
        "step_s",
        "ttft_s",
        "uncached",
    )

    def __init__(self) -> None:
        self._answers = 0
        self._samples = 0
        self._own = self._others = 0.0
        self.sent = self._sent_then = 0
        self.herd = 1.0
        self.counted = 1.0
        self._counted = self._estimated = COUNT_LEAST
        self.output = 150.0
        self.uncached = 300.0
        self.overhead_s = GUESS_OVERHEAD_S
        self.per_token_s = 0.0
        self.step_s = 0.0
        self.ttft_s = 0.2

    def seen(self, weight: float) -> None:
        """A backend was seen; before anything is measured the first one's weight is the scale."""
        if not self.per_token_s:
            self.per_token_s = weight / GUESS_TOKENS_PER_S
            self.step_s = weight * GUESS_STEP_S

    def count(self, estimated: float, counted: int) -> None:
        """A backend has counted the tokens of a prompt."""
        self._estimated = COUNT_KEPT * self._estimated + estimated
        self._counted = COUNT_KEPT * self._counted + counted
        wrong = min(max(self._counted / self._estimated, 1.0 / COUNT_MOST), COUNT_MOST)
        self.counted = wrong if wrong > COUNT_NEAR or wrong * COUNT_NEAR < 1.0 else 1.0

    def answered(self, uncached: float, output: int | None, ttft_s: float) -> None:
        """A request was answered to its end."""
        self._answers += 1
        gain = max(0.02, 1.0 / (self._answers + 4))
        self.ttft_s = max(self.ttft_s + gain * (ttft_s - self.ttft_s), 1e-3)
        self.uncached += gain * (uncached - self.uncached)
        if output is not None:
            self.output += gain * (output - self.output)

    def measured(self, weight: float, reading: Line, stepping: Line) -> None:
        """The lines of a backend of that weight were laid anew."""
        self._samples += 1
        gain = max(0.02, 1.0 / (self._samples + 1))
        self.overhead_s += gain * (reading.base - self.overhead_s)
        self.per_token_s += gain * (reading.slope * weight - self.per_token_s)
        self.step_s += gain * (stepping.base * weight - self.step_s)

    def shared(self, own: int, others: int) -> None:
        """So many requests of ours and of others are in the fleet; told now and then.

        While we send nothing it says little of what others will do once we do.
        """
        if not own and self.sent == self._sent_then:
            return
        self._sent_then = self.sent
        self._own += HERD_GAIN * (own - self._own)
        self._others += (HERD_GAIN if others else HERD_NONE_GAIN) * (others - self._others)
        herd = min(1.0 + self._others / self._own, HERD_MOST) if self._own else 1.0
        self.herd = herd if herd > HERD_LEAST else 1.0
