"""What gateways (workers are gateways) tell each other, a few times a second, through the shared store.

One script does all in one step: it stores what we have at work and think, grants
shares, and answers with what the others said (see :mod:`llmgw.core.shares`). A
gateway that says nothing for ``stale_s`` is no more. When the store does not answer
for so long, each goes on by itself, with the whole of each cap.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger

from llmgw.core.shares import Opinions, Shares, opinions, take_hints
from llmgw.store.errors import StoreDown, StoreError
from llmgw.store.store import Script

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmgw.config import PeersConfig
    from llmgw.core.fleet import Fleet
    from llmgw.core.member import Member
    from llmgw.store.store import Store

SOON_S = 0.005
"""Between two looks that somebody's need brings about."""

UNMET_S = 0.02
"""Between two looks while callers wait for what others may give back."""

CONTENDED_S = 0.05
"""Between two looks while some backend is full, by what all have there: where one ends, another may begin."""

WAITING_S = 0.25
"""So long callers wait."""

IDLE_TIMES = 2
"""A gateway without work looks so many times more seldom. Not one that is alone: who comes waits for it."""

LOOK = Script(
    """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local id, ttl = ARGV[1], tonumber(ARGV[2])
local busy, held, short, said, others = {}, {}, {}, {}, 0
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if all[i] ~= id then
    local peer = cjson.decode(all[i + 1])
    if peer.till <= now then
      redis.call('HDEL', KEYS[1], all[i])
    else
      others = others + 1
      for backend, n in pairs(peer.at_work) do busy[backend] = (busy[backend] or 0) + n end
      for backend, n in pairs(peer.granted) do held[backend] = (held[backend] or 0) + n end
      for backend in pairs(peer.short) do short[backend] = 1 end
      if peer.opinions ~= '' then said[#said + 1] = peer.opinions end
    end
  end
end
local at_work, granted, mine = {}, {}, {}
for backend, wish in pairs(cjson.decode(ARGV[3])) do
  local grant = math.max(wish[1], math.min(wish[2], wish[3] - (held[backend] or 0)))
  -- Who is alone has the whole cap until it looks again, so who comes meanwhile gets nothing of it.
  if others == 0 then grant = wish[3] end
  if wish[1] > 0 then at_work[backend] = wish[1] end
  if grant > 0 then granted[backend] = grant end
  if grant < wish[2] then mine[backend] = 1 end
end
redis.call('HSET', KEYS[1], id, cjson.encode(
  {till = now + ttl, at_work = at_work, granted = granted, short = mine, opinions = ARGV[4]}))
redis.call('PEXPIRE', KEYS[1], 2 * ttl)
return cjson.encode({others = others, busy = busy, granted = granted, short = short, said = said})
"""
)


class _Heard(Struct):
    """The script's answer; Lua writes an empty list as ``{}``."""

    others: int
    busy: dict[str, int]
    granted: dict[str, int]
    short: dict[str, int]
    said: list[str] | dict[str, str]


_read = msgspec.json.Decoder(_Heard).decode
_read_opinions = msgspec.json.Decoder(Opinions).decode
_write = msgspec.json.Encoder().encode


