"""Two runs beside each other: what was set up differently, and the differences that matter first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import catalog as c
from .catalog import Metric
from .figures import PhaseFigures, Snapshot, Totals, acceptance, phase_figures
from .reports import DAMAGE, ReportError, report

POINT = 0.01
"""A share that differs by less is alike."""
FACTOR = 1.05
"""Another figure that differs by a smaller factor is alike."""
MOST_WEIGHT = math.log(4) / math.log(FACTOR)
"""A factor of 4 or a difference of 28 points: what is larger only says that the one figure was tiny."""
FEW_TOKENS = 100
"""Decode tokens below which chance decides much."""


@dataclass(frozen=True)
class Figure:
    """A figure of a run, and how it is told. `share`: of 1; `good`: more is better (1), worse (-1), or neither (0).

    `unit` stands behind the name, and `scale` turns the figure into it.
    """

    name: str
    of: Callable[[Run], float | None]
    good: int = 0
    share: bool = False
    unit: str = ""
    scale: float = 1.0


class Run:
    """A snapshot, seen as one phase of it."""

    def __init__(self, totals: Totals, phase: str) -> None:
        self.totals = totals
        self.phase = phase
        self.figures: PhaseFigures = phase_figures(totals, phase)

    def a_token(self, metric: Metric, **labels: str) -> float | None:
        """A counter by the phase's tokens; None where it counted nothing in the whole run."""
        if not self.totals.total(metric):
            return None
        return _ratio(self.totals.total(metric, phase=self.phase, **labels), self.figures.tokens)

    def seconds_a_token(self, metric: Metric) -> float | None:
        """A histogram's seconds by the phase's tokens."""
        if not self.totals.observed(metric)[0]:
            return None
        return _ratio(self.totals.observed(metric, phase=self.phase)[1], self.figures.tokens)

    def mean(self, metric: Metric, **labels: str) -> float | None:
        """Mean of a histogram."""
        count, total = self.totals.observed(metric, phase=self.phase, **labels)
        return _ratio(total, count)

    def above_pool(self) -> float | None:
        """Share of the layer calls whose union was above the pool."""
        if not self.totals.gauge(c.POOL_CAPACITY):
            return None
        calls = self.totals.total(c.LAYER_CALLS, phase=self.phase)
        return _ratio(self.totals.total(c.LAYER_OVERFLOWS, phase=self.phase), calls)


FIGURES: tuple[Figure, ...] = (
    Figure("tok/s in forward passes", lambda run: run.figures.tokens_per_second, 1),
    Figure("hit rate of lookups", lambda run: run.figures.hit_rate, 1, share=True),
    Figure("A: late (timing)", lambda run: run.figures.timing, -1, share=True),
    Figure("A: evicted again", lambda run: run.figures.evicted, -1, share=True),
    Figure("B: never predicted", lambda run: run.figures.unpredicted, -1, share=True),
    Figure("recall of the predictor", lambda run: run.figures.recall, 1, share=True),
    Figure("layer calls that all hit", lambda run: run.figures.all_hit, 1, share=True),
    Figure("unions above the pool", lambda run: run.above_pool(), -1, share=True),
    Figure("hits that a prefetch made", lambda run: run.figures.by_prefetch, share=True),
    Figure("union p99", lambda run: run.figures.union_p99, unit="experts"),
    Figure("union max", lambda run: run.figures.union_max, unit="experts"),
    Figure("stall", lambda run: run.figures.stall, -1, unit="ms a token", scale=1e3),
    Figure("demand reads", lambda run: run.a_token(c.READ_BYTES, source="demand"), -1, unit="MB a token", scale=1e-6),
    Figure("prefetch reads", lambda run: run.a_token(c.READ_BYTES, source="prefetch"), unit="MB a token", scale=1e-6),
    Figure("a demand read", lambda run: run.mean(c.READ_DURATION, source="demand"), -1, unit="ms", scale=1e3),
    Figure("a prefetch read", lambda run: run.mean(c.READ_DURATION, source="prefetch"), -1, unit="ms", scale=1e3),
    Figure(
        "prefetch host time", lambda run: run.seconds_a_token(c.PREFETCH_DURATION), -1, unit="ms a token", scale=1e3
    ),
    Figure("evictions", lambda run: run.a_token(c.EVICTIONS), -1, unit="a token"),
    Figure("predicted, left out", lambda run: run.a_token(c.PREFETCH_DROPPED), -1, unit="experts a token"),
    Figure("read for nothing", lambda run: run.a_token(c.PREFETCH_WASTED), -1, unit="MB a token", scale=1e-6),
    Figure("served degraded", lambda run: run.a_token(c.DEGRADED), -1, unit="experts a token"),
)
"""Of a phase, in the order in which those that differ alike are told."""
WHOLE: tuple[Figure, ...] = (
    Figure("draft tokens accepted", lambda run: acceptance(run.totals), 1, share=True),
    Figure("time to first token", lambda run: _mean(run.totals, c.TTFT), -1, unit="ms", scale=1e3),
    Figure("time an output token", lambda run: _mean(run.totals, c.TPOT), -1, unit="ms", scale=1e3),
    Figure(
        "peak of MLX memory",
        lambda run: max(run.totals.gauge(c.MLX_MEMORY_PEAK), default=None),
        -1,
        unit="GB",
        scale=1e-9,
    ),
    Figure(
        "process memory", lambda run: max(run.totals.gauge(c.PROCESS_MEMORY), default=None), -1, unit="GB", scale=1e-9
    ),
)
"""Of no phase."""


