"""What a scrape costs: the endpoint against prometheus_client with the same series, and the decode steps it overlaps.

Exit status 1 when a target of the design is missed.

    python benchmarks/scrape.py [--scrapes 60] [--seconds 30] [--pairs 9]
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.parser import text_string_to_metric_families

import moe_telemetry as mt
from moe_telemetry import rounds
from moe_telemetry.endpoint import Endpoint
from moe_telemetry.processes import PARENT_VARIABLE

LAYERS = 48
SCRAPE_INTERVAL = 5.0
Span = tuple[float, float]


def fill(recorder: mt.Recorder) -> None:
    """Every metric of the default catalog, both phases, 48 layers."""
    for layer in range(LAYERS):
        recorder.pool(layer, capacity=64, resident=60)
    for phase, tokens in (("prefill", 512), ("decode", 1), ("decode", 3), ("decode", 4)):
        recorder.forward(tokens, phase=phase)
        step(recorder, tokens, native=0)
        recorder.forward_done(0.05)
    recorder.request(0.5, 4.5, 9)


def step(recorder: mt.Recorder, tokens: int, native: int) -> None:
    """One pass; `native` bytes are hashed a layer without the interpreter lock, as a runtime's kernels run."""
    data = bytes(native)
    for layer in range(LAYERS):
        if native:
            hashlib.sha256(data)
        recorder.routed(layer, {1, 2, 3, layer}, resident={1, 2}, predicted={1, 3}, ready={1})
        for stage in ("predict", "submit", "promote"):
            recorder.prefetch(stage, 0.0001)
        for segment in ("route", "pyremap", "fetch", "matmul", "combine"):
            recorder.block(segment, 0.0002)
        recorder.block_call()
        recorder.read("demand", 4096, 0.001)
        recorder.evicted(layer)
    recorder.tokens(tokens)


def fetch(url: str) -> bytes:
    asked = urllib.request.Request(url + "/metrics", headers={"Accept": "text/plain;version=0.0.4"})
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


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Ratio:
    """What was compared, the ratio, and the most that it may be."""

    what: str
    value: float
    most: float


def compare_scrapes(count: int) -> Ratio:
    """Scrapes of the two endpoints in turn."""
    recorder = mt.Recorder()
    with mt.start(model="m", port=0, recorder=recorder, num_layers=LAYERS) as telemetry:
        fill(recorder)
        url = str(telemetry.url)
        text = fetch(url).decode()
        other = Endpoint(replica(text), telemetry.snapshot, "127.0.0.1", 0)
        other.serve()
        lines = [
            sum(not line.startswith("#") for line in fetch(each).decode().splitlines()) for each in (url, other.url)
        ]
        ours, theirs = [], []
        burst, rounds.BURST = rounds.BURST, float("inf")  # a scrape is measured, not the rest behind the one before
        for _ in range(count):
            ours.append(timed(lambda: fetch(url)))
            theirs.append(timed(lambda: fetch(other.url)))
        rounds.BURST = burst
        other.close()
    assert lines[0] == lines[1]
    ratio = statistics.median(ours) / statistics.median(theirs)
    return Ratio(f"scrape of {lines[0]:,} samples / prometheus_client with the same", ratio, 1.1)


def _scraper(url: str, interval: float, wanted: Event, ended: Event, spans: Any) -> None:
    """In a process of its own, so that the client takes nothing from the one that is measured."""
    while not ended.is_set():
        if wanted.is_set():
            begin = time.perf_counter()
            fetch(url)
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


def decode(recorder: mt.Recorder, seconds: float) -> list[Span]:
    """Decode steps of about 25 ms for so long: begin and end of each."""
    found = []
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        recorder.forward(1)
        step(recorder, 1, native=600_000)
        recorder.forward_done(time.perf_counter() - begin)
        found.append((begin, time.perf_counter()))
    return found


def compare_steps(seconds: float, pairs: int) -> list[Ratio]:
    """Steps that overlap a scrape against the others, and blocks with a scrape every 5 s against blocks without."""
    recorder = mt.Recorder()
    with mt.start(model="m", port=0, recorder=recorder, num_layers=LAYERS) as telemetry:
        fill(recorder)
        with scraped(str(telemetry.url), 1.0) as (wanted, spans):
            wanted.set()
            steps = decode(recorder, seconds)
            seen = _drain(spans)
        overlapping = [end - begin for begin, end in steps if any(begin < to and end > since for since, to in seen)]
        clear = [end - begin for begin, end in steps if not any(begin < to and end > since for since, to in seen)]
        with scraped(str(telemetry.url), SCRAPE_INTERVAL) as (wanted, _):
            ratios = [_pair(recorder, wanted, scraped_first=bool(pair % 2)) for pair in range(pairs)]
    return [
        Ratio(
            f"median decode step, overlapping a scrape ({len(overlapping)}) / not ({len(clear)})",
            statistics.median(overlapping) / statistics.median(clear),
            1.5,
        ),
        Ratio(
            f"mean decode step, a scrape every 5 s / none ({pairs} pairs, {min(ratios):.3f} to {max(ratios):.3f})",
            statistics.median(ratios),
            1.01,
        ),
    ]


def _pair(recorder: mt.Recorder, wanted: Event, scraped_first: bool) -> float:
    """Mean step of a block with scrapes over that of a block without, one right behind the other."""
    means = {}
    for scraping in (scraped_first, not scraped_first):
        (wanted.set if scraping else wanted.clear)()
        means[scraping] = statistics.fmean(end - begin for begin, end in decode(recorder, SCRAPE_INTERVAL))
    return means[True] / means[False]


def _drain(spans: Any) -> list[Span]:
    time.sleep(0.5)
    found = []
    while not spans.empty():
        found.append(spans.get())
    return found


def main() -> int:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scrapes", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=30.0, help="of decode with a scrape a second")
    parser.add_argument("--pairs", type=int, default=9, help="of blocks of 5 s")
    options = parser.parse_args()
    found = [compare_scrapes(options.scrapes), *compare_steps(options.seconds, options.pairs)]
    print("| what | ratio | at most |")
    print("|---|---|---|")
    for ratio in found:
        print(f"| {ratio.what} | {ratio.value:.3f} | {ratio.most} |")
    return 0 if all(ratio.value <= ratio.most for ratio in found) else 1


if __name__ == "__main__":
    sys.exit(main())
