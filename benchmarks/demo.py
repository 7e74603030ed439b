"""Decode speed of the demo with telemetry on against off, and what scrapes do to its steps.

On and off take turns of some steps within one run of one process: hooks are swapped between passes, so that what drifts
for a second drifts for both, and telemetry with its endpoint runs all the time. Compared are seconds of forward time a
token, turn by turn. Then scrapes come once a second from another process: the steps that overlap one against the
others, and, for the mean step, those within 0.3 s behind a scrape against those half a second later, which makes the
slow-down of the mean with a scrape every 5 s (`top.py` has the reason for this way: it is told from noise in a tenth of
the time).

    python benchmarks/demo.py [--seconds 60] [--scraped 30]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from measuring import Goal, Ratio, Section, interval, ratio, ratio_apart, run
from scraped import Span, drained, scraped, split
from top import BEHIND, EVERY, slowed

import moe_telemetry as mt
from moe_telemetry import recorder, recording
from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.demo.engine import Engine
from moe_telemetry.demo.generation import Step
from moe_telemetry.demo.settings import DemoSettings

TURN = 8
"""Decode steps."""
COLD = 60
"""Steps at first that do not count: the pools fill."""
SCRAPE_INTERVAL = 5.0
SPEED_LEAST, STEP_MOST, MEAN_MOST = 0.98, 1.5, 1.01


def decoded(engine: Engine, seconds: float, on_step: Callable[[Step], object]) -> None:
    """Run the demo for so long; `on_step` hears of the decode steps."""
    stop = threading.Event()
    until = time.perf_counter() + seconds

    def take(step: Step) -> None:
        if step.phase == "decode":
            on_step(step)
            if time.perf_counter() > until:
                stop.set()

    engine.run(stop, take)


class Turns:
    """Swaps the hooks on and off every TURN steps, pairs in alternating order; seconds a token of each turn."""

    def __init__(self, telemetry: mt.Telemetry) -> None:
        self._store = telemetry._store
        self._steps: list[Step] = []
        self._cold = COLD
        self._turn = 0
        self._cpu = 0.0
        self.found: dict[bool, list[float]] = {True: [], False: []}
        self.cpu: dict[bool, list[float]] = {True: [], False: []}

    @property
    def _on(self) -> bool:
        return self._turn % 4 in (0, 3)

    def take(self, step: Step) -> None:
        """One decode step."""
        if self._cold:
            self._cold -= 1
            self._cpu = time.thread_time()
            return
        self._steps.append(step)
        if len(self._steps) == TURN:
            tokens = sum(s.tokens for s in self._steps)
            self.found[self._on].append(sum(s.seconds for s in self._steps) / tokens)
            self.cpu[self._on].append((time.thread_time() - self._cpu) / tokens)
            self._steps.clear()
            self._turn += 1
            if self._on:
                recording.attach(recorder, self._store)
            else:
                recording.detach(recorder)
            self._cpu = time.thread_time()

    def speed(self) -> Ratio:
        """Tokens a second of forward time, on over off: median over median."""
        return _faster(self.found)

    def speed_by_cpu(self) -> Ratio:
        """The same by the decode thread's CPU time, prefill between the turns' steps included."""
        return _faster(self.cpu)


def _faster(found: dict[bool, list[float]]) -> Ratio:
    number = min(map(len, found.values()))
    return ratio(found[False][:number], found[True][:number])


def section(
    seconds: float, scraping: float, settings: DemoSettings | None = None, config: ModelConfig | None = None
) -> Section:
    """On against off for `seconds`, then scraped for `scraping` seconds, each scrape a second behind the one before."""
    found = Section("Decode")
    with ExitStack() as stack:
        telemetry = stack.enter_context(mt.start(model="demo-moe", runtime="benchmark", port=0))
        engine = stack.enter_context(Engine(settings or DemoSettings(), config=config))
        engine.prepare()
        turns = Turns(telemetry)
        decoded(engine, seconds, turns.take)
        recording.attach(recorder, telemetry._store)
        steps: list[Span] = []
        scrapes: list[Span] = []
        if scraping:
            wanted, spans = stack.enter_context(scraped(str(telemetry.url), EVERY))
            wanted.set()
            decoded(
                engine, scraping, lambda step: steps.append((time.perf_counter() - step.seconds, time.perf_counter()))
            )
            scrapes = drained(spans)
    speed = turns.speed()
    count = len(turns.found[False])
    kind = "demo: decode tokens a second, on / off"
    found.goals.append(Goal.of(kind, f"{count} turns", speed, SPEED_LEAST, least=True, origin=1.0, digits=3))
    token = statistics.median(turns.found[False]) * 1000
    rows = [
        ("tokens a second of forward time, on / off", speed.shown(3), f"{count} turns each, {token:.1f} ms a token")
    ]
    rows.append(("the same by the CPU time of the decode thread", turns.speed_by_cpu().shown(3), "the same turns"))
    if scraping:
        overlapping, others = split(steps, scrapes)
        over = ratio_apart(overlapping, others)
        behind = slowed(steps, [begin for begin, _ in scrapes])
        share = BEHIND / SCRAPE_INTERVAL
        mean = interval(behind, lambda drawn: 1 + (statistics.geometric_mean(drawn) - 1) * share)
        name = f"{len(scrapes)} scrapes"
        found.goals += [
            Goal.of("demo: median decode step overlapping a scrape / not", name, over, STEP_MOST),
            Goal.of("demo: mean decode step, a scrape every 5 s / none", name, mean, MEAN_MOST, origin=1.0, digits=3),
        ]
        rows += [
            (
                *("step overlapping a scrape / others, medians", over.shown()),
                f"{len(overlapping)} and {len(others)} steps",
            ),
            ("mean step, a scrape every 5 s / none", mean.shown(3), f"{len(behind)} scrapes"),
        ]
    found.say(
        f"The demo ({engine.num_layers} layers, experts streamed through a simulated disk), telemetry on and off in "
        "turns of one run:"
    )
    found.table(("what", "ratio (95 %)", "of"), rows)
    return found


def main() -> int:
    """Measure, print, and fail on a missed goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of decode, on and off in turns")
    parser.add_argument("--scraped", type=float, default=30.0, help="of decode with a scrape a second")
    return run(parser, lambda options: section(options.seconds, options.scraped))


if __name__ == "__main__":
    sys.exit(main())
