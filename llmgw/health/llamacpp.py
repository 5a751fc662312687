"""Health source ``llamacpp``: what llama-server reports about itself.

Each check asks ``/health``, and then ``/slots`` and ``/metrics`` if the server has enabled them.
When the server has just come up, and about once a minute, ``/props`` and ``/v1/models`` are
asked, too. Only ``/health`` decides whether it is alive; the first further question without an
answer ends the check.

Other servers that answer HTTP are reported as alive with what they have returned, so that this
source is a safe default: only ``/props`` identifies a llama-server, and only the text of its
first page an Ollama.

:source: llama.cpp tools/server/README.md; its behaviour as observed on b11549.
    Ollama server/routes.go (GenerateRoutes).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from twisted.internet.defer import CancelledError
from zope.interface import implementer

from llmgw.errors import ConfigError, ConfigFault
from llmgw.health.model_list import UNREADABLE, is_compressed, positive, read_model_list
from llmgw.health.polling import PollingSource, timing
from llmgw.interfaces import CONTRACT, IHealthSource, IHealthSourceFactory
from llmgw.values import HealthReport

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

FACTS_EVERY_S = 60.0

_GAUGE = re.compile(
    rb"^llamacpp:(requests_deferred|requests_processing|kv_cache_usage_ratio)(?:\{[^}\n]*\})?[ \t]+(\S+)",
    re.M,
)


class _Generation(Struct):
    n_ctx: Any = None


class _Props(Struct):
    total_slots: Any = None
    role: Any = None
    is_sleeping: Any = None
    default_generation_settings: _Generation | None = None


class _Slot(Struct):
    is_processing: bool


_decode_props = msgspec.json.Decoder(_Props).decode
_decode_slots = msgspec.json.Decoder(list[_Slot]).decode

GOS_OWN_404 = b"404 page not found"
"""How a server in Go answers an unknown path; only such a server is asked whether it is an Ollama."""
OLLAMAS_PAGE = b"Ollama is running"

_NOTHING_TOLD = HealthReport(alive=True, detail="ok")


@implementer(IHealthSource)
class LlamaCppHealth(PollingSource):
    """Watches one llama-server.

    :param busy: ask ``/slots`` and ``/metrics``.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        interval_s: float,
        timeout_s: float,
        busy: bool = True,
        dice: random.Random | None = None,
    ) -> None:
        super().__init__(reactor, interval_s, timeout_s, dice)
        self._busy = busy
        # Counted in looks: the reactor's seconds are wall time, and can jump.
        self._facts_every = max(1, round(FACTS_EVERY_S / interval_s))
        self._forget()

    async def look(self) -> HealthReport:
        """One check."""
        try:
            status, body = await self.ask("/health")
        except Exception:
            self._forget()
            raise
        if status >= 500:
            self._forget()
            if status == 503 and b"Loading model" in body:
                return HealthReport(alive=True, loading=True, detail="loading its model")
            return HealthReport(alive=False, detail=f"{status} from /health")
        self._silent = False
        if self._looks_to_facts == 0:
            await self._learn()
        else:
            self._looks_to_facts -= 1
        if self._known.kind != "llama-server" or not self._busy:
            return self._known
        slots = await self._slots()
        gauges = await self._gauges()
        busy_slots = _count(gauges.get(b"requests_processing"))
        if slots:
            busy_slots = sum(slot.is_processing for slot in slots)
        kv_use = gauges.get(b"kv_cache_usage_ratio")
        return replace(
            self._known,
            slots=len(slots) or self._known.slots,
            busy_slots=busy_slots,
            deferred=_count(gauges.get(b"requests_deferred")),
            kv_use=None if kv_use is None else min(1.0, max(0.0, kv_use)),
        )

    def _forget(self) -> None:
        """It may be another server when it comes back."""
        self._known = _NOTHING_TOLD
        self._looks_to_facts = 0
        self._off: set[str] = set()
        self._silent = False

    async def _learn(self) -> None:
        """Ask what only changes with a restart. Without an answer the old values are kept, and it is
        asked again at the next check."""
        self._off.clear()
        known = self._known
        status, raw = await self._tell("/props")
        if status:
            known = replace(known, **self._facts_of(status, raw))
            if status == 404 and raw.strip() == GOS_OWN_404:
                status, raw = await self._tell("/")
                stays = not status and self._known.kind == "ollama"
                if stays or (status == 200 and raw.strip() == OLLAMAS_PAGE):
                    known = replace(known, kind="ollama")
        status, raw = await self._tell("/v1/models")
        if status:
            listed = read_model_list(raw) if status == 200 else None
            names = None if listed is None else listed.names
            length = None if listed is None else listed.context_length
            known = replace(known, models=names, context_length=known.context_length or length)
            if is_compressed(raw):
                known = replace(known, detail=f"ok, but {UNREADABLE}")
        self._known = known
        if not self._silent:
            self._looks_to_facts = self._facts_every - 1

    def _facts_of(self, status: int, raw: bytes) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "kind": None,
            "slots": None,
            "context_length": None,
            "detail": "ok",
            "role": None,
        }
        if status in (401, 403):
            facts["detail"] = f"ok, but {status} from /props: it wants another api_key_file"
        try:
            props = _decode_props(raw) if status == 200 else _Props()
        except (msgspec.DecodeError, RecursionError):
            props = _Props()
        slots = positive(props.total_slots)
        if slots is not None or props.role == "router":
            facts["kind"] = "llama-server"
            facts["role"] = "router" if props.role == "router" else None
            facts["slots"] = slots
            settings = props.default_generation_settings
            facts["context_length"] = None if settings is None else positive(settings.n_ctx)
            if props.is_sleeping is True:
                # Only /health, /props and the model list do not wake a sleeping server.
                self._off |= {"/slots", "/metrics"}
                facts["detail"] = "asleep"
        return facts

    async def _slots(self) -> list[_Slot]:
        status, raw = await self._tell("/slots")
        try:
            return _decode_slots(raw) if status == 200 else []
        except (msgspec.DecodeError, RecursionError):
            return []

    async def _gauges(self) -> dict[bytes, float]:
        status, raw = await self._tell("/metrics")
        found: dict[bytes, float] = {}
        for name, text in _GAUGE.findall(raw) if status == 200 else ():
            try:
                value = float(text)
            except ValueError:
                continue
            if math.isfinite(value):
                found[name] = value
        return found

    async def _tell(self, path: str) -> tuple[int, bytes]:
        """Status and body; status 0 where nothing was asked or nobody answered.

        It has answered ``/health``, so silence here does not matter. What is disabled (501, 404,
        403, or 400 in router mode) is not asked again until ``/props`` is.
        """
        if self._silent or path in self._off:
            return 0, b""
        try:
            status, body = await self.ask(path)
        except CancelledError:
            raise
        except Exception:
            self._silent = True
            return 0, b""
        if status != 200:
            self._off.add(path)
        return status, body


def _count(value: float | None) -> int | None:
    return None if value is None else max(0, int(value))


@implementer(IHealthSourceFactory)
class LlamaCppHealthFactory:
    """Options: ``interval_s`` (5, at least 2), ``timeout_s`` (2), ``busy`` (true; false
    leaves out ``/slots`` and ``/metrics``, which keep a server with
    ``--sleep-idle-seconds`` awake)."""

    name = "llamacpp"
    description = "llama-server's /health, /props, /slots, /metrics and /v1/models"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], reactor: IReactorTime) -> LlamaCppHealth:
        """:raise ConfigError: options are wrong."""
        busy = options.get("busy", True)
        faults = (
            [] if isinstance(busy, bool) else [ConfigFault("busy", f"must be true or false, not {busy!r}")]
        )
        try:
            interval_s, timeout_s = timing(options, ("busy",))
        except ConfigError as error:
            raise ConfigError([*faults, *error.faults]) from None
        if faults:
            raise ConfigError(faults)
        return LlamaCppHealth(reactor, interval_s, timeout_s, busy)
