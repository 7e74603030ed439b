"""What a routing trace costs: bytes and time of a call beside the simulation it comes from, and time to ask it.

Calls of four layers, half of whose experts are those of the call before. Handing over is what a hook does, with and
without a trace; simulating is what a collection does, and makes the lines of a trace on the way; writing is the trace's
own thread's, to a file. All in the thread's CPU time, in turns. Asking is reading the file, and LRU, LFU and the
optimum at every size, seconds of 100,000 calls.

    python benchmarks/trace_cost.py [--repeats 15] [--calls 4000]
"""

from __future__ import annotations

import argparse
import gzip
import random
import statistics
import sys
import tempfile
from itertools import chain
from pathlib import Path
from time import thread_time

from measuring import Section, ratio, run, turns

from moe_telemetry import policy_report, trace_reader
from moe_telemetry.reuse import Feed, PoolCurves
from moe_telemetry.routing_trace import RoutingTrace

LAYERS = 4
SHAPES = ((4, 64), (8, 128), (10, 512), (64, 128))
"""Experts of a call, and of a layer."""
LIMIT = 1 << 40


def routing(top: int, experts: int, calls: int) -> list[tuple[int, set[int]]]:
    """Layer and experts of each call: skewed, and half of them used by the layer's call before."""
    rng = random.Random(0)
    last: list[list[int]] = [[] for _ in range(LAYERS)]
    found = []
    for number in range(calls):
        layer = number % LAYERS
        chosen = set(rng.sample(last[layer], len(last[layer]) // 2))
        while len(chosen) < top:
            chosen.add(int(experts * rng.random() ** 2))
        last[layer] = sorted(chosen)
        found.append((layer, chosen))
    return found


class Side:
    """Runs with a trace, or without; `taken` are seconds of handing all over, of simulating, of writing."""

    def __init__(self, calls: list[tuple[int, set[int]]], path: Path | None) -> None:
        self.calls = calls
        self.path = path
        self.taken: list[tuple[float, float, float]] = []

    def take(self) -> float:
        """A run."""
        curves = PoolCurves("all")
        feeds: list[Feed] = [feed for layer in range(LAYERS) if (feed := curves.feed(layer, "decode")) is not None]
        trace = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            trace = RoutingTrace(self.path, LIMIT, {"run": "benchmark"}, curves)
            curves.trace = trace
        for feed in feeds:
            feed.hand_over(set(chain.from_iterable(experts for _, experts in self.calls)))  # all are known from now on
        curves.collect()
        begin = thread_time()
        for layer, experts in self.calls:
            feeds[layer].hand_over(experts)
        handed = thread_time()
        curves.collect()
        simulated = thread_time()
        if trace is not None:
            trace._drain()
        written = thread_time()
        if trace is not None:
            trace.close()
        self.taken.append((handed - begin, simulated - handed, written - simulated))
        return written - begin


def measure(options: argparse.Namespace) -> Section:
    """A row for each shape."""
    found = Section("A routing trace")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for top, experts in SHAPES:
            path = Path(folder) / "trace"
            calls = routing(top, experts, options.calls)
            with_trace, without = Side(calls, path), Side(calls, None)
            turns({"on": with_trace.take, "off": without.take}, options.repeats)
            on, off = ([*zip(*side.taken, strict=True)] for side in (with_trace, without))
            nbytes = path.read_bytes()
            begin = thread_time()
            policy_report.policy_report(trace_reader.read(str(path)))
            asked = (thread_time() - begin) / len(calls) * 100_000
            rows.append(
                (
                    f"{top} of {experts}",
                    f"{len(nbytes) / len(calls):.0f}",
                    f"{len(gzip.compress(nbytes, 6)) / len(calls):.0f}",
                    ratio(on[0], off[0]).shown(),
                    ratio(on[1], off[1]).shown(),
                    f"{statistics.median(on[2]) / statistics.median(off[1]):.2f}",
                    f"{asked:.1f}",
                )
            )
    found.table(
        (
            "experts",
            "bytes a call",
            "with gzip",
            "handing over, on / off",
            "simulating, on / off",
            "writing / simulating",
            "asking 100,000 calls, s",
        ),
        rows,
    )
    return found


if __name__ == "__main__":
    PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    PARSER.add_argument("--repeats", type=int, default=15)
    PARSER.add_argument("--calls", type=int, default=4000)
    sys.exit(run(PARSER, measure))
