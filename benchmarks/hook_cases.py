"""The events that `benchmarks/hooks.py` measures: a call of each hook, and what it stands for in other libraries."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx
import prometheus_client as prom
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from moe_telemetry import catalog as c
from moe_telemetry.catalog import Kind, Metric

Record = tuple[Metric, float, dict[str, str]]
Event = Callable[[], object]

SECONDS = 1.3e-4
PHASE = {"phase": "decode"}
LAYER = {**PHASE, "layer": "3"}
FOLLOWED = ", followed"
GEN_AI = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "r", "gen_ai.request.model": "m"}


@dataclass(frozen=True)
class Case:
    """A hook's call as source, with the names it needs; the records that the same event makes elsewhere; the seed's
    function as source, with the limit (`most`). `hot` events must be 25 times cheaper than the SDK's. `form` is the
    statement around the call."""

    name: str
    call: str
    records: tuple[Record, ...] = ()
    seed: str = ""
    most: float | None = None
    hot: bool = True
    names: dict[str, Any] = field(default_factory=lambda: {"s": SECONDS, "perf_counter": perf_counter, "t0": 0.0})
    form: str = "%s"

    def statement(self, of: str) -> str:
        """The source of one event; `of` is what has the hook, with its dot."""
        return self.form % f"{of}{self.call}"


class Backends:
    """The catalog's instruments in the SDK and in prometheus_client, children bound once where that is possible."""

    def __init__(self) -> None:
        meter = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False).get_meter("benchmark")
        registry = prom.CollectorRegistry()
        self._sdk: dict[str, Any] = {}
        self._client: dict[str, Any] = {}
        for metric in c.CATALOG:
            keys = [label.prometheus for label in metric.labels]
            name, text = metric.prometheus, metric.help
            if metric.kind is Kind.HISTOGRAM:
                bounds = metric.bounds
                histogram = meter.create_histogram(metric.name, metric.unit, explicit_bucket_boundaries_advisory=bounds)
                self._sdk[metric.name] = histogram.record
                self._client[metric.name] = prom.Histogram(name, text, keys, registry=registry, buckets=bounds)
            elif metric.kind is Kind.COUNTER:
                self._sdk[metric.name] = meter.create_counter(metric.name, metric.unit).add
                self._client[metric.name] = prom.Counter(name, text, keys, registry=registry)
            else:
                self._sdk[metric.name] = meter.create_gauge(metric.name, metric.unit).set
                self._client[metric.name] = prom.Gauge(name, text, keys, registry=registry)

    def sdk(self, records: tuple[Record, ...]) -> Event:
        """An event that makes these records through the SDK."""
        bound = [(self._sdk[metric.name], value, labels) for metric, value, labels in records]

        def event() -> None:
            for record, value, labels in bound:
                record(value, labels)

        return event

    def client(self, records: tuple[Record, ...]) -> Event:
        """An event that makes these records through children of prometheus_client that were bound before."""
        methods = {Kind.HISTOGRAM: "observe", Kind.COUNTER: "inc", Kind.GAUGE: "set"}
        bound = []
        for metric, value, labels in records:
            found = self._client[metric.name]
            child = found.labels(*labels.values()) if labels else found
            bound.append((getattr(child, methods[metric.kind]), value))

        def event() -> None:
            for record, value in bound:
                record(value)

        return event


def _union(size: int, residency: str) -> tuple[Record, ...]:
    return (
        (c.UNION, size, {**PHASE, "seq": "1"}),
        (c.LAYER_EXPERTS, size, LAYER),
        (c.LAYER_CALLS, 1, {**LAYER, "residency": residency}),
    )


