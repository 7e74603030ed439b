"""Figures a person reads, from a snapshot or from the difference of two: ratios, rates and quantiles by phase.

The process itself exports only counters; this is for what is shown in a terminal.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from . import catalog as c
from .catalog import Metric

Snapshot = dict[str, Any]


class Sums(Protocol):
    """What figures are made of: sums over the series of a time, wherever they were read."""

    def total(self, metric: Metric, **labels: str) -> float:
        """Sum of a counter's series with these labels; 0 when there are none."""

    def observed(self, metric: Metric, **labels: str) -> tuple[int, float]:
        """Count and sum of a histogram's series with these labels."""

    def gauge(self, metric: Metric, **labels: str) -> list[float]:
        """Values of a gauge's series with these labels, now."""

    def unions(self, phase: str) -> Counter[int]:
        """Layer calls by union size, over all layers and sequence lengths of a phase."""


class Totals:
    """Sums over a snapshot's series, less those of an earlier snapshot of the same run."""

    def __init__(self, now: Snapshot, before: Snapshot | None = None) -> None:
        self._now = now
        self._before = before

    def total(self, metric: Metric, **labels: str) -> float:
        """Sum of a counter's series with these labels; 0 when there are none."""
        return self._sum(metric, "value", labels)

    def observed(self, metric: Metric, **labels: str) -> tuple[int, float]:
        """Count and sum of a histogram's series with these labels."""
        return int(self._sum(metric, "count", labels)), self._sum(metric, "sum", labels)

    def gauge(self, metric: Metric, **labels: str) -> list[float]:
        """Values of a gauge's series with these labels, now."""
        return [series["value"] for series in _series(self._now, metric, labels)]

    def unions(self, phase: str) -> Counter[int]:
        """Layer calls by union size, over all layers and sequence lengths of a phase."""
        sizes = _union_sizes(self._now, phase)
        if self._before is not None:
            sizes.subtract(_union_sizes(self._before, phase))
        return +sizes

    def _sum(self, metric: Metric, field: str, labels: dict[str, str]) -> float:
        found: float = sum(series[field] for series in _series(self._now, metric, labels))
        if self._before is not None:
            found -= sum(series[field] for series in _series(self._before, metric, labels))
        return found


def _series(snapshot: Snapshot, metric: Metric, labels: dict[str, str]) -> list[dict[str, Any]]:
    found = snapshot["metrics"].get(metric.name, {"series": []})["series"]
    return [series for series in found if labels.items() <= series["labels"].items()]


def _union_sizes(snapshot: Snapshot, phase: str) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for row in snapshot["unions"].get(phase, {}).values():
        for by_size in row["layers"].values():
            for size, times in by_size.items():
                sizes[int(size)] += times
    return sizes


def nearest_rank(sizes: Counter[int], q: float) -> int | None:
    """The smallest value that at least a share `q` of the observations does not exceed; None without any."""
    rank = math.ceil(q * sizes.total())
    for size in sorted(sizes):
        rank -= sizes[size]
        if rank <= 0 and sizes[size]:
            return size
    return None


@dataclass(frozen=True)
class PhaseFigures:
    """One phase of a run or of a window of it; None where nothing was recorded that could tell.

    `tokens_per_second` is per second of forward time: idle is not slow. Shares of lookups: `hit_rate`, `timing`,
    `evicted`, `unpredicted`. Shares of hits: `reuse`, `by_prefetch`. Unions in experts, `stall` in seconds a token.
    """

    tokens: int
    tokens_per_second: float | None
    hit_rate: float | None
    timing: float | None
    evicted: float | None
    unpredicted: float | None
    reuse: float | None
    by_prefetch: float | None
    recall: float | None
    all_hit: float | None
    union_p99: int | None
    union_max: int | None
    stall: float | None


def phase_figures(totals: Sums, phase: str) -> PhaseFigures:
    """The figures of one phase."""
    tokens = totals.total(c.TOKENS, phase=phase)
    _, busy = totals.observed(c.FORWARD_DURATION, phase=phase)
    _, stalled = totals.observed(c.STALL_DURATION, phase=phase)
    outcomes = {outcome: totals.total(c.LOOKUPS, phase=phase, outcome=outcome) for outcome in c.OUTCOMES}
    lookups = sum(outcomes.values())
    by_prefetch = totals.total(c.PREFETCH_HITS, phase=phase)
    recalled = totals.total(c.PREDICTOR_EXPERTS, phase=phase, outcome="recalled")
    routed = totals.total(c.PREDICTOR_EXPERTS, phase=phase)
    calls = {residency: totals.total(c.LAYER_CALLS, phase=phase, residency=residency) for residency in c.RESIDENCIES}
    known = sum(calls.values()) - calls["unknown"]
    unions = totals.unions(phase)
    hits = outcomes["hit"]
    return PhaseFigures(
        tokens=int(tokens),
        tokens_per_second=_ratio(tokens, busy),
        hit_rate=_ratio(hits, lookups),
        timing=_ratio(outcomes["miss_timing"], lookups),
        evicted=_ratio(outcomes["miss_evicted"], lookups),
        unpredicted=_ratio(outcomes["miss_unpredicted"], lookups),
        reuse=_ratio(hits - by_prefetch, hits),
        by_prefetch=_ratio(by_prefetch, hits),
        recall=_ratio(recalled, routed),
        all_hit=_ratio(calls["all_hit"] + calls["bypassed"], known),
        union_p99=nearest_rank(unions, 0.99),
        union_max=max(unions, default=None),
        stall=_ratio(stalled, tokens),
    )


def acceptance(totals: Sums) -> float | None:
    """Share of draft tokens that verification accepted."""
    return _ratio(totals.total(c.SPECULATION_TOKENS, outcome="accepted"), totals.total(c.SPECULATION_TOKENS))


def smallest_pool(totals: Sums) -> int | None:
    """Slots of the layer that has the fewest."""
    capacities = totals.gauge(c.POOL_CAPACITY)
    return int(min(capacities)) if capacities else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
