"""A picture of several runs; needs the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.simulation.run import Result

FORMATS = ("png", "svg")


def draw(results: Mapping[str, Result], path: str, title: str = "") -> None:
    """Distribution of the time to first token, and who answered how much, by router.

    :param path: ends in one of :data:`FORMATS`.
    :raise ModuleNotFoundError: the extra is not installed.
    :raise OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, result in results.items():
        times = sorted(each.ttft_s * 1000.0 for each in result.records if each.ttft_s is not None)
        if times:
            left.step(times, [(rank + 1) / len(times) for rank in range(len(times))], label=name)
    left.set_xscale("log")
    left.set_xlabel("time to first token, ms")
    left.set_ylabel("share of requests at or below")
    left.set_ylim(0.0, 1.0)
    left.grid(alpha=0.3)
    if results:
        left.legend(fontsize="small")
    names = list(results)
    bottom = [0.0] * len(names)
    nodes = list(dict.fromkeys(node for result in results.values() for node in result.nodes))
    for node in nodes:
        shares = []
        for result in results.values():
            asked = [each.node for each in result.records if each.asked]
            shares.append(asked.count(node) / len(asked) if asked else 0.0)
        right.barh(names, shares, left=bottom, label=node)
        bottom = [one + other for one, other in zip(bottom, shares, strict=True)]
    right.invert_yaxis()
    right.set_xlabel("share of requests")
    right.set_xlim(0.0, 1.0)
    if len(nodes) <= 12:
        right.legend(fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    if title:
        figure.suptitle(title)
    figure.savefig(path)