class Peers:
    """This gateway among the others.

    :param clock: monotonic seconds.
    :ivar others: how many there are, by what was heard last.
    :ivar heard_s: when that was; ``None`` while we go on by ourselves.
    """

    log = Logger()

    def __init__(
        self, config: PeersConfig, store: Store, fleet: Fleet, reactor: Any, clock: Callable[[], float]
    ) -> None:
        self.config = config
        self.others = 0
        self.heard_s: float | None = None
        self._store = store
        self._fleet = fleet
        self._reactor = reactor
        self._clock = clock
        self._id = secrets.token_hex(8)
        self._key = store.key("peers")
        self._shares = Shares(fleet)
        self._timer: Any = None
        self._looking = False
        self._again = False
        self._unmet_s: float | None = None
        self._running = False

    def start(self) -> None:
        """Begin to listen and to tell."""
        self._running = True
        self._fleet.pressed = self._pressed
        self._later(0.0)

    def stop(self) -> Deferred[Any]:
        """Take back what we have told. Fires when that is done, or cannot be done."""
        self._running = False
        self._fleet.pressed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._store.up:
            return maybeDeferred(lambda: None)
        return self._store.command("HDEL", self._key, self._id).addErrback(lambda _: None)

    def state(self) -> Mapping[str, Any]:
        """For ``/api/state``."""
        age_s = None if self.heard_s is None else round(self._clock() - self.heard_s, 3)
        return {"others": self.others, "heard_s_ago": age_s, "shares": self._shares.shared}

    def _pressed(self, members: Sequence[Member], waits: bool) -> None:
        """Amid a request: only make a note."""
        if not self._shares.press(members, waits):
            return
        if self._looking:
            self._again = True
        elif self.others and self._timer is not None:
            due_s = self._timer.getTime() - self._reactor.seconds()
            if due_s > SOON_S:
                self._timer.reset(0.0 if due_s < self.config.refresh_s - SOON_S else SOON_S)

    def _later(self, seconds: float) -> None:
        if self._running:
            self._timer = self._reactor.callLater(seconds, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._looking = True
        self._again = False
        looking = Deferred.fromCoroutine(self._look())
        looking.addErrback(lambda failure: self.log.failure("hearing of the other gateways", failure))
        looking.addCallback(lambda _: self._done())

    def _done(self) -> None:
        self._looking = False
        wait_s = self.config.refresh_s
        if self._shares.unmet:
            if self.others:
                wait_s = SOON_S if self._again else min(wait_s, UNMET_S)
        else:
            self._unmet_s = None
            if self._shares.contended:
                wait_s = min(wait_s, CONTENDED_S)
            elif self.others and not any(member.view.in_flight for member in self._fleet.members.values()):
                wait_s *= IDLE_TIMES
        self._later(wait_s)

    async def _look(self) -> None:
        now_s = self._clock()
        if self._shares.unmet:
            if self._unmet_s is None:
                self._unmet_s = now_s
            elif now_s - self._unmet_s > WAITING_S:
                self._unmet_s = None
                self._shares.give_up()
        demands = self._shares.demands()
        thoughts = opinions(self._fleet, now_s)
        try:
            answer = await self._store.run(
                LOOK,
                [self._key],
                [
                    self._id,
                    int(self.config.stale_s * 1000),
                    _write(demands),
                    _write(thoughts) if thoughts else b"",
                ],
                within_s=max(self.config.refresh_s, self._store.config.op_s),
            )
            heard = _read(answer)
        except (StoreError, msgspec.DecodeError) as error:
            self._missed(error)
            return
        now_s = self._clock()
        if self.heard_s is None or heard.others != self.others:
            self.log.info(
                "{others} other gateway{s} share{verb} these backends",
                others=heard.others,
                s="" if heard.others == 1 else "s",
                verb="s" if heard.others == 1 else "",
            )
        self.others = heard.others
        self.heard_s = now_s
        self._shares.take(heard.granted, heard.busy, heard.others, heard.short)
        for text in heard.said if isinstance(heard.said, list) else ():
            try:
                take_hints(self._fleet, _read_opinions(text), now_s)
            except msgspec.DecodeError as error:
                self.log.warn("opinions of another gateway are not understood: {error}", error=str(error))

    def _missed(self, why: Exception) -> None:
        if self.others and isinstance(why, StoreDown):
            self._shares.loosen()
        if self.heard_s is not None and self._clock() - self.heard_s >= self.config.stale_s:
            self.log.warn("nothing is heard of the other gateways ({why}): caps hold for each", why=why)
            self.heard_s = None
            self.others = 0
            self._shares.forget()
