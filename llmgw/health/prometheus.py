"""Health source ``prometheus``: figures from a page in Prometheus' text format.

The page is the backend's own (vLLM, SGLang, llama-server), or that of an exporter next to it, as
for GPUs. Only a handful of its thousands of lines matter, so this is not a full parser: names
are searched for as bytes, and only a bounded number of lines is parsed, since the page may have
a megabyte and the reactor waits.

Several series of one name (data-parallel engines, GPUs) are merged: counts are added, shares
averaged, and of context lengths the smallest is used.

Impossible values are ignored: NaN, negative ones, shares above 1, DCGM's 9.2e18 for "unknown".
A figure without any other value is not reported, and ``detail`` says why.

:source: Prometheus text exposition format 0.0.4. Names: vLLM
    ``v1/metrics/loggers.py`` and its documentation (v0.4 to v0.32), SGLang
    ``metrics/collector.py``, llama.cpp ``tools/server/README.md``, dcgm-exporter
    ``default-counters.csv`` and the notes of its release 4.9.0.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct
from zope.interface import implementer

from llmgw.errors import ConfigError, ConfigFault
from llmgw.health.polling import PollingSource, one_line, timing
from llmgw.interfaces import CONTRACT, IHealthSource, IHealthSourceFactory
from llmgw.values import HealthReport

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

    from llmgw.interfaces import IHealthTarget

READ_BYTES = 1 << 18
LINE_BYTES = 64
"""The work spent on one page; a line costs its length and a constant. Figures beyond that are left
out, not guessed."""


class Series(Struct, frozen=True):
    """What to look for.

    :param labels: pairs that a series must have, as they are written (escaped).
    :param scale: a value times this is the figure.
    """

    name: bytes
    labels: tuple[tuple[bytes, bytes], ...] = ()
    scale: float = 1.0


class Rule(Struct, frozen=True):
    """The range of a figure, and how several series are merged."""

    join: Callable[[list[float]], float]
    least: float
    most: float


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


_COUNT = Rule(sum, 0.0, 1e6)
_SHARE = Rule(_mean, 0.0, 1.01)  # that much is rounding; 37 is a percentage without its scale

FIGURES: Mapping[str, Rule] = {
    "slots": Rule(sum, 1.0, 1e6),
    "busy_slots": _COUNT,
    "deferred": _COUNT,
    "kv_use": _SHARE,
    "gpu_use": _SHARE,
    "context_length": Rule(min, 1.0, 1e9),
}
"""Fields of :class:`HealthReport` that can be read from a page."""

Wanted = Mapping[str, Sequence[Series]]
"""The selectors of each figure; the first one with a possible value counts."""

FORMATS: Mapping[str, Wanted] = {
    "vllm": {
        "busy_slots": [Series(b"vllm:num_requests_running")],
        "deferred": [Series(b"vllm:num_requests_waiting")],
        # The second is its name before v0.10.
        "kv_use": [Series(b"vllm:kv_cache_usage_perc"), Series(b"vllm:gpu_cache_usage_perc")],
    },
    "sglang": {
        "busy_slots": [Series(b"sglang:num_running_reqs")],
        "deferred": [Series(b"sglang:num_queue_reqs")],
        "kv_use": [Series(b"sglang:token_usage")],
        "context_length": [Series(b"sglang:context_len")],
    },
    "llama-server": {
        "busy_slots": [Series(b"llamacpp:requests_processing")],
        "deferred": [Series(b"llamacpp:requests_deferred")],
        "kv_use": [Series(b"llamacpp:kv_cache_usage_ratio")],  # older servers
    },
    "dcgm": {
        "gpu_use": [
            Series(b"DCGM_FI_DEV_GPU_UTIL", scale=0.01),
            Series(b"DCGM_FI_DEV_GPU_UTIL_RATIO"),  # since 4.9.0
            Series(b"DCGM_FI_PROF_GR_ENGINE_ACTIVE"),  # for a partitioned GPU (MIG) the others are blank
        ],
    },
}

# Quoted label values may hold anything, so a brace ends the labels only outside of them.
_LABELS = rb'(?:\{((?:[^"{}\n]*+"[^"\\\n]*+(?:\\.[^"\\\n]*+)*")*[^"{}\n]*+)\})?'
_SAMPLE = re.compile(_LABELS + rb"[ \t]++(\S{1,40}+)\s")
_PAIR = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"([^"\\]*+(?:\\.[^"\\]*+)*)"')
_SELECTOR = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*+)" + _LABELS)


class Page:
    """Reads some figures from one answer.

    :param body: may be anything.
    :ivar figures: arguments of a :class:`HealthReport`.
    :ivar doubt: what went wrong, for people.
    """

    def __init__(self, body: bytes, wanted: Wanted) -> None:
        self.figures: dict[str, float] = {}
        self.doubt = ""
        self._text = b"\n%b\n" % body
        self._left = READ_BYTES
        for name, places in wanted.items():
            figure = self._figure(name, places)
            if figure is not None:
                self.figures[name] = figure
        if not self.figures and not self.doubt:
            self.doubt = "none of its metrics is there"

    def _figure(self, name: str, places: Iterable[Series]) -> float | None:
        rule = FIGURES[name]
        doubt = ""
        for series in places:
            found = self._values(series)
            good = [value for value in found if rule.least <= value <= rule.most]  # NaN is not
            if good:
                joined = rule.join(good)
                return min(1.0, joined) if rule is _SHARE else round(min(joined, rule.most))
            if found:
                doubt = f"{series.name.decode()} is {found[0]:g}, no {name}"
        self.doubt = self.doubt or doubt
        return None

    def _values(self, series: Series) -> list[float]:
        text = self._text
        line = b"\n" + series.name
        found: list[float] = []
        at = text.find(line)
        while at >= 0:
            end = text.find(b"\n", at + len(line)) + 1
            self._left -= end - at + LINE_BYTES
            if self._left < 0:
                self.doubt = f"{series.name.decode()} has too many series"
                return []
            sample = _SAMPLE.match(text, at + len(line), end)
            if sample is not None and _fits(sample[1], series.labels):
                found.append(_number(sample[2]) * series.scale)
            at = text.find(line, end - 1)
        return found


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _fits(labels: bytes | None, wanted: tuple[tuple[bytes, bytes], ...]) -> bool:
    if not wanted:
        return True
    pairs = _PAIR.findall(labels or b"")
    return all(pair in pairs for pair in wanted)


def series(text: str, scale: float = 1.0) -> Series:
    """``name`` or ``name{label="value",…}`` as a :class:`Series`.

    :raise ValueError: it is neither. Only ``=`` is understood of PromQL's matchers.
    """
    match = _SELECTOR.fullmatch(text.encode())
    if match is not None:
        labels = match[2] or b""
        pairs = _PAIR.findall(labels)
        if not _PAIR.sub(b"", labels).strip(b" \t,"):
            return Series(match[1], tuple(pairs), scale)
    raise ValueError(f'must be like name or name{{label="value"}}, not {text!r}')


@implementer(IHealthSource)
class PrometheusHealth(PollingSource):
    """Alive while the page answers 200.

    :param path: with its query, if any.
    :param exporter: base URL of another server that has the page, ``""`` for the
        backend itself. ``{host}`` stands for the backend's host. It gets none of
        the backend's headers, since its credential is nobody else's business.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        interval_s: float,
        timeout_s: float,
        wanted: Wanted,
        path: str = "/metrics",
        exporter: str = "",
        dice: random.Random | None = None,
    ) -> None:
        super().__init__(reactor, interval_s, timeout_s, dice)
        self._wanted = wanted
        self._path = path
        self._exporter = exporter

    def start(self, target: IHealthTarget, report: Callable[[HealthReport], None]) -> None:
        """See :meth:`llmgw.interfaces.IHealthSource.start`."""
        if self._exporter:
            # Not sooner: any Twisted program may import this module, and Target needs treq and OpenSSL.
            from llmgw.health.target import Target

            host = urlsplit(target.url).hostname or ""
            base = self._exporter.replace("{host}", f"[{host}]" if ":" in host else host)
            target = Target(self._reactor, target.id, base, {})
        super().start(target, report)

    async def look(self) -> HealthReport:
        """One check."""
        status, body = await self.ask(self._path)
        if status != 200:
            return HealthReport(alive=False, detail=f"{status} from {self._path}")
        page = Page(body, self._wanted)
        detail = one_line(f"ok, but {page.doubt}" if page.doubt else "ok")
        figures: dict[str, Any] = page.figures
        return HealthReport(alive=True, detail=detail, **figures)


