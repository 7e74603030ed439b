"""Series as OpenTelemetry metric points, cumulative or delta: they are pre-aggregated."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)

from . import catalog as c
from . import host, series
from .catalog import Kind
from .series import Distribution, Family, LabelValues, Value
from .snapshot import run_info
from .store import Store

CUMULATIVE = AggregationTemporality.CUMULATIVE
DELTA = AggregationTemporality.DELTA


@dataclass(frozen=True)
class Temporality:
    """What a reader's exporter asked for, by kind of instrument."""

    counter: AggregationTemporality = CUMULATIVE
    histogram: AggregationTemporality = CUMULATIVE

    def of(self, kind: Kind) -> AggregationTemporality:
        """The temporality of a counter's or a histogram's points."""
        return self.histogram if kind is Kind.HISTOGRAM else self.counter


class Source:
    """All points of one telemetry, for any number of readers.

    `process` adds the process' own figures; only where the provider is ours, or an application's own
    instrumentation of its process would come out twice. In a forked child there are no points: the parent reports.
    """

    def __init__(self, store: Store, layers: bool = True, process: bool = True) -> None:
        self.store = store
        self._layers = layers
        self._process = process
        self._pid = os.getpid()
        self._attributes: dict[tuple[str, LabelValues], dict[str, str]] = {}

    @property
    def alive(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._pid

    def families(self) -> list[Family]:
        """Every series now, the host's and the collection's own included, the run info not."""
        begin = time.perf_counter()
        families = [*series.read(self.store, self._layers), *self._host()]
        size = sum(_series_of(family) for family in families) + 3  # these two gauges and the run info
        families.append(Family(c.SERIES, {(): size}))
        families.append(Family(c.COLLECT_DURATION, {(): time.perf_counter() - begin}))
        return families

    def _host(self) -> list[Family]:
        """Figures of the host: one that cannot be read, while the interpreter ends say, leaves the others."""
        found: list[Family] = []
        with suppress(Exception):
            found += host.mlx()
        # A forked child may take a snapshot, but psutil's lock may be held there for ever.
        if self._process and self.alive:
            with suppress(Exception):
                found += host.process(self._pid)
        return found

    def attributes(self, family: Family, values: LabelValues) -> dict[str, str]:
        """A point's attributes: one dict a series for the life of the telemetry, since readers only read it."""
        key = (family.metric.name, values)
        found = self._attributes.get(key)
        if found is None:
            found = self._attributes.setdefault(key, dict(zip(family.metric.keys, values, strict=True)))
        return found


def _series_of(family: Family) -> int:
    """Prometheus series: a histogram is its buckets, +Inf, sum and count."""
    per_point = len(family.metric.bounds) + 3 if family.metric.kind is Kind.HISTOGRAM else 1
    return per_point * len(family.series)


class Stream:
    """The points as one reader sees them: keeps what a delta reader was given last."""

    def __init__(self, source: Source, temporality: Temporality) -> None:
        self.source = source
        self._temporality = temporality
        self._start = int(source.store.identity.start_time * 1e9)
        self._since = self._start
        self._given: dict[tuple[str, LabelValues], Value] = {}
        self._lock = threading.Lock()

    def metrics(self) -> list[Metric]:
        """One collection. Locked: two collections of one reader at once would split a delta between them."""
        with self._lock:
            now = time.time_ns()
            families = [run_info(self.source.store), *self.source.families()]
            found = [self._metric(family, now) for family in families]
            self._since = now
            return [metric for metric in found if metric.data.data_points]

    def _metric(self, family: Family, now: int) -> Metric:
        metric = family.metric
        if metric.kind is Kind.GAUGE:
            return _metric(family, Gauge(list(self._numbers(family, family.series.items(), now, now))))
        temporality = self._temporality.of(metric.kind)
        changed = self._deltas(family) if temporality is DELTA else family.series.items()
        start = self._since if temporality is DELTA else self._start
        if metric.kind is Kind.COUNTER:
            points = list(self._numbers(family, changed, start, now))
            return _metric(family, Sum(points, aggregation_temporality=temporality, is_monotonic=True))
        return _metric(family, Histogram(list(self._histograms(family, changed, start, now)), temporality))

    def _deltas(self, family: Family) -> Iterator[tuple[LabelValues, Value]]:
        """What rose since the last collection; a series at rest has no delta point."""
        for values, value in family.series.items():
            key = (family.metric.name, values)
            last = self._given.get(key)
            if isinstance(value, Distribution):
                before = last if isinstance(last, Distribution) else Distribution((0,) * len(value.counts), 0)
                counts = tuple(now - then for now, then in zip(value.counts, before.counts, strict=True))
                if any(counts):
                    # Only now: a hook may stand between its count and its sum, which belongs to the next delta.
                    self._given[key] = value
                    yield values, Distribution(counts, value.sum - before.sum)
            else:
                rise = value - (last if isinstance(last, (int, float)) else 0)
                if rise:
                    self._given[key] = value
                    yield values, rise

    def _numbers(
        self, family: Family, found: Iterable[tuple[LabelValues, Value]], start: int, now: int
    ) -> Iterator[NumberDataPoint]:
        for values, value in found:
            if not isinstance(value, Distribution):
                yield NumberDataPoint(self.source.attributes(family, values), start, now, value)

    def _histograms(
        self, family: Family, found: Iterable[tuple[LabelValues, Value]], start: int, now: int
    ) -> Iterator[HistogramDataPoint]:
        bounds = family.metric.bounds
        for values, value in found:
            if isinstance(value, Distribution):
                yield HistogramDataPoint(
                    attributes=self.source.attributes(family, values),
                    start_time_unix_nano=start,
                    time_unix_nano=now,
                    count=value.count,
                    sum=value.sum,
                    bucket_counts=value.counts,
                    explicit_bounds=bounds,
                    min=None,  # type: ignore[arg-type]  # optional in OTLP, and cells do not keep them
                    max=None,  # type: ignore[arg-type]
                )


def _metric(family: Family, data: Sum | Gauge | Histogram) -> Metric:
    return Metric(name=family.metric.name, description=family.metric.help, unit=family.metric.unit, data=data)
