"""A layer's worth: the hooks of one MoE layer of a streaming runtime, in their order, as a share of a token.

Per layer: three prefetch stages, three promote steps, a window, `routed` with all its sets, two block segments. Here an
absolute time cannot be avoided. What is timed is a token's calls together, in the thread's CPU time: all layers,
forward, forward_done and tokens included, with sets and durations of their own for each layer, again and again. "Beside
work" copies 2 MiB before each layer, as a model's weights do to the caches, and times the hooks alone; what timing
costs itself, as seen with empty functions, is taken off.

    python benchmarks/layer.py [--repeats 120] [--worked 40]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from time import thread_time
from types import SimpleNamespace
from typing import Any, NamedTuple

from hooks import empty
from measuring import Goal, Section, fastest_tenth, interval, ratio, run, turns

from moe_telemetry import Recorder
from moe_telemetry.hooks import HOOKS
from moe_telemetry.live import LiveRecorder
from moe_telemetry.recording import attach
from moe_telemetry.store import Identity, Store

LAYERS = (48, 94)
EXPERTS = (10, 25)
TOKENS = ((0.0125, 0.015), (0.07, 0.0025))
"""Seconds of a token, and the share of it that the hooks of 48 layers may take."""
EMPTY_MOST = 8.7
"""Times that a layer's hooks may take of as many empty calls: what 1.5 % of 12.5 ms are where one takes 45 ns."""
IN_A_ROW = 4
"""Tokens of a turn, the last of which counts: the turn before it has used the processor's caches otherwise."""
WORK = bytes(2 << 20)
INTRODUCTION = """\
Per layer three prefetch stages, three promote steps, a window, `routed` with resident, predicted and ready, and two
block segments; per token also `forward`, `forward_done` and `tokens`. Each layer has sets of its own. Absolute, and so
a matter of the machine and of what else runs on it: the median; the mean of the fastest tenth of all tokens; and, for a
token and its shares, what the ratio to empty calls makes of the fastest token of empty calls, as if the whole run had
been as undisturbed."""


class Layer(NamedTuple):
    """What a layer's hooks are given; seconds for each of the nine durations."""

    number: int
    routed: set[int]
    resident: set[int]
    predicted: set[int]
    ready: set[int]
    seconds: tuple[float, ...]