def _routed(experts: int, most: float | None, followed: bool = False) -> Case:
    """With a pool that holds nine of ten and a predictor that is right in eight of ten; in a layer whose pool curve is
    `followed` or not."""
    rng = random.Random(experts)
    routed = set(rng.sample(range(128), experts))
    resident = set(rng.sample(sorted(routed), experts - max(1, experts // 10))) | set(rng.sample(range(128), 90))
    predicted = set(rng.sample(sorted(routed), experts * 8 // 10)) | set(rng.sample(range(128), 3))
    ready = set(rng.sample(sorted(predicted), len(predicted) // 2))
    hits, recalled = len(routed & resident), len(routed & predicted)
    records = (
        *_union(experts, "partial"),
        (c.LOOKUPS, hits, {**LAYER, "outcome": "hit"}),
        (c.LOOKUPS, experts - hits, {**LAYER, "outcome": "miss_unpredicted"}),
        *_recall(recalled, experts - recalled, len(predicted) - recalled),
        (c.PREFETCH_HITS, 2, PHASE),
    )
    names = {"experts": routed, "resident": resident, "predicted": predicted, "ready": ready}
    return Case(
        f"routed, {experts} experts{FOLLOWED if followed else ''}",
        f"routed({7 if followed else 3}, experts, resident, predicted, ready)",
        records,
        "note_miss_attrib(experts, predicted, resident, True, ready)",
        most,
        names=names,
    )


def _routed_array() -> tuple[Case, Case]:
    """Top-8 of 128 experts in passes of 48 layers, what is counted some passes later included. No limit holds for it:
    the others need to be told what it finds out."""
    known = _routed(8, 0.5)
    indices = mx.array([sorted(known.names["experts"])], dtype=mx.uint32)
    mx.eval(indices)
    names = {**known.names, "layer": itertools.cycle(range(48)), "indices": indices}
    call = "routed_array(next(layer), indices, 128%s)"
    return (
        Case("routed_array", call % "", _union(8, "unknown"), hot=False, names=names),
        Case("routed_array, with sets", call % ", resident, predicted, ready", known.records, hot=False, names=names),
    )


def _recall(recalled: int, missed: int, wasted: int) -> tuple[Record, ...]:
    return (
        (c.PREDICTOR_EXPERTS, recalled, {**LAYER, "outcome": "recalled"}),
        (c.PREDICTOR_EXPERTS, missed, {**LAYER, "outcome": "missed"}),
        (c.PREDICTOR_CANDIDATES, recalled, {**PHASE, "outcome": "used"}),
        (c.PREDICTOR_CANDIDATES, wasted, {**PHASE, "outcome": "wasted"}),
    )


CASES = (
    _routed(10, 0.5),
    _routed(25, 0.3),
    _routed(10, None, followed=True),
    _routed(25, None, followed=True),
    *_routed_array(),
    Case("union", "union(3, 10)", _union(10, "unknown"), "note_union(1, 10, 3)", 0.6),
    Case(
        "recall",
        "recall(3, predicted, experts)",
        _recall(8, 2, 3),
        names={"experts": set(range(10)), "predicted": set(range(8)) | {20, 21, 22}},
    ),
    Case(
        "prefetch",
        'prefetch("predict", s)',
        ((c.PREFETCH_DURATION, SECONDS, {**PHASE, "stage": "predict"}),),
        'note_tprof("predict_s", s, count_key="predict_n")',
        2.0,
    ),
    Case(
        "promote",
        'promote("take", s)',
        ((c.PROMOTE_DURATION, SECONDS, {**PHASE, "step": "take"}),),
        'note_tprof("take_s", s)',
    ),
    Case(
        "block",
        'block("fetch", perf_counter() - t0)',
        ((c.BLOCK_DURATION, SECONDS, {**PHASE, "segment": "fetch"}),),
        '_tick("fetch", t0)',
        2.0,
    ),
    Case("block_call", "block_call()", ((c.BLOCK_CALLS, 1, PHASE),)),
    Case("window", "window(s)", ((c.PREFETCH_WINDOW, SECONDS, PHASE),)),
    Case("stall", "stall(s)", ((c.STALL_DURATION, SECONDS, PHASE),)),
    Case(
        "read",
        'read("demand", 98304, s)',
        (
            (c.READ_BYTES, 98304, {**PHASE, "source": "demand"}),
            (c.READ_DURATION, SECONDS, {**PHASE, "source": "demand"}),
        ),
    ),
    Case("placed", "placed(2)", ((c.PREFETCH_PLACED, 2, PHASE),)),
    Case(
        "prefetch_dropped",
        'prefetch_dropped("unused", 1, 98304)',
        ((c.PREFETCH_DROPPED, 1, {**PHASE, "reason": "unused"}), (c.PREFETCH_WASTED, 98304, PHASE)),
    ),
    Case("evicted", "evicted(3, 1)", ((c.EVICTIONS, 1, LAYER),)),
    Case("degraded", 'degraded("skipped", 1)', ((c.DEGRADED, 1, {**PHASE, "mode": "skipped"}),)),
    Case("tokens", "tokens(1)", ((c.TOKENS, 1, PHASE),)),
    Case(
        "speculation",
        "speculation(2, 1)",
        ((c.SPECULATION_TOKENS, 1, {"outcome": "accepted"}), (c.SPECULATION_TOKENS, 1, {"outcome": "rejected"})),
    ),
    Case("forward", 'forward(1, "decode")'),
    Case("forward_done", "forward_done(s)", ((c.FORWARD_DURATION, SECONDS, {**PHASE, "seq": "1"}),)),
    Case(
        "pool",
        "pool(3, 100, 90)",
        ((c.POOL_CAPACITY, 100, {"layer": "3"}), (c.POOL_RESIDENT, 90, {"layer": "3"})),
        hot=False,
    ),
    Case(
        "request",
        "request(0.5, 4.5, 9)",
        ((c.TTFT, 0.5, GEN_AI), (c.TPOT, 0.5, GEN_AI), (c.REQUEST_DURATION, 4.5, GEN_AI)),
        hot=False,
    ),
    Case(
        "cumulative",
        'cumulative("moe.expert.read", 5, phase="decode", source="demand")',
        ((c.READ_BYTES, 1, {**PHASE, "source": "demand"}),),
        hot=False,
    ),
    Case(
        "timed",
        'timed(rec.block, "fetch")',
        ((c.BLOCK_DURATION, SECONDS, {**PHASE, "segment": "fetch"}),),
        hot=False,
        form="with %s: pass",
    ),
)
"""Every hook; the three before the last are called once a request, or by a poller."""
