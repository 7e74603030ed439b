"""What a scrape costs: the endpoint against prometheus_client with the same series, and the decode steps it overlaps.

The steps are those of a runtime whose kernels run without the interpreter lock: 48 layers of hooks and hashing, some
25 ms. Scrapes come from a process of their own.

    python benchmarks/scrape.py [--scrapes 40] [--seconds 20] [--pairs 7]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from multiprocessing.synchronize import Event

from measuring import Goal, Section, interval, ratio, ratio_apart, run, timed, turns
from scraped import LAYERS, Span, drained, fetch, fill, replica, scraped, split, step

import moe_telemetry as mt
from moe_telemetry import rounds
from moe_telemetry.endpoint import Endpoint

MODELS = (12, LAYERS, 94)
SCRAPE_INTERVAL = 5.0
SCRAPE_MOST, STEP_MOST, MEAN_MOST = 1.1, 1.5, 1.01


def compare_scrapes(count: int, layers: int, found: Section) -> list[str]:
    """Scrapes of the two endpoints in turn: a row of the table, and a goal at 48 layers and more."""
    recorder = mt.Recorder()
    with mt.start(model="m", port=0, recorder=recorder, num_layers=layers) as telemetry:
        fill(recorder, layers)
        url = str(telemetry.url)
        body = fetch(url)
        other = Endpoint(replica(body.decode()), telemetry.snapshot, "127.0.0.1", 0)
        other.serve()
        lines, theirs = (_samples(each) for each in (body, fetch(other.url)))
        # A scrape is measured, not the rest behind the one before.
        burst, rounds.BURST = rounds.BURST, float("inf")
        times = turns({each: partial(timed, partial(fetch, each)) for each in (url, other.url)}, count)
        zipped = turns({each: partial(timed, partial(fetch, url, each)) for each in ("identity", "gzip")}, count // 2)
        rounds.BURST = burst
        small = len(fetch(url, "gzip"))
        other.close()
    assert lines == theirs
    against = ratio(times[url], times[other.url])
    found.goals.append(
        Goal.of("scrape / prometheus_client with the same series", f"{layers} layers", against, SCRAPE_MOST)
    )
    return [
        f"{layers}",
        f"{lines:,}",
        f"{len(body) / 1000:,.0f} kB, {small / 1000:,.0f} kB by gzip",
        f"{statistics.median(times[url]) * 1000:.1f}",
        against.shown(),
        ratio(zipped["gzip"], zipped["identity"]).shown(),
    ]


def _samples(body: bytes) -> int:
    return sum(not line.startswith(b"#") for line in body.splitlines())


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


def compare_steps(seconds: float, pairs: int, found: Section, every: float = 1.0) -> None:
    """Steps that overlap a scrape against the others, and blocks with a scrape every 5 s against blocks without."""
    recorder = mt.Recorder()
    with mt.start(model="m", port=0, recorder=recorder, num_layers=LAYERS) as telemetry:
        fill(recorder)
        with scraped(str(telemetry.url), every) as (wanted, spans):
            wanted.set()
            steps = decode(recorder, seconds)
            seen = drained(spans)
        means: list[tuple[float, float]] = []
        if pairs:
            with scraped(str(telemetry.url), SCRAPE_INTERVAL) as (wanted, _):
                means = [_pair(recorder, wanted, scraped_first=bool(pair % 2)) for pair in range(pairs)]
    overlapping, others = split(steps, seen)
    over = ratio_apart(overlapping, others)
    name = f"{len(overlapping)} of {len(steps)} steps"
    found.goals.append(Goal.of("median decode step overlapping a scrape / not", name, over, STEP_MOST))
    found.say(
        f"Decode steps of {statistics.median(others) * 1000:.0f} ms with a scrape every {every:g} s, asked for as "
        f"Prometheus asks: those that overlap one\n({len(overlapping)}) take {over.shown()} of the time of the others "
        f"({len(others)})."
    )
    if means:
        mean = interval(means, lambda drawn: statistics.median([a / b for a, b in drawn]))
        found.goals.append(
            Goal.of(
                "mean decode step, a scrape every 5 s / none", f"{pairs} pairs", mean, MEAN_MOST, origin=1.0, digits=3
            )
        )
        found.say(
            f"Blocks of 5 s with one scrape against blocks without: {mean.shown(3)}, the median of {pairs} pairs'\n"
            "ratios of means."
        )


def _pair(recorder: mt.Recorder, wanted: Event, scraped_first: bool) -> tuple[float, float]:
    """Mean step of a block with scrapes, and of a block without, one right behind the other."""
    means = {}
    for scraping in (scraped_first, not scraped_first):
        (wanted.set if scraping else wanted.clear)()
        means[scraping] = statistics.fmean(end - begin for begin, end in decode(recorder, SCRAPE_INTERVAL))
    return means[True], means[False]


def section(scrapes: int, seconds: float, pairs: int, models: tuple[int, ...] = MODELS) -> Section:
    """All of it."""
    found = Section("A scrape")
    rows = [compare_scrapes(scrapes, layers, found) for layers in models]
    found.table(("layers", "samples", "size", "ms", "of prometheus_client's", "with gzip / without"), rows)
    compare_steps(seconds, pairs, found)
    return found


def main() -> int:
    """Measure, print, and fail on a missed goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scrapes", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0, help="of decode with a scrape a second")
    parser.add_argument("--pairs", type=int, default=7, help="of blocks of 5 s")
    return run(parser, lambda options: section(options.scrapes, options.seconds, options.pairs))


if __name__ == "__main__":
    sys.exit(main())
