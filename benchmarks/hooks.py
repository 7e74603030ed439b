"""What a hook costs: enabled, disabled, and the same event through the OTel SDK, prometheus_client and the seed.

All columns are measured in one process, interleaved, and compared by the ratio of their medians: absolute times mean
nothing on a shared machine. Exit status 1 when a target of the design is missed.

    python benchmarks/hooks.py [--repeats 15] [--calls 4000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import dropin
import prometheus_client as prom
import seed
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from moe_telemetry import Recorder
from moe_telemetry import catalog as c
from moe_telemetry.catalog import Kind, Metric
from moe_telemetry.testing import capture

Event = Callable[[], object]
"""One event; every column is called the same way, so that the call itself costs each the same."""


@dataclass(frozen=True)
class Case:
    """One event in every column; None where there is no counterpart. `most` is the limit against the seed."""

    name: str
    hook: Callable[[Recorder], Event]
    empty: Event
    sdk: Event
    client: Event
    seed: Event | None = None
    most: float | None = None


@dataclass(frozen=True)
class Row:
    """Medians in nanoseconds a call."""

    name: str
    enabled: float
    disabled: float
    empty: float
    sdk: float
    client: float
    seed: float | None
    most: float | None

    def misses(self) -> list[str]:
        """Targets of the design's section 5 that this row misses."""
        found = []
        if self.sdk / self.enabled < 25:
            found.append(f"{self.name}: {self.sdk / self.enabled:.1f} times cheaper than the SDK, at least 25 wanted")
        if self.disabled / self.empty > 1.5:
            found.append(f"{self.name}: disabled {self.disabled / self.empty:.2f} of an empty function, at most 1.5")
        if self.seed is not None and self.most is not None and self.enabled / self.seed > self.most:
            found.append(f"{self.name}: {self.enabled / self.seed:.2f} of the seed's function, at most {self.most}")
        return found


class Backends:
    """The catalog's instruments in the SDK and in prometheus_client, children bound once where that is possible."""

    def __init__(self) -> None:
        meter = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False).get_meter("benchmark")
        self._sdk: dict[str, Any] = {}
        self._client: dict[str, Any] = {}
        registry = prom.CollectorRegistry()
        for metric in c.CATALOG:
            keys = [label.prometheus for label in metric.labels]
            if metric.kind is Kind.HISTOGRAM:
                self._sdk[metric.name] = meter.create_histogram(
                    metric.name, metric.unit, explicit_bucket_boundaries_advisory=metric.bounds
                ).record
                self._client[metric.name] = prom.Histogram(
                    metric.prometheus, metric.help, keys, registry=registry, buckets=metric.bounds
                )
            elif metric.kind is Kind.COUNTER:
                self._sdk[metric.name] = meter.create_counter(metric.name, metric.unit).add
                self._client[metric.name] = prom.Counter(metric.prometheus, metric.help, keys, registry=registry)

    def sdk(self, *records: tuple[Metric, float, dict[str, str]]) -> Event:
        """An event that makes these records through the SDK."""
        bound = [(self._sdk[metric.name], value, labels) for metric, value, labels in records]

        def event() -> None:
            for record, value, labels in bound:
                record(value, labels)

        return event

    def client(self, *records: tuple[Metric, float, dict[str, str]]) -> Event:
        """An event that makes these records through children of prometheus_client that were bound before."""
        bound = []
        for metric, value, labels in records:
            found = self._client[metric.name]
            child = found.labels(*labels.values()) if labels else found
            bound.append((child.observe if metric.kind is Kind.HISTOGRAM else child.inc, value))

        def event() -> None:
            for record, value in bound:
                record(value)

        return event


def _empty(*_: object) -> None:
    return None


def cases(backends: Backends) -> list[Case]:
    """Every hook of the hot path."""
    phase = {"phase": "decode"}
    layer = {**phase, "layer": "3"}

    def case(
        name: str,
        hook: Callable[[Recorder], Event],
        empty: Event,
        records: list[tuple[Metric, float, dict[str, str]]],
        baseline: Event | None = None,
        most: float | None = None,
    ) -> Case:
        return Case(name, hook, empty, backends.sdk(*records), backends.client(*records), baseline, most)

    def empty1(a: object) -> None: ...
    def empty2(a: object, b: object) -> None: ...
    def empty3(a: object, b: object, d: object) -> None: ...

    def union_records(size: int, residency: str) -> list[tuple[Metric, float, dict[str, str]]]:
        return [
            (c.UNION, size, {**phase, "seq": "1"}),
            (c.LAYER_EXPERTS, size, layer),
            (c.LAYER_CALLS, 1, {**layer, "residency": residency}),
        ]

    seconds = 1.3e-4
    found = [
        case(
            "prefetch",
            lambda rec: lambda: rec.prefetch("predict", seconds),
            lambda: empty2("predict", seconds),
            [(c.PREFETCH_DURATION, seconds, {**phase, "stage": "predict"})],
            lambda: seed.note_tprof("predict_s", seconds, count_key="predict_n"),
            2.0,
        ),
        case(
            "promote",
            lambda rec: lambda: rec.promote("take", seconds),
            lambda: empty2("take", seconds),
            [(c.PROMOTE_DURATION, seconds, {**phase, "step": "take"})],
            lambda: seed.note_tprof("take_s", seconds),
        ),
        case(
            "block",
            lambda rec: lambda: rec.block("fetch", perf_counter() - 0.0),
            lambda: empty2("fetch", perf_counter() - 0.0),
            [(c.BLOCK_DURATION, seconds, {**phase, "segment": "fetch"})],
            lambda: seed._tick("fetch", 0.0),
            2.0,
        ),
        case(
            "window",
            lambda rec: lambda: rec.window(seconds),
            lambda: empty1(seconds),
            [(c.PREFETCH_WINDOW, seconds, phase)],
        ),
        case(
            "union",
            lambda rec: lambda: rec.union(3, 10),
            lambda: empty2(3, 10),
            union_records(10, "unknown"),
            lambda: seed.note_union(1, 10, 3),
            0.6,
        ),
        case(
            "read",
            lambda rec: lambda: rec.read("demand", 98304, seconds),
            lambda: empty3("demand", 98304, seconds),
            [
                (c.READ_BYTES, 98304, {**phase, "source": "demand"}),
                (c.READ_DURATION, seconds, {**phase, "source": "demand"}),
            ],
        ),
        case("tokens", lambda rec: lambda: rec.tokens(1), lambda: empty1(1), [(c.TOKENS, 1, phase)]),
        case("evicted", lambda rec: lambda: rec.evicted(3, 1), lambda: empty2(3, 1), [(c.EVICTIONS, 1, layer)]),
    ]
    for experts, most in ((10, 0.5), (25, 0.3)):
        found.append(_routed_case(case, union_records, experts, most))
    return found


