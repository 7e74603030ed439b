"""What a hook costs: enabled, off, and the same event through the OTel SDK, prometheus_client and the seed.

All columns are measured in one process, interleaved, in the thread's CPU time, and compared by the ratio of their
medians: absolute times mean nothing on a shared machine. Exit status 1 when a goal of the design is missed.

    python benchmarks/hooks.py [--repeats 21] [--calls 4000]
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple
from functools import partial
from time import thread_time
from timeit import Timer
from typing import Any

import dropin
import seed
from hook_cases import CASES, FOLLOWED, Backends, Case
from measuring import Goal, Ratio, Section, ratio, run, turns

from moe_telemetry import Recorder
from moe_telemetry.live import ThreadedRecorder
from moe_telemetry.recording import attach, detach
from moe_telemetry.reuse import LAYER_SHARE
from moe_telemetry.store import Identity, Store

SDK_LEAST, OFF_MOST = 25.0, 1.5
SLOW = {"sdk": 20, "client": 4}
"""How many times fewer calls a slow column gets."""
COLUMNS = ("on", "off", "stopped", "threads", "locked", "sdk", "client")
"""Beside these, an empty function, and the seed's function where it has one."""
HEADER = (
    *("hook", "ns", "of the seed's", "SDK / hook", "client / hook", "off / empty", "stopped / empty"),
    *("threads", "locked"),
)
INTRODUCTION = """\
`client` is prometheus_client with its children bound beforehand; SDK and client make every record that the hook stands
for. `off` and `stopped` are over an empty function of the same parameters (for `timed`, one that gives an empty
context). `threads` and `locked` are the hooks' variants over the usual one: for several threads that make passes, and
for interpreters without a lock. `pool`, `request` and `cumulative` are not hot, `routed_array` counts what `routed` is
told, and `timed` reads the clock twice: for them the factor 25 is no goal. Of four layers one is followed for the
pool curve; what it hands over is simulated between batches, as scrapes do. A batch is 4,000 calls: the first ones of a
batch find the caches used otherwise."""


class Row:
    """Nanoseconds a call by column, one figure a repeat; a column without a counterpart is absent."""

    def __init__(self, case: Case, times: dict[str, list[float]]) -> None:
        self.case = case
        self.times = times
        self.medians = {name: statistics.median(taken) for name, taken in times.items()}

    def ratio(self, column: str, other: str) -> Ratio | None:
        """One column over another; None where there is no such column."""
        if column not in self.times or other not in self.times:
            return None
        return ratio(self.times[column], self.times[other])

    def goals(self) -> list[Goal]:
        """The design's, as far as this row has them."""
        name = self.case.name
        found = []
        cheaper = self.ratio("sdk", "on") if self.case.hot else None
        if cheaper is not None:
            found.append(Goal.of("OpenTelemetry SDK / hook", name, cheaper, SDK_LEAST, least=True, digits=0))
        for kind, column in (
            ("never started / empty function", "off"),
            ("stopped / empty function", "stopped"),
        ):
            over = self.ratio(column, "empty")
            if over is not None:
                found.append(Goal.of(kind, name, over, OFF_MOST))
        of_seed = None if self.case.most is None else self.ratio("on", "seed")
        if of_seed is not None and self.case.most is not None:
            found.append(Goal.of(f"hook / the seed's, {name}", name, of_seed, self.case.most))
        return found


def recorder(variant: str) -> Recorder:
    """A recorder on, off, stopped, or in the variants for several threads and for free-threaded interpreters."""
    found = Recorder()
    if variant == "off":
        return found
    store = Store(Identity("benchmark", "benchmark", "benchmark", "0"))
    attach(found, store, locked=variant == "locked")
    found.forward(1)
    found.pool(3, capacity=100)
    for layer in (3, 7):  # the second of four is followed
        store.layer_cells(store.latest, layer)
    if variant == "threads":
        store.by_thread[store.thread or 0] = store.latest
        found.__class__ = ThreadedRecorder
    if variant == "stopped":
        detach(found)
    return found


