"""Where a scrape's time goes, and how long it holds the interpreter lock in one piece.

Parts: reading the cells, making samples, rendering them, compressing; each in CPU time, and the functions of all of it
by cProfile, which makes Python calls dearer than they are.

The lock: a thread of the scraped process sleeps for 0.1 ms, again and again, and notes how long it was away; its
longest absence during a scrape is the longest piece in which another thread held the lock (or the machine had no
processor for it: hence the same for times without a scrape). Seen with a switch interval of a second, so that only
what a thread gives up itself ends a piece, and with Python's own of 5 ms. A scrape's longest stretch between two
handovers is also taken in its thread's CPU time, which other processes do not lengthen.

    python benchmarks/scrape_parts.py [--repeats 40] [--scrapes 12]
"""

from __future__ import annotations

import argparse
import cProfile
import gzip
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter, thread_time
from typing import Any

from measuring import Section, run, turns
from prometheus_client import CollectorRegistry
from scraped import ACCEPT, LAYERS, Span, drained, fill, scraped

import moe_telemetry as mt
from moe_telemetry.endpoint import GZIP_LEVEL
from moe_telemetry.exposition import Exposition
from moe_telemetry.pages import encoder
from moe_telemetry.rendering import render

MODELS = (12, LAYERS, 94)
LONG = 1.0
"""Seconds of a switch interval that never ends a piece."""
TICK = 1e-4
EVERY = 0.5
FUNCTIONS = 8


def cpu(call: Callable[[], object]) -> float:
    """CPU seconds of a call in this thread."""
    begin = thread_time()
    call()
    return thread_time() - begin


def parts(layers: int, repeats: int) -> tuple[dict[str, float], float, float, pstats.Stats]:
    """Median CPU seconds of each part, of all together, of the longest piece between handovers, and a profile."""
    recorder = mt.Recorder()
    registry = CollectorRegistry(auto_describe=False)
    with mt.start(model="m", port=0, recorder=recorder, num_layers=layers, registry=registry) as telemetry:
        fill(recorder, layers)
        assert telemetry._source is not None
        families = telemetry._source.families()
        made = Exposition()
        scrape = partial(render, registry, *encoder(ACCEPT))
        body = scrape()
        events: dict[str, Callable[[], object]] = {
            "reading the cells": telemetry._source.families,
            "samples of the series": lambda: [made.family(family) for family in families],
            "all but compression": scrape,
            "compression": partial(gzip.compress, body, GZIP_LEVEL),
        }
        times = turns({name: partial(cpu, event) for name, event in events.items()}, repeats)
        found = {name: statistics.median(taken) for name, taken in times.items()}
        piece = statistics.median([longest_piece(scrape) for _ in range(repeats)])
        profile = cProfile.Profile()
        for _ in range(repeats):
            profile.runcall(scrape)
    whole = found.pop("all but compression")
    found["rendering, and the rest"] = whole - found["reading the cells"] - found["samples of the series"]
    ordered = {name: found[name] for name in (*list(found)[:2], "rendering, and the rest", "compression")}
    return ordered, whole + found["compression"], piece, pstats.Stats(profile)


def longest_piece(call: Callable[[], object]) -> float:
    """The most CPU seconds between two handovers of a call, its begin and its end."""
    marks = [thread_time()]
    sleep = time.sleep

    def noted(seconds: float) -> None:
        marks.append(thread_time())
        sleep(seconds)
        marks.append(thread_time())

    time.sleep = noted  # type: ignore[assignment]
    try:
        call()
    finally:
        time.sleep = sleep
    marks.append(thread_time())
    return max(end - begin for begin, end in zip(marks[::2], marks[1::2], strict=True))


