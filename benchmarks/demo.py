"""Decode speed of the demo with telemetry on against off, and what a scrape does to the steps it overlaps.

Each repeat runs all variants in one process, in an order that rotates, and each pair of neighbours is compared: ratios
of medians, since absolute times mean nothing on a shared machine. Exit status 1 when a target of the design is missed.

    python benchmarks/demo.py [--repeats 7] [--tokens 400]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import moe_telemetry as mt
from moe_telemetry.demo.engine import Engine
from moe_telemetry.demo.settings import DemoSettings

SCRAPE_SECONDS = 5.0


@dataclass
class Steps:
    """Decode steps of one variant: tokens a second of forward time a run, and step seconds."""

    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    scraped: list[float] = field(default_factory=list)


@contextmanager
def _scraping(url: str | None, every: float, spans: list[tuple[float, float]]) -> Iterator[None]:
    """Scrape from a thread; `spans` gets the begin and end of each."""
    done = threading.Event()

    def loop() -> None:
        while not done.wait(every):
            begin = time.perf_counter()
            urllib.request.urlopen(f"{url}/metrics", timeout=10).read()
            spans.append((begin, time.perf_counter()))

    thread = threading.Thread(target=loop, daemon=True)
    if url is not None:
        thread.start()
    yield
    done.set()
    if url is not None:
        thread.join()


def _run(tokens: int, telemetry: bool, every: float | None, into: Steps) -> None:
    tel = mt.start(model="demo-moe", runtime="benchmark", port=0) if telemetry else None
    spans: list[tuple[float, float]] = []
    steps: list[tuple[float, float, int]] = []
    with Engine(DemoSettings(tokens=tokens)) as engine:
        engine.prepare()
        url = tel.url if tel is not None and every is not None else None
        with _scraping(url, every or 1.0, spans):
            engine.run(
                threading.Event(),
                lambda step: (
                    steps.append((time.perf_counter(), step.seconds, step.tokens)) if step.phase == "decode" else None
                ),
            )
    if tel is not None:
        tel.stop()
    steps = steps[len(steps) // 5 :]  # the pool is cold at first
    into.rates.append(sum(number for *_, number in steps) / sum(seconds for _, seconds, _ in steps))
    for end, seconds, _ in steps:
        overlaps = any(begin < end and end - seconds < stop for begin, stop in spans)
        (into.scraped if overlaps else into.seconds).append(seconds)


def main() -> int:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    variants = {"off": (False, None), "on": (True, None), "scraped": (True, SCRAPE_SECONDS), "busy": (True, 0.25)}
    found = {name: Steps() for name in variants}
    _run(options.tokens, False, None, Steps())  # builds the cache and warms everything up
    names = list(variants)
    for repeat in range(options.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            _run(options.tokens, *variants[name], found[name])
    on = statistics.median(a / b for a, b in zip(found["on"].rates, found["off"].rates, strict=True))
    overlapped = statistics.median(found["busy"].scraped) / statistics.median(found["busy"].seconds)
    scraped = found["scraped"].seconds + found["scraped"].scraped
    mean = statistics.fmean(scraped) / statistics.fmean(found["on"].seconds)
    rows = (
        ("decode tok/s, telemetry on / off", on, 0.98, on >= 0.98, "at least"),
        ("median decode step, overlapping a scrape / not", overlapped, 1.5, overlapped <= 1.5, "at most"),
        ("mean decode step, a scrape every 5 s / none", mean, 1.01, mean <= 1.01, "at most"),
    )
    print("| what | ratio | target |")
    print("|---|---|---|")
    for what, ratio, limit, _, word in rows:
        print(f"| {what} | {ratio:.3f} | {word} {limit} |")
    return 0 if all(met for *_, met, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
