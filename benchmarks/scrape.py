"""What a scrape costs: the endpoint against prometheus_client with the same series, and the decode steps it overlaps.

python benchmarks/scrape.py [--scrapes 60] [--seconds 40]
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.parser import text_string_to_metric_families

import moe_telemetry as mt
from moe_telemetry.endpoint import Endpoint

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


def compare_scrapes(count: int) -> None:
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
        for _ in range(count):
            ours.append(timed(lambda: fetch(url)))
            theirs.append(timed(lambda: fetch(other.url)))
        other.close()
    rows = (("moe_telemetry", lines[0], ours), ("prometheus_client", lines[1], theirs))
    print(f"{'scrape':<20}{'samples':>9}{'median ms':>11}{'p90 ms':>9}")
    for name, samples, times in rows:
        print(f"{name:<20}{samples:>9}{statistics.median(times) * 1e3:>11.1f}{_p90(times) * 1e3:>9.1f}")
    print(f"ratio of medians {statistics.median(ours) / statistics.median(theirs):.2f} (must be at most 1.1)\n")


def _p90(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.9)]


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
    process.start()
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


def compare_steps(seconds: float) -> None:
    recorder = mt.Recorder()
    with mt.start(model="m", port=0, recorder=recorder, num_layers=LAYERS) as telemetry:
        fill(recorder)
        with scraped(str(telemetry.url), 1.0) as (wanted, spans):
            wanted.set()
            steps = decode(recorder, seconds / 2)
            seen = _drain(spans)
        overlapping = [end - begin for begin, end in steps if any(begin < to and end > since for since, to in seen)]
        clear = [end - begin for begin, end in steps if not any(begin < to and end > since for since, to in seen)]
        with scraped(str(telemetry.url), SCRAPE_INTERVAL) as (wanted, _):
            means: dict[bool, list[float]] = {False: [], True: []}
            for block in range(max(2, int(seconds / 2 / SCRAPE_INTERVAL))):
                scraping = block % 2 == 1
                (wanted.set if scraping else wanted.clear)()
                means[scraping] += [end - begin for begin, end in decode(recorder, SCRAPE_INTERVAL)]
    print(f"{'decode step':<28}{'steps':>7}{'ms':>8}")
    print(f"{'median, overlaps a scrape':<28}{len(overlapping):>7}{statistics.median(overlapping) * 1e3:>8.1f}")
    print(f"{'median, others':<28}{len(clear):>7}{statistics.median(clear) * 1e3:>8.1f}")
    ratio = statistics.median(overlapping) / statistics.median(clear)
    print(f"ratio of medians {ratio:.2f} (must be at most 1.5)")
    for scraping, name in ((True, "mean, a scrape every 5 s"), (False, "mean, no scrape")):
        print(f"{name:<28}{len(means[scraping]):>7}{statistics.mean(means[scraping]) * 1e3:>8.2f}")
    print(f"ratio of means {statistics.mean(means[True]) / statistics.mean(means[False]):.3f} (must be at most 1.01)")


def _drain(spans: Any) -> list[Span]:
    time.sleep(0.5)
    found = []
    while not spans.empty():
        found.append(spans.get())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scrapes", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    compare_scrapes(options.scrapes)
    compare_steps(options.seconds)


if __name__ == "__main__":
    main()
