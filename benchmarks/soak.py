"""A run of 10^8 events: memory on the way, series, drops, and whether every total is exact in the end.

Passes of both phases over 48 layers with a pool, a predictor and a background reader, scraped once a second of model
time. What must come out is computed from the calls, by sums over plain sets. Exit status 1 when a total is wrong, a
counter has fallen, or memory has grown by more than 1 MiB since the first million events.

    python benchmarks/soak.py [--events 100000000]
"""

from __future__ import annotations

import argparse
import gc
import http.client
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

import moe_telemetry as mt
from moe_telemetry import catalog as c
from moe_telemetry import rounds
from moe_telemetry.catalog import BY_NAME
from moe_telemetry.processes import PARENT_VARIABLE

LAYERS, EXPERTS, SLOTS = 48, 128, 64
STEPS = 48
"""Different passes, which come again and again."""
STEP_SECONDS = 0.0625
"""Model time of a pass: 16 a second."""
TICK = 2.0**-20
"""Durations are multiples of it, so that their sums are exact."""
GROWN_MOST = 1.0
"""MiB since the first million events."""
PARSED_EVERY = 50
"""Scrapes of which one is looked at for counters that fell; all are read."""

Hook = Callable[..., None]
Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass
class Step:
    """One pass: its calls, those of the reader's thread, and what they add to counters and histograms."""

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    reads: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    adds: Counter[Key] = field(default_factory=Counter)

    def add(self, metric: c.Metric, value: float, **labels: str) -> None:
        """Expect a rise of a counter."""
        self.adds[metric.name, tuple(sorted(labels.items()))] += value  # type: ignore[assignment]

    def observe(self, metric: c.Metric, seconds: float, **labels: str) -> None:
        """Expect an observation: of its count and its sum."""
        pairs = tuple(sorted(labels.items()))
        self.adds[f"{metric.name} count", pairs] += 1
        self.adds[f"{metric.name} sum", pairs] += seconds  # type: ignore[assignment]


def step(number: int, rng: random.Random) -> Step:
    """Every sixteenth pass is a prefill chunk of 64, every third a verify pass of 3; the others decode one token."""
    tokens = 64 if number % 16 == 15 else 3 if number % 3 == 2 else 1
    phase = "prefill" if tokens == 64 else "decode"
    seq = "64" if tokens == 64 else str(tokens)
    found = Step()
    call = found.calls.append

    def seconds() -> float:
        return rng.randrange(1, 1 << 14) * TICK

    call(("forward", (tokens,)))
    for layer in range(LAYERS):
        _layer(found, layer, phase, seq, min(tokens * 8, 60), rng, seconds)
    if number % 8 == 0:
        call(("stall", (took := seconds(),)))
        found.observe(c.STALL_DURATION, took, phase=phase)
        call(("block", ("route", float("nan"))))  # dropped
        found.add(c.LOST, 1, reason="not_finite")
    if tokens == 3:
        call(("speculation", (2, accepted := rng.randrange(3))))
        found.add(c.SPECULATION_TOKENS, accepted, outcome="accepted")
        found.add(c.SPECULATION_TOKENS, 2 - accepted, outcome="rejected")
    call(("tokens", (emitted := 64 if tokens == 64 else 1,)))
    found.add(c.TOKENS, emitted, phase=phase)
    call(("forward_done", (took := STEP_SECONDS + seconds(),)))
    found.observe(c.FORWARD_DURATION, took, phase=phase, seq=seq)
    return found


