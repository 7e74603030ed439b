"""A process with the default catalog to scrape, prometheus_client with the same series, and a scraper beside it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.parser import text_string_to_metric_families

import moe_telemetry as mt
from moe_telemetry.catalog import SEGMENTS, STAGES, STEPS
from moe_telemetry.processes import PARENT_VARIABLE

LAYERS = 48
ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""What Prometheus asks for, with gzip."""
Span = tuple[float, float]
"""Begin and end, by time.perf_counter, which all processes of a host share."""


def fill(recorder: mt.Recorder, layers: int = LAYERS) -> None:
    """Every metric of the default catalog, both phases."""
    for layer in range(layers):
        recorder.pool(layer, capacity=64, resident=60)
    for phase, tokens in (("prefill", 512), ("decode", 1), ("decode", 3), ("decode", 4)):
        recorder.forward(tokens, phase=phase)
        step(recorder, tokens, native=0, layers=layers)
        recorder.forward_done(0.05)
    recorder.request(0.5, 4.5, 9)


def step(recorder: mt.Recorder, tokens: int, native: int, layers: int = LAYERS) -> None:
    """One pass; `native` bytes are hashed a layer without the interpreter lock, as a runtime's kernels run."""
    data = bytes(native)
    for layer in range(layers):
        if native:
            hashlib.sha256(data)
        recorder.routed(layer, {1, 2, 3, layer}, resident={1, 2}, predicted={1, 3}, ready={1})
        for stage in STAGES:
            recorder.prefetch(stage, 0.0001)
        for stage in STEPS:
            recorder.promote(stage, 0.0001)
        recorder.window(0.01)
        for segment in SEGMENTS:
            recorder.block(segment, 0.0002)
        recorder.block_call()
        recorder.read("demand", 4096, 0.001)
        recorder.evicted(layer)
    recorder.tokens(tokens)


def fetch(url: str, encoding: str = "identity", accept: str = "text/plain;version=0.0.4") -> bytes:
    """The body of a scrape."""
    headers = {"Accept": accept, "Accept-Encoding": encoding}
    asked = urllib.request.Request(url + "/metrics", headers=headers)
    with urllib.request.urlopen(asked, timeout=30) as reply:
        body: bytes = reply.read()
    return body


def replica(text: str) -> CollectorRegistry:
    """prometheus_client's own metrics with the series and values of an exposition."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    for family in text_string_to_metric_families(text):
        keys = sorted({key for sample in family.samples for key in sample.labels} - {"le"})
        if family.type == "histogram":
            _replicate_histogram(registry, family, keys)
            continue
        kind = Counter if family.type == "counter" else Gauge
        metric = kind(family.name, family.documentation, keys, registry=registry)
        for sample in family.samples:
            child = metric.labels(**sample.labels) if keys else metric
            child.inc(sample.value)
    return registry


def _replicate_histogram(registry: CollectorRegistry, family: Any, keys: list[str]) -> None:
    bounds = sorted({float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels})
    metric = Histogram(family.name, family.documentation, keys, registry=registry, buckets=bounds)
    last: dict[tuple[str, ...], float] = {}
    for sample in family.samples:
        child: Any = metric.labels(*(sample.labels[key] for key in keys)) if keys else metric
        if sample.name.endswith("_sum"):
            child._sum.set(sample.value)
        elif "le" in sample.labels:
            labels = tuple(sample.labels[key] for key in keys)
            child._buckets[bounds.index(float(sample.labels["le"]))].set(sample.value - last.get(labels, 0.0))
            last[labels] = sample.value


def _scraper(url: str, interval: float, wanted: Event, ended: Event, spans: Any) -> None:
    """In a process of its own, so that the client takes nothing from the one that is measured."""
    while not ended.is_set():
        if wanted.is_set():
            begin = time.perf_counter()
            fetch(url, "gzip", ACCEPT)
            spans.put((begin, time.perf_counter()))
        ended.wait(interval)


@contextmanager
def scraped(url: str, interval: float) -> Iterator[tuple[Event, Any]]:
    """A client that scrapes while the event given is set, and the queue of its scrapes."""
    context = multiprocessing.get_context("spawn")
    wanted, ended, spans = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=_scraper, args=(url, interval, wanted, ended, spans))
    marked = os.environ.pop(PARENT_VARIABLE, None)  # a client has no hooks to be warned of
    process.start()
    if marked is not None:
        os.environ[PARENT_VARIABLE] = marked
    try:
        yield wanted, spans
    finally:
        ended.set()
        process.join()


def split(steps: list[Span], scrapes: list[Span]) -> tuple[list[float], list[float]]:
    """Seconds of the steps that overlap a scrape, and of the others."""
    found: tuple[list[float], list[float]] = ([], [])
    for begin, end in steps:
        overlapping = any(begin < until and end > since for since, until in scrapes)
        found[0 if overlapping else 1].append(end - begin)
    return found


def drained(spans: Any) -> list[Span]:
    """The spans of the scrapes so far."""
    time.sleep(0.5)
    found = []
    while not spans.empty():
        found.append(spans.get())
    return found
