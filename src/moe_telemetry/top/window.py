"""What a scrape adds to an earlier one: sums that are never negative, as `figures` takes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from moe_telemetry import catalog as c
from moe_telemetry.catalog import Kind, Metric

from .scrape import Labels, Scrape

ABOVE = int(c.UNION_BOUNDS[-1]) + 1
"""Stands for the union sizes above the top bound."""
LEAST_SECONDS = 1e-3


class Window:
    """Sums over a scrape's series, less those of an earlier scrape of the same run.

    A counter that fell was reset, and counts from 0. Another run (the process restarted, the model was loaded anew)
    counts from 0 as a whole: a new count above the old one would hide its reset. Without an earlier scrape the window
    is the run so far. `seconds` is how long it is (0 where that cannot be known), `restarted` whether the run is
    another one.
    """

    def __init__(self, now: Scrape, before: Scrape | None = None) -> None:
        self.now = now
        self.restarted = before is not None and before.info() != now.info()
        self._before = None if self.restarted else before
        self.seconds = self._length(before)
        self._added: dict[tuple[str, str], Mapping[Labels, float]] = {}

    def _length(self, before: Scrape | None) -> float:
        age = self.age
        if before is None:
            return age if age is not None and age > LEAST_SECONDS else 0.0
        between = max(self.now.at - before.at, LEAST_SECONDS)
        # Clocks of two hosts differ: a start in the future, or before the scrape of the run before, tells nothing.
        return age if self.restarted and age is not None and LEAST_SECONDS < age < between else between

    @property
    def age(self) -> float | None:
        """Seconds since the run's start by the two hosts' clocks; None where it has no start time."""
        starts = self.now.values(c.RUN_START_TIME)
        return self.now.wall - starts[0] if starts else None

    def has(self, metric: Metric) -> bool:
        """Whether the endpoint has the metric at all, be it at 0."""
        return self.now.has(metric)

    def total(self, metric: Metric, **labels: str) -> float:
        """Growth of a counter's series with these labels; 0 when there are none."""
        return self._sum(metric, "", labels)

    def observed(self, metric: Metric, **labels: str) -> tuple[int, float]:
        """Growth of count and sum of a histogram's series with these labels."""
        return round(self._sum(metric, "count", labels)), self._sum(metric, "sum", labels)

    def gauge(self, metric: Metric, **labels: str) -> list[float]:
        """Values of a gauge's series with these labels, now."""
        return self.now.values(metric, **labels)

    def unions(self, phase: str, **labels: str) -> Counter[int]:
        """Layer calls by the upper bound of their bucket: the union's size to 64, `ABOVE` above the top bound."""
        wanted = frozenset({"phase": phase, **labels}.items())
        cumulative: dict[float, float] = {}
        for found, value in self.added(c.UNION, "bucket").items():
            if wanted <= found:
                bound = float(dict(found)["le"])
                cumulative[bound] = cumulative.get(bound, 0.0) + value
        sizes: Counter[int] = Counter()
        below = 0.0
        for bound in sorted(cumulative):
            sizes[ABOVE if math.isinf(bound) else int(bound)] = round(cumulative[bound] - below)
            below = cumulative[bound]
        return +sizes

    def by(self, key: str, metric: Metric, **labels: str) -> dict[str, float]:
        """Growth of a counter's series with these labels by the value of another label, where they have it."""
        sums: dict[str, float] = {}
        wanted = frozenset(labels.items())
        for found, value in self.added(metric).items():
            if wanted <= found and (of := next((text for name, text in found if name == key), None)) is not None:
                sums[of] = sums.get(of, 0.0) + value
        return sums

    def added(self, metric: Metric, part: str = "") -> Mapping[Labels, float]:
        """Growth of each series of a counter, or of a part of a histogram."""
        key = (metric.name, part)
        if key not in self._added:
            self._added[key] = self._subtract(metric, part)
        return self._added[key]

    def _sum(self, metric: Metric, part: str, labels: dict[str, str]) -> float:
        wanted = frozenset(labels.items())
        return sum(value for found, value in self.added(metric, part).items() if wanted <= found)

    def _subtract(self, metric: Metric, part: str) -> Mapping[Labels, float]:
        now = self.now.named(metric, part)
        if self._before is None:
            return now
        before = self._before.named(metric, part)
        reset = self._reset(metric)
        return {
            labels: value - (0.0 if _series(labels) in reset else before.get(labels, 0.0))
            for labels, value in now.items()
        }

    def _reset(self, metric: Metric) -> set[Labels]:
        """Series that fell: of a histogram the count decides for all of its parts, which are of one moment."""
        part = "count" if metric.kind is Kind.HISTOGRAM else ""
        assert self._before is not None
        before = self._before.named(metric, part)
        return {labels for labels, value in self.now.named(metric, part).items() if value < before.get(labels, 0.0)}


def _series(labels: Labels) -> Labels:
    """Labels of the histogram that a bucket belongs to."""
    return frozenset(pair for pair in labels if pair[0] != "le")
