from __future__ import annotations

from math import inf
from random import Random

from llmgw.core.prefix import PLACES, PrefixIndex, landmarks
from llmgw.routing.ttft_model import Flight, Lane, Pace
from llmgw.values import Choice, FirstToken, HealthChanged, Started

NO_BLAME = frozenset(("client_gone", "busy", "loading", "dropped"))


class Settings:
    def __init__(self, **k):
        self.w = 0.02
        self.gamma = 0.2
        self.guess = 0.5
        self.cold = 2.0
        self.size = 10.0
        self.hold = 0.0
        self.home = 0.5
        self.spread = 0.02
        self.index = 32768
        self.seed = None
        self.slots = True
        self.conf = 1.0
        for a, b in k.items():
            assert hasattr(self, a)
            setattr(self, a, b)


class ExpectedTtft:
    observes = True

    def __init__(self, settings):
        self._settings = settings
        self._lanes = {}
        self._pace = Pace()
        self._index = PrefixIndex(settings.index)
        self._dice = Random(settings.seed)
        self._asked = {}
        self._flights = {}
        self._arrived = {}
        self._slots = {}

    def choose(self, request, candidates, now_s):
        lanes = self._lanes
        pace = self._pace
        settings = self._settings
        tokens = float(request.prompt_tokens) or 1.0
        marks = landmarks(request.prefix)
        costs = []
        full_kv = 0
        for each in candidates:
            lane = lanes.get(each.id)
            if lane is None:
                lane = lanes[each.id] = Lane(each.id, now_s)
            if lane.until_s <= now_s:
                lane.refresh(each, pace, now_s, settings)
            costs.append(lane.fixed_s + lane.per_token_s * tokens)
        credits = {}
        if marks:
            plateaus = self._index.match(marks)
            if plateaus:
                blocks = len(request.prefix)
                place = {each.id: i for i, each in enumerate(candidates)}
                for count, readers in plateaus:
                    share = (PLACES[count - 1] + 1) / blocks
                    for bid, read in readers.items():
                        i = place.get(bid)
                        if i is None or bid in credits:
                            continue
                        dist = self._index.distance(bid, read)
                        credit = share * self._index.belief(bid, dist)
                        credits[bid] = (share, dist, credit)
                        costs[i] -= lanes[bid].per_token_s * tokens * credit * settings.conf
        for i, each in enumerate(candidates):
            k = each.profile.kv_use
            if k is not None and k >= 0.95:
                costs[i] += 1e9
            lane = lanes[each.id]
            if lane.doubt and lane.doubted(now_s) > 0.5:
                if now_s < lane.trial_s:
                    costs[i] += 1e6
                else:
                    costs[i] = costs[i] * 0.2
        best = min(costs)
        limit = best * (1 + settings.spread) if best > 0 else best
        near = [i for i, c in enumerate(costs) if c <= limit]
        i = near[0] if len(near) == 1 else near[int(self._dice.random() * len(near))]
        chosen = candidates[i]
        lane = lanes[chosen.id]
        if lane.doubt:
            lane.trial_s = now_s + lane.pause_s
        share, dist, credit = credits.get(chosen.id, (0.0, 0, 0.0))
        f = Flight(chosen.id, tokens, max(1.0, tokens * (1 - credit)), marks)
        f.matched = share
        f.distance = dist
        if len(self._asked) > 4096:
            self._asked.clear()
        self._asked[request.id] = f
        if self._settings.slots and chosen.slots:
            f.slot = self._slot(chosen, marks, now_s)
        return Choice(chosen, f.slot, best, f"expected {best * 1000:.0f} ms, least of {len(candidates)}")

    def _slot(self, backend, marks, now_s):
        table = self._slots.get(backend.id)
        if table is None or len(table) != backend.slots:
            table = self._slots[backend.id] = [[(), -1e9, None] for _ in range(backend.slots)]
        best = None
        bs = -inf
        for n, (held, used, busy) in enumerate(table):
            if busy is not None:
                continue
            l = _lcp(held, marks)
            c = 0.0
            # value: reuse minus the loss of what would be overwritten
            from math import exp

            v = l - 0.5 * (len(held) - l) * exp((used - now_s) / 20.0)
            if v > bs or (v == bs and used < bu):
                best, bs, bu = n, v, used
        return best

    def observe(self, event):
        kind = type(event)
        if kind is HealthChanged:
            return self._health(event)
        lane = self._lanes.get(event.backend_id)
        if lane is None:
            lane = self._lanes[event.backend_id] = Lane(event.backend_id, event.at_s)
        now = event.at_s
        rid = event.request_id
        if kind is Started:
            f = self._asked.pop(rid, None)
            if f is None or f.backend_id != event.backend_id:
                f = Flight(event.backend_id, self._pace.uncached, self._pace.uncached, ())
            if rid in self._flights:
                return None
            self._flights[rid] = f
            lane.started(rid, f, now)
            if f.slot is not None:
                t = self._slots[lane.id][f.slot]
                if t[2] is None:
                    t[0] = f.marks
                    t[2] = rid
                else:
                    f.slot = None
        elif kind is FirstToken:
            f = self._flights.get(rid)
            if f is None or f.ttft_s is not None:
                return None
            lane.first_token(rid, f, now, event.ttft_s)
            if f.marks:
                self._index.insert(f.marks, lane.id, lane.told_slots or 8)
        else:
            f = self._flights.pop(rid, None)
            if f is None:
                return None
            lane.left(rid, f)
            if f.slot is not None:
                t = self._slots[lane.id][f.slot]
                if t[2] == rid:
                    t[1] = now
                    t[2] = None
            if event.ok:
                if event.reason == "done":
                    lane.succeeded(now)
                    self._learn(lane, f, event)
            elif event.reason not in NO_BLAME and not event.reason.startswith("status_4"):
                lane.failed(now)

    def _learn(self, lane, f, e):
        prompt = e.prompt_tokens if e.prompt_tokens is not None else f.prompt
        if e.cached_tokens is not None:
            u = max(1.0, prompt - e.cached_tokens)
            if f.matched:
                self._index.correct(lane.id, f.distance, min(1.0, e.cached_tokens / (f.matched * prompt)))
        else:
            u = f.tokens
        gap = None
        if e.output_tokens and e.output_tokens > 4 and f.ttft_s is not None:
            gap = (e.duration_s - f.ttft_s) / (e.output_tokens - 1)
        self._pace.answered(u, e.output_tokens)
        lane.answered(f, u, e.prompt_s, gap)

    def _health(self, event):
        lane = self._lanes.get(event.backend_id)
        if lane is None:
            return
        r = event.report
        if r.slots:
            lane.told_slots = r.slots
        if not r.alive:
            lane.dead = True
        elif getattr(lane, "dead", False):
            lane.dead = False
            lane.revived(event.at_s)
            self._index.forget(lane.id)
            self._slots.pop(lane.id, None)
        if r.busy_slots is not None:
            lane.others_are(max(0, r.busy_slots + (r.deferred or 0) - lane.own))
            own = sum(l.own for l in self._lanes.values())
            oth = sum(l.others for l in self._lanes.values())
            g = 1 + oth / own if own else 1.0
            self._pace.herd += 0.2 * (min(16, g) - self._pace.herd)
            if self._pace.herd < 1.15:
                self._pace.herd = 1.0

    def order(self, waiting, backend, now_s):
        arr = self._arrived
        best = 0
        bk = inf
        lane = self._lanes.get(backend.id)
        if lane is None:
            return 0
        q = lane.reading.slope
        for i, r in enumerate(waiting[:32]):
            t = arr.get(r.id)
            if t is None:
                t = arr[r.id] = now_s
            k = t + self._settings.size * q * r.prompt_tokens
            if k < bk:
                bk = k
                best = i
        arr.pop(waiting[best].id, None)
        return best


def _lcp(a, b):
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n