def model(layers: int, experts: int, seed: int = 0) -> list[Layer]:
    """Nine of ten experts are resident, eight of ten predicted, half of those ready; 128 experts, 96 in the pool."""
    draw = random.Random(f"{experts} {seed}")
    found = []
    for index in range(layers):
        routed = set(draw.sample(range(128), experts))
        absent = set(draw.sample(sorted(routed), max(1, experts // 10)))
        others = sorted(set(range(128)) - routed)
        resident = (routed - absent) | set(draw.sample(others, 96 - experts + len(absent)))
        predicted = set(draw.sample(sorted(routed), experts * 8 // 10)) | set(draw.sample(others, 3))
        ready = set(draw.sample(sorted(predicted), len(predicted) // 2))
        seconds = tuple(draw.lognormvariate(-9, 1) for _ in range(9))
        found.append(Layer(index, routed, resident, predicted, ready, seconds))
    return found


def layer(rec: Any, given: Layer) -> None:
    """The calls of one layer."""
    seconds = given.seconds
    rec.prefetch("predict", seconds[0])
    rec.prefetch("submit", seconds[1])
    rec.prefetch("promote", seconds[2])
    rec.promote("take", seconds[3])
    rec.promote("route", seconds[4])
    rec.promote("place", seconds[5])
    rec.window(seconds[6])
    rec.routed(given.number, given.routed, given.resident, given.predicted, given.ready)
    rec.block("fetch", seconds[7])
    rec.block("matmul", seconds[8])


def warm(rec: Any, layers: list[Layer]) -> float:
    """CPU seconds of the last of some tokens in a row; what they leave to a scrape is done behind it."""
    taken = [token(rec, layers) for _ in range(IN_A_ROW)]
    _scrape(rec)
    return taken[-1]


def _scrape(rec: Any) -> None:
    if isinstance(rec, LiveRecorder):
        rec._store.curves.collect()


def token(rec: Any, layers: list[Layer]) -> float:
    """CPU seconds of a token's calls."""
    begin = thread_time()
    rec.forward(1)
    for given in layers:
        layer(rec, given)
    rec.forward_done(0.0125)
    rec.tokens(1)
    return thread_time() - begin


def deferred(rec: Recorder, layers: list[Layer]) -> float:
    """CPU seconds of what a token's calls leave to the next scrape: the pool curve."""
    rec._store.curves.collect()
    token(rec, layers)
    begin = thread_time()
    rec._store.curves.collect()
    return thread_time() - begin


def worked(rec: Any, layers: list[Layer]) -> float:
    """The same with other work before each layer, which is not counted."""
    taken = 0.0
    for given in layers:
        bytearray(WORK)
        begin = thread_time()
        layer(rec, given)
        taken += thread_time() - begin
    _scrape(rec)
    return taken


def recorders() -> dict[str, Any]:
    """One that records, one with a lock, one that is off, and empty functions of the same parameters."""
    found: dict[str, Any] = {"on": Recorder(), "locked": Recorder(), "off": Recorder()}
    for name in ("on", "locked"):
        attach(found[name], Store(Identity("m", "r", "r", "0")), locked=name == "locked")
        for index in range(max(LAYERS)):
            found[name].pool(index, capacity=96, resident=96)
    found["empty"] = SimpleNamespace(**{name: empty(name) for name in HOOKS})
    return found


def section(repeats: int, work: int, absolute: bool = True) -> Section:
    """Rows for 48 and 94 layers, 10 and 25 experts; `work` tokens of 48 layers beside other work (0: none).

    Goals are shares of a token, `absolute`, or the ratio to empty calls, which no machine and no load changes.
    """
    found = Section("A layer's worth")
    found.say(INTRODUCTION)
    known = recorders()
    models = {(count, experts): model(count, experts) for count in LAYERS for experts in EXPERTS}
    events: dict[str, Callable[[], float]] = {
        f"{name} {count} {experts}": partial(warm, rec, layers)
        for (count, experts), layers in models.items()
        for name, rec in known.items()
    }
    turns(events, max(1, repeats // 10))
    times = turns(events, repeats)
    rows = []
    for count, experts in models:
        on, off, none, locked = (times[f"{name} {count} {experts}"] for name in ("on", "off", "empty", "locked"))
        middle, best = statistics.median(on), fastest_tenth(on)
        at_best = ratio(on, none).value * min(none)
        shares = [f"{middle / seconds:.2%}, {best / seconds:.2%}, {at_best / seconds:.2%}" for seconds, _ in TOKENS]
        rows.append(
            (
                *(f"{count}", f"{experts}", f"{middle / count * 1e6:.2f}, {best / count * 1e6:.2f}"),
                *(f"{middle * 1e6:.0f}, {best * 1e6:.0f}, {at_best * 1e6:.0f}", *shares),
                *(f"{ratio(on, none).shown(1)}", f"{ratio(off, none).value:.2f}", f"{ratio(locked, on).value:.2f}"),
            )
        )
        if not absolute:
            over = ratio(on, none)
            found.goals.append(
                Goal.of("hooks of a layer / empty calls", f"{count} layers, {experts}", over, EMPTY_MOST)
            )
        elif count == LAYERS[0]:
            for seconds, most in TOKENS:
                name = f"{experts} experts"
                share = interval([each / seconds for each in on], statistics.median)
                kind = f"hooks of {count} layers, of a token of {seconds * 1000:g} ms"
                found.goals.append(Goal.of(f"{kind}, median", name, share, most, percent=True))
                least = interval([each / seconds for each in on], fastest_tenth)
                found.goals.append(Goal.of(f"{kind}, fastest tenth", name, least, most, percent=True))
    found.table(
        (
            *("layers", "experts", "us a layer: median, fastest tenth", "us a token: also undisturbed"),
            *("of 12.5 ms", "of 70 ms", "on / empty calls", "off / empty calls", "locked / on"),
        ),
        rows,
    )
    left = turns({f"{count}": partial(deferred, known["on"], models[count, EXPERTS[0]]) for count in LAYERS}, 60)
    told = " and ".join(f"{statistics.median(left[f'{count}']) * 1e6:.0f} us of {count} layers" for count in LAYERS)
    found.say(f"A token leaves the scrape the pool curve of one layer in four to simulate: {told}, median.")
    if work:
        events = {name: partial(worked, known[name], models[LAYERS[0], EXPERTS[0]]) for name in ("on", "empty")}
        times = turns(events, work)
        net = [a - b for a, b in zip(times["on"], times["empty"], strict=True)]
        middle, best = statistics.median(net), fastest_tenth(net)
        whole = TOKENS[0][0]
        found.say(
            f"Beside work that goes through 2 MiB before each layer ({LAYERS[0]} layers, {EXPERTS[0]} experts):\n"
            f"{middle * 1e6:.0f} us a token, {middle / whole:.2%} of 12.5 ms (fastest tenth {best * 1e6:.0f} us, "
            f"{best / whole:.2%}), with empty\nfunctions taken off. The decode ratio of the demo has this in it."
        )
    return found


def main() -> int:
    """Measure, print, and fail on a missed goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=120, help="turns of each variant")
    parser.add_argument("--worked", type=int, default=40, help="tokens beside other work")
    return run(parser, lambda options: section(options.repeats, options.worked))


if __name__ == "__main__":
    sys.exit(main())
