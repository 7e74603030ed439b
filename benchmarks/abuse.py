"""What hostile and many clients do to the endpoint and to the decode steps of its process.

Decode runs in blocks, in turn without clients and with one kind of them; clients are processes of their own, of lower
priority, so that they take little from what is measured. A good client scrapes all the while. Exit status 1 when a
scrape fails or is slow, decode suffers, or something is left.

    python benchmarks/abuse.py [--pairs 3] [--seconds 4] [--only NAME]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from typing import Any

import psutil
import scraped
from clients import ATTACKS
from scrape import decode

import moe_telemetry as mt
from moe_telemetry import connections
from moe_telemetry.processes import PARENT_VARIABLE

SLOWEST = 1.0
"""Seconds that a good scrape may take."""
DECODE_MOST = 1.5
"""Median step under clients over that without: what a scrape may do to the step that it overlaps."""
THREADS_MOST = connections.MAX_CONNECTIONS + connections.MAX_ENDING
MEMORY_MOST = 32.0
"""MiB that the process may grow by."""
REAPED_WITHIN = connections.IDLE_SECONDS + 5.0


# -- processes ----------------------------------------------------------------------------------------------------


def _attack(number: int, port: int, ended: Event) -> None:
    os.nice(10)
    ATTACKS[number](port, ended)


def _good_client(port: int, ended: Event, wanted: Event, times: Any) -> None:
    """Scrapes five times a second while it is wanted; puts the seconds, or infinity for a failure."""
    while not ended.is_set():
        if wanted.is_set():
            begin = time.perf_counter()
            try:
                body = scraped.fetch(f"http://127.0.0.1:{port}")
                times.put(time.perf_counter() - begin if b"moe_run_info" in body else float("inf"))
            except OSError:
                times.put(float("inf"))
        ended.wait(0.2)


# -- measuring ----------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What one kind of clients did: ratios of decode by pair, scrapes' seconds, most threads, connections and MiB."""

    name: str
    ratios: list[float] = field(default_factory=list)
    scrapes: list[float] = field(default_factory=list)
    threads: int = 0
    connections: int = 0
    grown: float = 0.0
    reaped: float = 0.0

    def quantile(self, q: float) -> float:
        """Seconds of a good scrape, nearest rank."""
        return sorted(self.scrapes)[min(len(self.scrapes) - 1, int(q * len(self.scrapes)))]

    def misses(self) -> list[str]:
        """What is beyond its limit."""
        limits = (
            ("scrape p99", self.quantile(0.99), SLOWEST),
            ("decode", statistics.median(self.ratios), DECODE_MOST),
            ("threads", self.threads, THREADS_MOST),
            ("MiB", self.grown, MEMORY_MOST),
            ("seconds until nothing was left", self.reaped, REAPED_WITHIN),
        )
        return [f"{self.name}: {what} {value:.3g}, at most {most:g}" for what, value, most in limits if value > most]


@contextmanager
def _process(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """A process of its own, told to end and waited for."""
    ended = CONTEXT.Event()
    process = CONTEXT.Process(target=target, args=(*args[:2], ended, *args[2:]) if target is _attack else args)
    marked = os.environ.pop(PARENT_VARIABLE, None)  # a client has no hooks to be warned of
    process.start()
    if marked is not None:
        os.environ[PARENT_VARIABLE] = marked
    try:
        yield
    finally:
        ended.set()
        process.join(10)
        process.kill()


CONTEXT = multiprocessing.get_context("spawn")


def _watch(server: connections.Server, seen: Seen, memory: float, done: threading.Event) -> None:
    process = psutil.Process()
    while not done.wait(0.05):
        seen.threads = max(seen.threads, sum(t.name == "moe-telemetry-connection" for t in threading.enumerate()))
        seen.connections = max(seen.connections, len(server._connections))
        seen.grown = max(seen.grown, process.memory_info().rss / 2**20 - memory)


def _median(recorder: mt.Recorder, seconds: float) -> float:
    return statistics.median(end - begin for begin, end in decode(recorder, seconds))


def measure(number: int, telemetry: Any, recorder: mt.Recorder, pairs: int, seconds: float) -> Seen:
    """Blocks of decode without clients and with those of one kind, in turn; a good client scrapes in both."""
    seen = Seen(ATTACKS[number].__name__)
    server = telemetry._endpoint._server
    memory = psutil.Process().memory_info().rss / 2**20
    ended, wanted, times = CONTEXT.Event(), CONTEXT.Event(), CONTEXT.Queue()
    good = CONTEXT.Process(target=_good_client, args=(telemetry.port, ended, wanted, times))
    marked = os.environ.pop(PARENT_VARIABLE, None)
    good.start()
    os.environ[PARENT_VARIABLE] = str(marked)
    for _ in range(pairs):
        quiet = _median(recorder, seconds)
        done = threading.Event()
        watch = threading.Thread(target=_watch, args=(server, seen, memory, done))
        watch.start()
        with _process(_attack, number, telemetry.port):
            _median(recorder, 1.0)  # until they have come
            wanted.set()
            seen.ratios.append(_median(recorder, seconds) / quiet)
            wanted.clear()
        done.set()
        watch.join()
        begin = time.monotonic()
        while server._connections and time.monotonic() - begin < 2 * REAPED_WITHIN:
            time.sleep(0.05)
        seen.reaped = max(seen.reaped, time.monotonic() - begin)
    ended.set()
    good.join(10)
    time.sleep(0.2)
    while not times.empty():
        seen.scrapes.append(times.get())
    return seen


def main() -> int:
    """Measure, print, and fail on a missed limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each block")
    parser.add_argument("--only", choices=[attack.__name__ for attack in ATTACKS])
    options = parser.parse_args()
    recorder = mt.Recorder()
    found = []
    with mt.start(model="m", port=0, recorder=recorder, num_layers=scraped.LAYERS) as telemetry:
        scraped.fill(recorder)
        _median(recorder, 1.0)
        for number, attack in enumerate(ATTACKS):
            if options.only in (None, attack.__name__):
                found.append(measure(number, telemetry, recorder, options.pairs, options.seconds))
    print("| clients | decode | scrape p50, p99 (s) | of so many | threads | connections | MiB | left after (s) |")
    print("|---|---|---|---|---|---|---|---|")
    for seen in found:
        failed = sum(seconds == float("inf") for seconds in seen.scrapes)
        print(
            f"| {seen.name} | {statistics.median(seen.ratios):.2f} ({min(seen.ratios):.2f} to {max(seen.ratios):.2f}) "
            f"| {seen.quantile(0.5):.3f}, {seen.quantile(0.99):.3f} | {len(seen.scrapes)}, {failed} failed "
            f"| {seen.threads} | {seen.connections} | {seen.grown:.1f} | {seen.reaped:.1f} |"
        )
    misses = [miss for seen in found for miss in seen.misses()]
    for miss in misses:
        print(miss, file=sys.stderr)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