@dataclass(frozen=True)
class Difference:
    """A figure of both runs, in the figure's unit. `weight`: how many times what counts as alike; below 1 is alike.

    `second` is better than `first` where `better` is True, neither where it is None.
    """

    figure: Figure
    first: float | None
    second: float | None
    weight: float
    better: bool | None

    @property
    def alike(self) -> bool:
        """Whether the runs hardly differ."""
        return self.weight < 1


@dataclass(frozen=True)
class Comparison:
    """`setup`: name, first, second, of what differs about the runs themselves; `parts`: for decode, prefill and ""
    (neither) the differences, those that matter first; `notes`: what they mean, a sentence each."""

    setup: list[tuple[str, str, str]]
    parts: dict[str, list[Difference]]
    notes: list[str]


def compare(first: Snapshot, second: Snapshot) -> Comparison:
    """Two snapshots, of two runs; ReportError when one of them is none, or damaged."""
    reports = [report(first), report(second)]
    try:
        totals = [Totals(first), Totals(second)]
        parts = {
            phase: _differences(FIGURES, *(Run(each, phase) for each in totals)) for phase in ("decode", "prefill")
        }
        parts[""] = _differences(WHOLE, *(Run(each, "decode") for each in totals))
        setups = [_setup(found, of) for found, of in zip(reports, totals, strict=True)]
        return Comparison(
            [(name, one, other) for (name, one), (_, other) in zip(*setups, strict=True) if one != other],
            parts,
            _notes(reports, totals),
        )
    except DAMAGE as error:
        raise ReportError(f"a snapshot is damaged: {type(error).__name__}") from error


def _differences(figures: tuple[Figure, ...], first: Run, second: Run) -> list[Difference]:
    """The first figure leads where it differs: it is what all others are about."""
    found = []
    for figure in figures:
        values = [None if value is None else _sane(value) * figure.scale for value in map(figure.of, (first, second))]
        if values != [None, None]:
            found.append(_difference(figure, *values))
    return sorted(found, key=lambda each: (each.figure is not figures[0] or each.alike, -each.weight))


def _difference(figure: Figure, first: float | None, second: float | None) -> Difference:
    if first is None or second is None:
        return Difference(figure, first, second, 0.0, None)
    if figure.share:
        weight = abs(second - first) / POINT
    elif first == second:
        weight = 0.0
    else:
        weight = abs(math.log(second / first)) / math.log(FACTOR) if min(first, second) > 0 else MOST_WEIGHT
    better = (second > first) == (figure.good > 0) if figure.good and first != second else None
    return Difference(figure, first, second, min(weight, MOST_WEIGHT), better)


