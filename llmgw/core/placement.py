"""Decides where a model is loaded, and which models are evicted for it.

The possibilities, in order of preference:

1. an instance has room for one more model, by number and by memory: the idlest such instance,
   then the quickest, then the one with the most room;
2. an idle model can be evicted: the one with the least cost, which is its load time and fades
   while it is not requested;
3. an idle model has not been in memory for its minimum stay, but soon will have: wait;
4. a busy model is drained: it gets no new requests there, and is evicted when its last one has
   ended. No request is cut.

A pinned model is never evicted, nor one that is being loaded, nor one within its minimum stay:
without the last rule two models that share an instance would evict each other without serving
any request.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec import Struct

FADE_S = 60.0
"""The cost of a model that has not been requested for so long is half of its load time."""

LOOK_AGAIN_S = 1.0
"""When to look again for something that ends at an unknown time."""


class Resident(Struct, frozen=True):
    """A model that an instance has in memory.

    :param busy: number of requests running on it, from all gateways.
    :param used_s: monotonic time at which it was last requested; ``since_s`` when it was loaded.
    :param load_s: seconds that loading it there takes.
    :param size: bytes of memory it takes; 0 if not known.
    :param fixed: it is pinned, and may not be evicted at all.
    :param loading: it is being loaded, and may not be evicted yet.
    """

    model: str
    busy: int = 0
    used_s: float = -inf
    since_s: float = -inf
    load_s: float = 0.0
    size: int = 0
    fixed: bool = False
    loading: bool = False


class Instance(Struct, frozen=True):
    """A backend that has the wanted model, but not in memory.

    :param most: number of models it may have in memory at a time; ``None`` for any number.
    :param memory: bytes that all of them together may take; ``None`` for no limit.
    :param in_flight: number of requests running there, for all models.
    :param load_s: expected seconds for loading the wanted model there.
    :param not_before_s: the wanted model failed there, and is not tried before this time.
    :param changing: room is being made there.
    :param kept: nothing may be evicted there for now, as requests wait for what is there.
    """

    id: str
    residents: tuple[Resident, ...] = ()
    most: int | None = None
    memory: int | None = None
    in_flight: int = 0
    load_s: float = 0.0
    not_before_s: float = -inf
    changing: bool = False
    kept: bool = False


class Place(Struct, frozen=True):
    """Load it here.

    :param victims: models that are evicted first.
    :param drain: some of them are busy, and are drained before.
    """

    instance: str
    victims: tuple[str, ...] = ()
    drain: bool = False


class Wait(Struct, frozen=True):
    """Nowhere for now. Look again at ``until_s``, or when something has changed."""

    until_s: float
    why: str


class Nowhere(Struct, frozen=True):
    """No instance takes it: ``until_s`` is when the first pause after a failure ends,
    ``inf`` if no time will help."""

    until_s: float
    why: str


_Rank = tuple[float, ...]


class _Offer(Struct, frozen=True):
    rank: _Rank
    place: Place


def place(
    size: int, instances: Sequence[Instance], now_s: float, min_stay_s: float
) -> Place | Wait | Nowhere:
    """Decide.

    :param size: bytes that the wanted model takes, 0 if not known.
    :param instances: those that could have it and are there; ties go to the first by id,
        so that two gateways that see the same decide the same.
    """
    offers: list[_Offer] = []
    idle_s: list[float] = []  # when an idle model is old enough to go
    other_s: list[float] = []
    paused_s: list[float] = []
    for instance in sorted(instances, key=lambda each: each.id):
        if instance.not_before_s > now_s:
            paused_s.append(instance.not_before_s)
        elif instance.changing:
            other_s.append(now_s + LOOK_AGAIN_S)
        else:
            found = _offer(instance, size, now_s, min_stay_s)
            if isinstance(found, _Offer):
                offers.append(found)
            elif found is not None:
                until_s, idle = found
                (idle_s if idle else other_s).append(until_s)
    best = min(offers, key=lambda offer: offer.rank, default=None)
    if best is not None and not (best.place.drain and idle_s):
        return best.place
    if idle_s or other_s:
        return Wait(min(idle_s + other_s), "no instance has room yet")
    if paused_s:
        return Nowhere(min(paused_s), "loading it failed")
    why = "no instance can make room for it" if instances else "no instance that has it can be reached"
    return Nowhere(inf, why)


def cost(resident: Resident, now_s: float) -> float:
    """The cost of evicting it: seconds of load, fading while it is not requested."""
    idle_s = max(0.0, now_s - max(resident.used_s, resident.since_s))
    return max(resident.load_s, 0.001) / (1.0 + idle_s / FADE_S)


def _offer(
    instance: Instance, size: int, now_s: float, min_stay_s: float
) -> _Offer | tuple[float, bool] | None:
    """What ``instance`` offers; else from when on it might, and whether what must go is
    idle; ``None`` if it never can while things are as they are."""
    lacking = _lacking(instance, size)
    if lacking == (0, 0):
        rank: _Rank = (0.0, instance.in_flight, instance.load_s, *_less_left(instance))
        return _Offer(rank, Place(instance.id))
    if instance.kept:
        return now_s + LOOK_AGAIN_S, False
    movable = [each for each in instance.residents if not each.fixed and not each.loading]
    old = [each for each in movable if now_s >= each.since_s + min_stay_s]
    victims = _victims(old, lacking, now_s)
    if victims is not None:
        drain = any(each.busy for each in victims)
        total = sum(cost(each, now_s) for each in victims)
        rank = (2.0 if drain else 1.0, total, instance.in_flight, instance.load_s)
        return _Offer(rank, Place(instance.id, tuple(each.model for each in victims), drain))
    victims = _victims(movable, lacking, now_s)
    if victims is not None:
        until_s = max(each.since_s + min_stay_s for each in victims)
        return until_s, not any(each.busy for each in victims)
    if _victims([each for each in instance.residents if not each.fixed], lacking, now_s) is not None:
        return now_s + LOOK_AGAIN_S, False
    return None


def _lacking(instance: Instance, size: int) -> tuple[int, int]:
    """The number of models and of bytes that must be freed."""
    models = 0 if instance.most is None else max(0, len(instance.residents) + 1 - instance.most)
    if instance.memory is None:
        return models, 0
    taken = sum(each.size for each in instance.residents)
    return models, max(0, taken + size - instance.memory)


def _less_left(instance: Instance) -> tuple[float, float]:
    """How full the instance is, by number and by memory."""
    count = -inf if instance.most is None else len(instance.residents) - instance.most
    if instance.memory is None:
        return count, -inf
    return count, sum(each.size for each in instance.residents) - instance.memory


def _victims(residents: Sequence[Resident], lacking: tuple[int, int], now_s: float) -> list[Resident] | None:
    """The cheapest models that free enough, idle ones first; ``None`` if all together do not."""
    models, size = lacking
    gone: list[Resident] = []
    for each in sorted(residents, key=lambda one: (one.busy > 0, cost(one, now_s), one.model)):
        if models <= 0 and size <= 0:
            break
        if models <= 0 and each.size <= 0:
            continue  # evicting it would free nothing that is needed
        gone.append(each)
        models -= 1
        size -= each.size
    return None if models > 0 or size > 0 else gone