def empty(hook: str) -> Callable[..., None]:
    """An empty function with a hook's parameters."""
    _, *parameters = inspect.signature(getattr(Recorder, hook)).parameters.values()
    plain = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
    made: dict[str, Any] = {"nothing": nullcontext()}
    exec(f"def found{plain}: {'return nothing' if hook == 'timed' else 'pass'}", made)
    function: Callable[..., None] = made["found"]
    return function


def measure(case: Case, backends: Backends, repeats: int, calls: int, columns: Sequence[str] = COLUMNS) -> Row:
    """Each statement is the call as a runtime writes it, with its attribute lookup; batches of all columns in turn."""
    variants = {name: recorder(name) for name in ("on", "off", "stopped", "threads", "locked") if name in columns}
    timers = {
        name: Timer(case.statement("rec."), globals={**case.names, "rec": found}, timer=thread_time)
        for name, found in variants.items()
    }
    hook = case.call.partition("(")[0]
    names = {**case.names, hook: empty(hook), "rec": Recorder()}
    timers["empty"] = Timer(case.statement(""), globals=names, timer=thread_time)
    if case.records and "sdk" in columns:
        timers["sdk"] = Timer("event()", globals={"event": backends.sdk(case.records)}, timer=thread_time)
    if case.records and "client" in columns:
        timers["client"] = Timer("event()", globals={"event": backends.client(case.records)}, timer=thread_time)
    if case.seed:
        timers["seed"] = Timer(f"seed.{case.seed}", globals={**case.names, "seed": seed}, timer=thread_time)

    def batch(name: str) -> float:
        if name == "seed":
            seed.reset_samples()
        number = max(1, calls // SLOW.get(name, 1))
        taken = timers[name].timeit(number) / number * 1e9
        if name in ("on", "threads", "locked"):
            variants[name]._store.curves.collect()  # as a scrape does
        return taken

    return Row(case, turns({name: partial(batch, name) for name in timers}, repeats))


def section(repeats: int, calls: int, columns: Sequence[str] = COLUMNS, stand_ins: bool = True) -> Section:
    """All hooks, and the drop-in."""
    found = Section("Hooks")
    backends = Backends()
    rows = [measure(case, backends, repeats, calls, columns) for case in CASES]
    found.say(INTRODUCTION)
    found.table(HEADER, [_cells(row) for row in rows])
    found.goals += [goal for row in rows for goal in row.goals()]
    found.goals += list(_of_all_layers({row.case.name: row for row in rows}))
    if stand_ins:
        dropin.add(found, dropin.measure(repeats, calls))
    return found


def _of_all_layers(rows: dict[str, Row]) -> Iterator[Goal]:
    """The mean of a followed layer and those that are not, against the seed's."""
    for name, row in rows.items():
        followed = rows.get(name + FOLLOWED)
        if followed is not None and row.case.most is not None and "seed" in row.times:
            both = ratio(row.times["on"], row.times["seed"]), ratio(followed.times["on"], followed.times["seed"])
            plain, other = (astuple(each) for each in both)
            mean = [((LAYER_SHARE - 1) * one + two) / LAYER_SHARE for one, two in zip(plain, other, strict=True)]
            of_seed = Ratio(*mean)
            yield Goal.of(f"hook / the seed's, {name}, all layers", name, of_seed, row.case.most)


def _cells(row: Row) -> list[str]:
    limit = "" if row.case.most is None else f", at most {row.case.most}"
    of_seed = row.ratio("on", "seed")
    return [
        row.case.name,
        f"{row.medians['on']:.0f}",
        "-" if of_seed is None else of_seed.shown() + limit,
        _shown(row.ratio("sdk", "on"), 0),
        _shown(row.ratio("client", "on"), 1),
        _shown(row.ratio("off", "empty"), 2),
        _shown(row.ratio("stopped", "empty"), 2),
        *("-" if (found := row.ratio(name, "on")) is None else f"{found.value:.2f}" for name in ("threads", "locked")),
    ]


def _shown(value: Ratio | None, digits: int) -> str:
    return "-" if value is None else value.shown(digits)


def main() -> int:
    """Measure, print, and fail on a missed goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--calls", type=int, default=4000)
    return run(parser, lambda options: section(options.repeats, options.calls))


if __name__ == "__main__":
    sys.exit(main())