@implementer(IHealthSourceFactory)
class PrometheusHealthFactory:
    """Options: ``format`` (a key of :data:`FORMATS`; all of them if ``metrics`` is absent
    too), ``metrics`` (figure to selector or selectors), ``scale`` (figure to factor),
    ``path`` (``/metrics``) or ``url`` (of an exporter), ``interval_s`` (5, at least 2),
    ``timeout_s`` (2)."""

    name = "prometheus"
    description = "figures from a Prometheus page: vLLM, SGLang, llama-server, DCGM, any mapping"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], reactor: IReactorTime) -> PrometheusHealth:
        """:raise ConfigError: options are wrong."""
        faults: list[ConfigFault] = []
        wanted = _wanted(options, faults)
        exporter, path = _place(options, faults)
        try:
            interval_s, timeout_s = timing(options, ("format", "metrics", "scale", "path", "url"))
        except ConfigError as error:
            faults += error.faults
        if faults:
            raise ConfigError(faults)
        return PrometheusHealth(reactor, interval_s, timeout_s, wanted, path, exporter)


def _wanted(options: Mapping[str, Any], faults: list[ConfigFault]) -> Wanted:
    format = options.get("format")
    metrics = _table(options, "metrics", faults)
    scales = _table(options, "scale", faults)
    wanted: dict[str, list[Series]] = {}
    if format is None and "metrics" not in options:
        for each in FORMATS.values():
            for figure, places in each.items():
                wanted.setdefault(figure, []).extend(places)
    elif isinstance(format, str) and format in FORMATS:
        wanted.update({figure: list(places) for figure, places in FORMATS[format].items()})
    elif format is not None:
        faults.append(ConfigFault("format", f"must be one of {', '.join(FORMATS)}, not {format!r}"))
    for figure, scale in scales.items():
        if figure not in metrics:
            faults.append(ConfigFault(f"scale.{figure}", "is not among metrics"))
        elif isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 1e12:
            faults.append(ConfigFault(f"scale.{figure}", f"must be a number above 0, not {scale!r}"))
    for figure, told in metrics.items():
        texts: Sequence[Any] = told if isinstance(told, list | tuple) else [told]
        if figure not in FIGURES:
            faults.append(ConfigFault(f"metrics.{figure}", f"must be one of {', '.join(FIGURES)}"))
        elif not texts or not all(isinstance(text, str) for text in texts):
            faults.append(ConfigFault(f"metrics.{figure}", f"must be one selector or several, not {told!r}"))
        else:
            try:
                scale = scales.get(figure, 1.0)
                wanted[figure] = [series(text, scale) for text in texts]
            except ValueError as error:
                faults.append(ConfigFault(f"metrics.{figure}", str(error)))
    return wanted