def top(stats: pstats.Stats) -> list[tuple[str, float, float]]:
    """The functions with the most time of their own: name, share of all, calls a scrape."""
    entries: dict[Any, Any] = {key: entry for key, entry in stats.stats.items() if "time.sleep" not in key[2]}  # type: ignore[attr-defined]
    whole = sum(own for _, _, own, _, _ in entries.values())
    scrapes = max(calls for (path, _, name), (calls, *_) in entries.items() if name == "render")
    found = sorted(entries.items(), key=lambda item: -item[1][2])[:FUNCTIONS]
    return [(_name(*key), own / whole, calls / scrapes) for key, (calls, _, own, _, _) in found]


def _name(path: str, line: int, name: str) -> str:
    file = path.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".py")
    return (
        name.strip("<>").partition(" at 0x")[0] if path == "~" else f"{file}: {name}".replace("<", "").replace(">", "")
    )


@contextmanager
def ticking() -> Iterator[list[Span]]:
    """A thread that notes when it was away: begin and end of each absence."""
    away: list[Span] = []
    ended = threading.Event()

    def tick() -> None:
        last = perf_counter()
        while not ended.is_set():
            time.sleep(TICK)
            now = perf_counter()
            away.append((last, now))
            last = now

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield away
    finally:
        ended.set()
        thread.join()


def absences(url: str, scrapes: int, interval: float) -> tuple[list[float], list[float]]:
    """The ticking thread's longest absence in each scrape, and in a time as long half an interval later."""
    kept = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        with ticking() as away, scraped(url, EVERY) as (wanted, spans):
            time.sleep(1.0)  # the scraper has started
            wanted.set()
            time.sleep(scrapes * (EVERY + 0.03))
            wanted.clear()
            seen = drained(spans)
    finally:
        sys.setswitchinterval(kept)
    later = [(begin + EVERY / 2, min(end, begin + EVERY / 2) + EVERY / 2) for begin, end in seen]
    return [_longest(away, *span) for span in seen], [_longest(away, *span) for span in later]


def _longest(away: list[Span], begin: float, end: float) -> float:
    return max((till - since for since, till in away if since < end and till > begin), default=0.0)


def section(repeats: int, scrapes: int) -> Section:
    """Parts at each number of layers, the profile at 48, and the lock."""
    found = Section("Inside a scrape")
    measured = {layers: parts(layers, repeats) for layers in MODELS}
    found.say("CPU time of the parts, median, and their share:")
    found.table(
        ("layers", *measured[LAYERS][0], "ms together", "longest piece between handovers"),
        [
            (
                f"{layers}",
                *(f"{seconds * 1000:.1f} ms, {seconds / whole:.0%}" for seconds in found_parts.values()),
                f"{whole * 1000:.1f}",
                f"{piece * 1000:.1f} ms",
            )
            for layers, (found_parts, whole, piece, _) in measured.items()
        ],
    )
    found.say(f"The functions with the most time of their own, {LAYERS} layers, without compression (cProfile):")
    found.table(
        ("function", "of all", "calls a scrape"),
        [(name, f"{share:.0%}", f"{calls:,.0f}") for name, share, calls in top(measured[LAYERS][3])],
    )
    rows = []
    for layers in MODELS[1:]:
        recorder = mt.Recorder()
        with mt.start(model="m", port=0, recorder=recorder, num_layers=layers) as telemetry:
            fill(recorder, layers)
            for interval, words in ((LONG, "handed over only"), (0.005, "of Python, 5 ms")):
                during, without = absences(str(telemetry.url), scrapes, interval)
                middle, most, none = statistics.median(during), max(during), statistics.median(without)
                rows.append((f"{layers}", words, *(f"{each * 1000:.1f}" for each in (middle, most, none))))
    found.say("The longest wait of another thread for the interpreter lock in a scrape, in ms:")
    found.table(("layers", "switch interval", "median of scrapes", "most", "median without a scrape"), rows)
    return found


def main() -> int:
    """Measure and print; there is no limit here but those of scrape.py, which come from this."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--scrapes", type=int, default=12)
    return run(parser, lambda options: section(options.repeats, options.scrapes))


if __name__ == "__main__":
    sys.exit(main())
