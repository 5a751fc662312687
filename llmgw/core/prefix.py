"""An estimate of which backend has which prompt prefixes in its cache.

An inference server caches what it has processed: llama-server one sequence per slot, others
blocks in a pool. A prompt with the same prefix then skips that part, so knowing what is cached
where is worth more than any model of speed.

Three parts, each bounded:

- :func:`hash_blocks` cuts a prompt into blocks and hashes each *together with all before it*,
  so equal hashes mean equal prefixes.
- :func:`landmarks` thins out a long list: it keeps the first 24 blocks, then fewer and fewer, at
  positions that do not depend on the length. At most :data:`MAX_LANDMARKS` stay.
- :class:`PrefixIndex` remembers which backends have read which landmarks, for the latest ones.

No server reports what it evicts. So the prompts of each backend are counted, and a prefix read
``n`` prompts ago is believed to be cached still as often as that was true at such a distance;
:meth:`PrefixIndex.correct` learns it from the cached tokens that the backend reports. A
llama-server keeps one prompt per slot, which determines the initial belief.

Known weakness: a running CRC-32 does not prevent somebody from making two prompts collide, and
two of 30,000 remembered blocks may collide by chance. The result is a wrong estimate of speed,
which the next answer corrects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import itemgetter
from zlib import crc32

DENSE = 24
"""So many blocks at the beginning are all landmarks."""

PER_OCTAVE = 8
"""Beyond these, the number of landmarks for each doubling of the length."""

MAX_LANDMARKS = 64
"""Landmarks per prompt; they cover 520 blocks, and what follows is ignored."""


def _places() -> tuple[int, ...]:
    places = list(range(DENSE))
    stride = 1
    while len(places) < MAX_LANDMARKS:
        stride *= 2
        places += [places[-1] + stride * step for step in range(1, PER_OCTAVE + 1)]
    return tuple(places[:MAX_LANDMARKS])


PLACES = _places()
"""Indexes of the blocks that are landmarks."""

_PICKERS = tuple(
    itemgetter(*PLACES[: max(DENSE, bisect_left(PLACES, length))]) for length in range(PLACES[-1] + 2)
)
"""For each length of a prefix, takes the landmarks out of it."""

MAX_PLATEAUS = 2
"""Number of different lengths that :meth:`PrefixIndex.match` distinguishes."""

DISTANCES = 64
"""Belief is kept per power of two of the distance; no count of prompts has more."""

GAIN = 0.1
"""Weight of the newest observation in a belief."""

FAR = 0.3
"""Initial belief in a prompt read more prompts ago than there are slots."""


def hash_blocks(text: bytes, block_bytes: int, most_blocks: int) -> tuple[int, ...]:
    """Hashes of the whole blocks of ``text``, first block first; an incomplete last block is ignored.

    Each hash covers all bytes from the beginning to the end of its block, and is the same in
    every process. Work is bounded: at most ``block_bytes * most_blocks``
    bytes are read, one checksum per block.

    :param block_bytes: length of a block, 1 or more.
    :param most_blocks: blocks beyond are not looked at.
    """
    end = min(len(text) // block_bytes, most_blocks) * block_bytes
    found = []
    crc = 0
    for start in range(0, end, block_bytes):
        crc = crc32(text[start : start + block_bytes], crc)
        found.append(crc)
    return tuple(found)


def landmarks(prefix: Sequence[int]) -> Sequence[int]:
    """The blocks of ``prefix`` that are looked at; ``PLACES`` has their places."""
    length = len(prefix)
    if length <= DENSE:
        return prefix
    found: tuple[int, ...] = _PICKERS[length if length <= PLACES[-1] else -1](prefix)
    return found


def blocks_covered(marks: int) -> int:
    """How many blocks the first ``marks`` landmarks reach."""
    return PLACES[marks - 1] + 1 if marks else 0


class Held:
    """What is believed about one backend's cache.

    :ivar read: number of prompts read there so far.
    :ivar belief: by class of distance, the share of prefixes that were still cached.
    """

    __slots__ = ("belief", "read")

    def __init__(self, slots: int) -> None:
        self.read = 0
        self.belief = [1.0 if 1 << near <= slots else FAR for near in range(DISTANCES)]


class PrefixIndex:
    """The latest ``most`` landmarks, with the backends that have read them.

    Landmarks are kept in two generations. New ones go into the young generation; when that has
    half of ``most``, it becomes the old one, and what was left in the old one is dropped. This
    is nearly an LRU cache, at the cost of a plain dict.

    Memory is bounded by ``most``: about 0.3 kB per landmark with one backend and
    0.1 kB for each further one.

    :param most: landmarks remembered, 2 or more.
    :ivar held: what is believed, by backend; everyone whom :meth:`match` names is in it.
    """

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._young: dict[int, dict[str, int]] = {}
        self._old: dict[int, dict[str, int]] = {}
        self.held: dict[str, Held] = {}

    def __len__(self) -> int:
        """Number of landmarks kept; one that was read again may count twice."""
        return len(self._young) + len(self._old)

    def insert(self, marks: Sequence[int], backend_id: str, slots: int) -> None:
        """``backend_id`` has read a prompt with these landmarks.

        :param slots: where its belief starts, if it is new.
        """
        held = self.held.get(backend_id)
        if held is None:
            held = self.held[backend_id] = Held(slots)
        held.read = read = held.read + 1
        young, old = self._young, self._old
        for mark in marks:
            readers = young.get(mark)
            if readers is None:
                readers = old.get(mark)
                if readers is None:
                    young[mark] = {backend_id: read}
                    continue
                young[mark] = readers
            readers[backend_id] = read
        if len(young) >= self._half:
            self._old = young
            self._young = {}

    def match(self, marks: Sequence[int], crowd: int) -> list[tuple[int, Mapping[str, int]]]:
        """Who read how much of this beginning: ``(blocks, readers)``, longest first.

        Readers of a longer beginning stand among those of the shorter ones too. At
        most :data:`MAX_PLATEAUS` lengths, each found by halving, so the work hardly
        depends on the length.

        :param crowd: the first length with more readers than this is the last one told.
        :return: ``readers`` maps ids to the backend's count of prompts then.
        """
        if not marks:
            return []
        young, old = self._young, self._old
        begun = young.get(marks[0]) or old.get(marks[0])
        if begun is None:
            return []
        found: list[tuple[int, Mapping[str, int]]] = []
        most = len(begun)
        high = len(marks)
        fewest = 0
        while high and fewest < most:
            low, best = 1, begun
            while low < high:
                middle = (low + high + 1) >> 1
                mark = marks[middle - 1]
                known = young.get(mark) or old.get(mark)
                if known is not None and len(known) > fewest:
                    low, best = middle, known
                else:
                    high = middle - 1
            found.append((PLACES[low - 1] + 1, best))
            fewest = len(best)
            if fewest > crowd or len(found) == MAX_PLATEAUS:
                break
            high = low - 1
        return found

    def length(self, marks: Sequence[int], backend_id: str) -> int:
        """How many of these landmarks that backend has read; by halving."""
        young, old = self._young, self._old
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high + 1) // 2
            mark = marks[middle - 1]
            readers = young.get(mark) or old.get(mark)
            if readers is not None and backend_id in readers:
                low = middle
            else:
                high = middle - 1
        return low

    def correct(self, backend_id: str, distance: int, share: float) -> None:
        """A backend has told how much of what it was believed to hold it held.

        :param share: 0 to 1.
        """
        held = self.held.get(backend_id)
        if held is not None:
            held.belief[distance] += GAIN * (share - held.belief[distance])

    def forget(self, backend_id: str) -> None:
        """The backend was restarted or is gone: its cache is empty."""
        if self.held.pop(backend_id, None) is None:
            return
        for generation in (self._young, self._old):
            for mark in [mark for mark, readers in generation.items() if backend_id in readers]:
                readers = generation[mark]
                del readers[backend_id]
                if not readers:
                    del generation[mark]