def _routed_case(case: Callable[..., Case], union_records: Callable[..., Any], experts: int, most: float) -> Case:
    """`routed` with a pool that holds nine of ten and a predictor that is right in eight of ten."""
    rng = random.Random(experts)
    routed = set(rng.sample(range(128), experts))
    resident = set(rng.sample(sorted(routed), experts - max(1, experts // 10))) | set(rng.sample(range(128), 90))
    predicted = set(rng.sample(sorted(routed), experts * 8 // 10)) | set(rng.sample(range(128), 3))
    ready = set(rng.sample(sorted(predicted), len(predicted) // 2))
    phase, layer = {"phase": "decode"}, {"phase": "decode", "layer": "3"}
    hits, recalled = len(routed & resident), len(routed & predicted)
    records = [
        *union_records(experts, "partial"),
        (c.LOOKUPS, hits, {**layer, "outcome": "hit"}),
        (c.LOOKUPS, experts - hits, {**layer, "outcome": "miss_unpredicted"}),
        (c.PREDICTOR_EXPERTS, recalled, {**layer, "outcome": "recalled"}),
        (c.PREDICTOR_EXPERTS, experts - recalled, {**layer, "outcome": "missed"}),
        (c.PREDICTOR_CANDIDATES, recalled, {**phase, "outcome": "used"}),
        (c.PREDICTOR_CANDIDATES, len(predicted) - recalled, {**phase, "outcome": "wasted"}),
        (c.PREFETCH_HITS, 2, phase),
    ]

    def empty5(a: object, b: object, d: object, e: object, f: object) -> None: ...

    return case(
        f"routed, {experts} experts",
        lambda rec: lambda: rec.routed(3, routed, resident, predicted, ready),
        lambda: empty5(3, routed, resident, predicted, ready),
        records,
        lambda: seed.note_miss_attrib(routed, predicted, resident, True, ready),
        most,
    )


def measure(case: Case, repeats: int, calls: int) -> Row:
    """Medians of `repeats` interleaved batches of `calls` calls a column; the slow backends get fewer."""
    on, off = Recorder(), Recorder()
    with capture(recorder=on):
        on.forward(1)
        on.pool(3, capacity=100)
        columns: list[tuple[Event | None, int]] = [
            (case.hook(on), calls),
            (case.hook(off), calls),
            (case.empty, calls),
            (case.sdk, max(1, calls // 20)),
            (case.client, max(1, calls // 4)),
            (case.seed, calls),
        ]
        times: list[list[float]] = [[] for _ in columns]
        for _ in range(repeats):
            seed.reset_samples()
            for taken, (event, number) in zip(times, columns, strict=True):
                if event is not None:
                    taken.append(timeit.timeit(event, number=number) / number * 1e9)
    median = [statistics.median(taken) if taken else None for taken in times]
    enabled, disabled, empty, sdk, client = (value or 0.0 for value in median[:5])
    return Row(case.name, enabled, disabled, empty, sdk, client, median[5], case.most)


def show(rows: list[Row]) -> None:
    """The table, in Markdown."""
    print("| hook | enabled ns | of the seed's | SDK / enabled | client / enabled | disabled / empty |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        of_seed = "-" if row.seed is None else f"{row.enabled / row.seed:.2f}"
        limit = "" if row.most is None else f" (at most {row.most})"
        print(
            f"| {row.name} | {row.enabled:.0f} | {of_seed}{limit} | {row.sdk / row.enabled:.0f} | "
            f"{row.client / row.enabled:.1f} | {row.disabled / row.empty:.2f} |"
        )


def main() -> int:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    backends = Backends()
    rows = [measure(case, options.repeats, options.calls) for case in cases(backends)]
    show(rows)
    stand_ins = dropin.measure(options.repeats, options.calls)
    dropin.show(stand_ins)
    if options.json:
        options.json.write_text(json.dumps([vars(row) for row in (*rows, *stand_ins)], indent=1))
    missed = [miss for row in rows for miss in row.misses()] + [miss for row in stand_ins for miss in row.misses()]
    print(*missed, sep="\n") if missed else print("every target met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