def _table(options: Mapping[str, Any], key: str, faults: list[ConfigFault]) -> Mapping[str, Any]:
    table = options.get(key, {})
    if isinstance(table, Mapping) and (table or key not in options):
        return table
    faults.append(ConfigFault(key, f"must be a table of figures, not {table!r}"))
    return {}


def _place(options: Mapping[str, Any], faults: list[ConfigFault]) -> tuple[str, str]:
    """Base URL of the exporter, or ``""``, and the path."""
    path = options.get("path", "/metrics")
    if not (_is_plain(path) and path.startswith("/")):
        faults.append(ConfigFault("path", f"must be a path beginning with /, not {path!r}"))
    if "url" not in options:
        return "", path
    if "path" in options:
        faults.append(ConfigFault("path", "is part of url: give one of the two"))
    url = options["url"]
    try:
        return _split(url)
    except ValueError as error:
        faults.append(ConfigFault("url", str(error)))
        return "", path


def _split(url: Any) -> tuple[str, str]:
    """:raise ValueError: it is no such URL; the message never holds a password."""
    if not _is_plain(url):
        raise ValueError("must be an http(s) URL")
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError("must not hold a user or password")
    host = parts.netloc.replace("{host}", "host")
    if parts.scheme not in ("http", "https") or not re.fullmatch(
        r"([a-zA-Z0-9._-]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?", host
    ):
        raise ValueError(f"must be an http(s) URL, not {url!r}")
    if urlsplit(f"//{host}").port == 0 or parts.fragment:
        raise ValueError(f"has a bad port or a fragment: {url!r}")
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}", f"{parts.path or '/'}{query}"


def _is_plain(value: Any) -> bool:
    """Whether it can be put into a request line."""
    return isinstance(value, str) and value != "" and all("!" <= sign <= "~" for sign in value)
