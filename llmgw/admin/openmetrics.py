"""The text format of OpenMetrics 1.0.0, made of Prometheus' own, for the sake of exemplars.

:source: OpenMetrics 1.0.0 (sections "Text format", "Exemplars"): a counter's
    metadata stands under its name without ``_total``, the text ends in ``# EOF``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from llmgw.admin.exposition import number

CONTENT_TYPE = b"application/openmetrics-text; version=1.0.0; charset=utf-8"

_head = re.compile(r"^# TYPE (\S+)_total counter$", re.MULTILINE)


class Exemplar(Struct, frozen=True):
    """One request that stands for a bucket.

    :param labels: ready made text.
    :param at: Unix seconds.
    """

    labels: str
    value: float
    at: float


def openmetrics(text: str, exemplars: Mapping[str, Exemplar]) -> str:
    """``text`` of the format 0.0.4 in the other form.

    :param exemplars: by the text of a sample's line up to its value.
    """
    for name in _head.findall(text):
        text = text.replace(f"# HELP {name}_total ", f"# HELP {name} ", 1)
    text = _head.sub(r"# TYPE \1 counter", text)
    if exemplars:
        lines = text.split("\n")
        for index, line in enumerate(lines):
            before, space, _ = line.rpartition(" ")
            found = exemplars.get(before + space)
            if found is not None:
                lines[index] = f"{line} # {{{found.labels}}} {number(found.value)} {found.at:.3f}"
        text = "\n".join(lines)
    return f"{text}# EOF\n"