def _layer(
    found: Step, layer: int, phase: str, seq: str, size: int, rng: random.Random, seconds: Callable[[], float]
) -> None:
    at = {"phase": phase, "layer": str(layer)}
    routed = set(rng.sample(range(EXPERTS), size))
    resident = set(rng.sample(range(EXPERTS), SLOTS)) | set(rng.sample(sorted(routed), size // 2))
    predicted = set(rng.sample(range(EXPERTS), 12)) | set(rng.sample(sorted(routed), size // 2))
    ready = set(rng.sample(sorted(predicted), len(predicted) // 2))
    call = found.calls.append
    call(("routed", (layer, routed, resident, predicted, ready)))
    for expert in routed:
        if expert in resident:
            outcome = "hit"
        elif expert not in predicted:
            outcome = "miss_unpredicted"
        else:
            outcome = "miss_evicted" if expert in ready else "miss_timing"
        found.add(c.LOOKUPS, 1, outcome=outcome, **at)
        found.add(c.PREDICTOR_EXPERTS, 1, outcome="recalled" if expert in predicted else "missed", **at)
    found.add(c.PREFETCH_HITS, len([e for e in routed if e in resident and e in predicted and e in ready]), phase=phase)
    for expert in predicted:
        found.add(c.PREDICTOR_CANDIDATES, 1, phase=phase, outcome="used" if expert in routed else "wasted")
    found.add(c.LAYER_CALLS, 1, residency="all_hit" if routed <= resident else "partial", **at)
    found.add(c.LAYER_EXPERTS, size, **at)
    found.observe(c.UNION, size, phase=phase, seq=seq)
    for hook, metric, label, values in (
        ("prefetch", c.PREFETCH_DURATION, "stage", c.STAGES),
        ("promote", c.PROMOTE_DURATION, "step", c.STEPS),
        ("block", c.BLOCK_DURATION, "segment", c.SEGMENTS),
    ):
        for value in values:
            call((hook, (value, took := seconds())))
            found.observe(metric, took, phase=phase, **{label: value})
    call(("window", (took := seconds(),)))
    found.observe(c.PREFETCH_WINDOW, took, phase=phase)
    call(("block_call", ()))
    found.add(c.BLOCK_CALLS, 1, phase=phase)
    call(("evicted", (layer, 2)))
    found.add(c.EVICTIONS, 2, **at)
    for source in ("demand", "prefetch"):
        found.reads.append(("read", (source, nbytes := rng.randrange(1 << 20), took := seconds(), phase)))
        found.add(c.READ_BYTES, nbytes, phase=phase, source=source)
        found.observe(c.READ_DURATION, took, phase=phase, source=source)
    found.reads.append(("placed", (2, phase)))
    found.add(c.PREFETCH_PLACED, 2, phase=phase)


class Reader:
    """The background reader: makes a pass' reads in its own thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[tuple[Hook, tuple[Any, ...]]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while (calls := self._queue.get()) is not None:
            for hook, args in calls:
                hook(*args)

    def submit(self, calls: list[tuple[Hook, tuple[Any, ...]]]) -> None:
        """Make these calls soon."""
        self._queue.put(calls)
        while self._queue.qsize() > 4:
            time.sleep(0)

    def end(self) -> None:
        """Make what is left, and end."""
        self._queue.put(None)
        self._thread.join()


class Scrapes:
    """A client that keeps its connection and looks at some of what it gets.

    In a process of its own, so that what it reads and parses is not taken for ours.
    """

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        marked = os.environ.pop(PARENT_VARIABLE, None)  # a client has no hooks to be warned of
        self._process = context.Process(target=_scraper, args=(port, far), daemon=True)
        self._process.start()
        if marked is not None:
            os.environ[PARENT_VARIABLE] = marked
        self.number = 0

    def make(self) -> None:
        """One scrape, read to its end."""
        self._pipe.send(True)
        self._pipe.recv()
        self.number += 1

    def end(self) -> tuple[int, list[str]]:
        """Samples of the last scrape, and counters that have fallen from one to a later one."""
        self._pipe.send(False)
        samples, fallen = self._pipe.recv()
        self._process.join()
        return samples, fallen


def _scraper(port: int, pipe: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    last: dict[Any, float] = {}
    fallen: list[str] = []
    text, number = "", 0
    while pipe.recv():
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        if number % PARSED_EVERY == 0:
            _look(text, last, fallen)
        number += 1
        pipe.send(None)
    pipe.send((_look(text, last, fallen), fallen))


def _look(text: str, last: dict[Any, float], fallen: list[str]) -> int:
    """Compare with the samples before; how many there are."""
    number = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            number += 1
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if family.type != "gauge" and sample.value < last.get(key, 0.0):
                fallen.append(f"{key} from {last[key]} to {sample.value}")
            last[key] = sample.value
    return number


def wrong(snapshot: dict[str, Any], expected: Counter[Key]) -> list[str]:
    """Totals of a snapshot that are not what the calls add up to."""
    seen: dict[Key, float] = {}
    for name, metric in snapshot["metrics"].items():
        for series in metric["series"]:
            labels = tuple(sorted(series["labels"].items()))
            if metric["kind"] == "histogram":
                seen[f"{name} count", labels], seen[f"{name} sum", labels] = series["count"], series["sum"]
            elif metric["kind"] == "counter" and name != c.PROCESS_CPU.name:
                seen[name, labels] = series["value"]
    keys = {key for key in seen | expected if BY_NAME[key[0].split()[0]] is not c.PROCESS_CPU}
    return [
        f"{key}: {seen.get(key)} instead of {expected[key]}"
        for key in sorted(keys)
        if seen.get(key, 0) != expected[key]
    ]


def resident() -> float:
    """MiB of this process."""
    gc.collect()
    found: int = psutil.Process().memory_info().rss
    return found / 2**20


def run(events: int) -> list[str]:
    """Push so many events, report on the way; what is wrong in the end."""
    rounds.BURST = float("inf")  # a second of model time is much less here
    rng = random.Random(1)
    steps = [step(number, rng) for number in range(STEPS)]
    recorder = mt.Recorder()
    memory: dict[int, float] = {}
    milestones = [10**power for power in range(6, 20) if 10**power <= events]
    with mt.start(model="soak", port=0, recorder=recorder, num_layers=LAYERS) as telemetry:
        for layer in range(LAYERS):
            recorder.pool(layer, SLOTS, SLOTS)
        bound = [
            ([(getattr(recorder, hook), args) for hook, args in each.calls],
             [(getattr(recorder, hook), args) for hook, args in each.reads])
            for each in steps
        ]  # fmt: skip
        reader, scrapes = Reader(), Scrapes(telemetry.port or 0)
        times, done, model = [0] * STEPS, 0, 0.0
        begin = time.monotonic()
        while done < events:
            number = sum(times) % STEPS
            calls, reads = bound[number]
            for hook, args in calls:
                hook(*args)
            reader.submit(reads)
            times[number] += 1
            done += len(calls) + len(reads)
            model += STEP_SECONDS
            if model >= 1.0:
                model -= 1.0
                scrapes.make()
            if milestones and done >= milestones[0]:
                scrapes.make()
                memory[milestones.pop(0)] = resident()
                print(f"{done:>13,} events, {resident():7.2f} MiB, {time.monotonic() - begin:6.0f} s", flush=True)
        reader.end()
        scrapes.make()
        last = resident()
        samples, fallen = scrapes.end()
        snapshot = telemetry.snapshot()
    expected: Counter[Key] = Counter()
    for each, number in zip(steps, times, strict=True):
        for key, value in each.adds.items():
            expected[key] += value * number
    found = wrong(snapshot, expected)
    lost = sum(value for (name, _), value in expected.items() if name == c.LOST.name)
    print(
        f"{done:,} events ({lost:,} dropped, as wanted) in {time.monotonic() - begin:.0f} s, "
        f"{scrapes.number:,} scrapes of {samples:,} samples; {len(expected):,} totals, {len(found)} wrong"
    )
    first = memory.get(10**6)
    if first is not None and last - first > GROWN_MOST:
        found.append(f"memory has grown by {last - first:.2f} MiB, at most {GROWN_MOST:g}")
    return found + fallen


def main() -> int:
    """Run, print, and fail on what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, default=10**8)
    found = run(parser.parse_args().events)
    for line in found[:20]:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
