"""What a hook costs: enabled, off, and the same event through the OTel SDK, prometheus_client and the seed.

All columns are measured in one process, interleaved, in the thread's CPU time, and compared by the ratio of their
medians: absolute times mean nothing on a shared machine. Exit status 1 when a target of the design is missed.

    python benchmarks/hooks.py [--repeats 15] [--calls 4000] [--json FILE]
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from timeit import Timer
from typing import Any

import dropin
import seed
from hook_cases import CASES, Backends, Case

from moe_telemetry import Recorder
from moe_telemetry.live import ThreadedRecorder
from moe_telemetry.recording import attach, detach
from moe_telemetry.store import Identity, Store

SDK_LEAST, OFF_MOST = 25.0, 1.5
SLOW = {"sdk": 20, "client": 4}
"""How many times fewer calls a slow column gets."""


class Row:
    """Medians in nanoseconds a call, by column; a column without a counterpart is absent."""

    def __init__(self, case: Case, medians: dict[str, float]) -> None:
        self.case = case
        self.medians = medians

    def ratio(self, column: str, other: str) -> float | None:
        """Median of one column over another's; None where there is no such column."""
        if column not in self.medians or other not in self.medians:
            return None
        return self.medians[column] / self.medians[other]

    def misses(self) -> list[str]:
        """Targets of the design's section 5 that this row misses."""
        cheaper, off, stopped = self.ratio("sdk", "on"), self.ratio("off", "empty"), self.ratio("stopped", "empty")
        of_seed = self.ratio("on", "seed")
        found = []
        if cheaper is not None and self.case.hot and cheaper < SDK_LEAST:
            found.append(f"{cheaper:.1f} times cheaper than the SDK, at least {SDK_LEAST:g} wanted")
        for name, value in (("never started", off), ("after stop", stopped)):
            if value is not None and value > OFF_MOST:
                found.append(f"{name}: {value:.2f} of an empty function, at most {OFF_MOST:g}")
        if of_seed is not None and self.case.most is not None and of_seed > self.case.most:
            found.append(f"{of_seed:.2f} of the seed's function, at most {self.case.most}")
        return [f"{self.case.name}: {miss}" for miss in found]


def recorder(variant: str) -> Recorder:
    """A recorder on, off, stopped, or in the variants for several threads and for free-threaded interpreters."""
    found = Recorder()
    if variant == "off":
        return found
    store = Store(Identity("benchmark", "benchmark", "benchmark", "0"))
    attach(found, store, locked=variant == "locked")
    found.forward(1)
    found.pool(3, capacity=100)
    if variant == "threads":
        store.by_thread[store.thread or 0] = store.latest
        found.__class__ = ThreadedRecorder
    if variant == "stopped":
        detach(found)
    return found


def empty(hook: str) -> Callable[..., None]:
    """An empty function with a hook's parameters."""
    _, *parameters = inspect.signature(getattr(Recorder, hook)).parameters.values()
    plain = ", ".join(
        str(each.replace(annotation=inspect.Parameter.empty)) if each.kind is not each.VAR_KEYWORD else f"**{each.name}"
        for each in parameters
    )
    made: dict[str, Any] = {}
    exec(f"def found({plain}): pass", made)
    function: Callable[..., None] = made["found"]
    return function


def measure(case: Case, backends: Backends, repeats: int, calls: int) -> Row:
    """Medians of interleaved batches. Each statement is the call as a runtime writes it, with its attribute lookup."""
    variants = {name: recorder(name) for name in ("on", "off", "stopped", "threads", "locked")}
    timers = {
        name: Timer(f"rec.{case.call}", globals={**case.names, "rec": found}, timer=thread_time)
        for name, found in variants.items()
    }
    hook = case.call.partition("(")[0]
    timers["empty"] = Timer(
        f"empty{case.call[len(hook) :]}", globals={**case.names, "empty": empty(hook)}, timer=thread_time
    )
    if case.records:
        timers["sdk"] = Timer("event()", globals={"event": backends.sdk(case.records)}, timer=thread_time)
        timers["client"] = Timer("event()", globals={"event": backends.client(case.records)}, timer=thread_time)
    if case.seed:
        timers["seed"] = Timer(f"seed.{case.seed}", globals={**case.names, "seed": seed}, timer=thread_time)
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        seed.reset_samples()
        for name, timer in timers.items():
            number = max(1, calls // SLOW.get(name, 1))
            times[name].append(timer.timeit(number) / number * 1e9)
    return Row(case, {name: statistics.median(taken) for name, taken in times.items()})


def show(rows: list[Row]) -> None:
    """The table, in Markdown. `threads` and `locked` are the variants' cost over that of the usual hook."""
    print(
        "| hook | ns | of the seed's | SDK / hook | client / hook | off / empty | stopped / empty | threads | locked |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        limit = "" if row.case.most is None else f" (at most {row.case.most})"
        cells = [
            row.case.name,
            f"{row.medians['on']:.0f}",
            _shown(row.ratio("on", "seed"), 2) + limit,
            _shown(row.ratio("sdk", "on"), 0),
            _shown(row.ratio("client", "on"), 1),
            _shown(row.ratio("off", "empty"), 2),
            _shown(row.ratio("stopped", "empty"), 2),
            _shown(row.ratio("threads", "on"), 2),
            _shown(row.ratio("locked", "on"), 2),
        ]
        print(f"| {' | '.join(cells)} |")


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> int:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    backends = Backends()
    rows = [measure(case, backends, options.repeats, options.calls) for case in CASES]
    show(rows)
    stand_ins = dropin.measure(options.repeats, options.calls)
    dropin.show(stand_ins)
    if options.json:
        found = [{"hook": row.case.name, **row.medians} for row in rows] + [vars(row) for row in stand_ins]
        options.json.write_text(json.dumps(found, indent=1))
    missed = [miss for row in rows for miss in row.misses()] + [miss for row in stand_ins for miss in row.misses()]
    print(*missed, sep="\n") if missed else print("every target met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