def _setup(found: dict[str, Any], totals: Totals) -> list[tuple[str, str]]:
    run = found["run"]
    pools = _pools(totals)
    slots = f"{min(pools):.0f} to {max(pools):.0f}" if len(set(pools)) > 1 else f"{pools[0]:.0f}" if pools else "-"
    lengths = [union["seq"] for union in found["phases"]["decode"]["unions"]]
    return [
        ("model", str(run["model"])),
        ("runtime", str(run["runtime"])),
        ("moe_telemetry", str(run["version"])),
        ("layers with a pool", str(len(pools))),
        ("pool, slots a layer", slots),
        ("tokens a decode pass", ", ".join(lengths) or "-"),
    ]


def _notes(reports: list[dict[str, Any]], totals: list[Totals]) -> list[str]:
    notes = []
    runs = [(found["run"]["run"], found["run"]["start_time"]) for found in reports]
    if runs[0] == runs[1]:
        notes.append("A and B are the same run at two times: what they have in common evens the figures out")
    for name, found, of in zip("AB", reports, totals, strict=True):
        floor, pools = found["pool_floor"], _pools(of)
        if floor and pools and floor["slots"] > min(pools):
            notes.append(
                f"{name}: the largest decode union is {floor['slots']} experts (seq {floor['seq']}), "
                f"its smallest pool {min(pools):.0f} slots: what a pass needs is evicted within it"
            )
        tokens = of.total(c.TOKENS, phase="decode")
        if tokens < FEW_TOKENS:
            notes.append(f"{name}: {tokens:.0f} decode tokens are few, chance decides much of these figures")
    return notes


def _pools(totals: Totals) -> list[float]:
    return [_sane(slots) for slots in totals.gauge(c.POOL_CAPACITY)]


def _sane(value: float) -> float:
    """What a run can have measured."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("no figure")
    return float(value)


def _mean(totals: Totals, metric: Metric) -> float | None:
    count, seconds = totals.observed(metric)
    return _ratio(seconds, count)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


# -- for people -----------------------------------------------------------------------------------------------


def amount(figure: Figure, value: float | None) -> str:
    """A figure of one run."""
    if value is None:
        return "-"
    if figure.share:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:,.3g}"


def change(difference: Difference) -> str:
    """What the second run makes of the first one's figure."""
    first, second = difference.first, difference.second
    if first is None or second is None:
        return f"only in {'B' if first is None else 'A'}"
    if difference.figure.share:
        return f"{(second - first) * 100:+.1f} points"
    if not first:
        return "from 0"
    return f"x {second / first:.2g}" if second > 3 * first else f"{(second / first - 1) * 100:+.0f}%"


def verdict(difference: Difference) -> str:
    """Whether that is better."""
    return {True: "better", False: "worse", None: ""}[difference.better]


def named(figure: Figure) -> str:
    """A figure's name with its unit."""
    return f"{figure.name}, {figure.unit}" if figure.unit else figure.name


def differing(differences: list[Difference]) -> list[Difference]:
    """Those to be told with their figures."""
    return [each for each in differences if not each.alike or None in (each.first, each.second)]


def alike(differences: list[Difference]) -> list[Difference]:
    """Those to be named only."""
    return [each for each in differences if each.alike and None not in (each.first, each.second)]


PARTS = {"decode": "decode", "prefill": "prefill", "": "whole run"}


def lines(found: Comparison, first: str, second: str) -> list[str]:
    """A comparison as text; `first` and `second` say what A and B are."""
    text = [f"A  {first}", f"B  {second}"]
    if found.setup:
        text += ["", f"{'set up differently':<32}{'A':>18}{'B':>18}"]
        text += [f"  {name:<30}{one:>18}{other:>18}" for name, one, other in found.setup]
    for part, words in PARTS.items():
        differences = found.parts[part]
        if told := differing(differences):
            text += ["", f"{words:<38}{'A':>9}{'B':>9}   B against A"]
            text += [
                f"  {named(each.figure):<36}{amount(each.figure, each.first):>9}{amount(each.figure, each.second):>9}"
                f"   {change(each)}{f', {verdict(each)}' if verdict(each) else ''}"
                for each in told
            ]
        if same := alike(differences):
            text += [*([] if told else [""]), f"  alike, {words}: {', '.join(each.figure.name for each in same)}"]
    return [*text, *(["", *found.notes] if found.notes else [])]
