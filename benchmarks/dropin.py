"""What the drop-in costs against the module that it stands in for: running, and without telemetry.

The work that a call leaves for later is inside the times: what waits is brought into the dicts and the histograms
before a batch's clock stops; the pool curve is left to a scrape, as with the recorder. It is the thread's CPU time:
other processes of a shared machine do not count.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, repeat
from time import thread_time
from typing import Any

import seed
from measuring import Goal, Ratio, Section, ratio, turns

from moe_telemetry import Recorder, profiling
from moe_telemetry.profiling_state import flow, misses
from moe_telemetry.testing import capture

Event = Callable[[], object]

OFF_MOST = 1.3
"""Without telemetry: a write to a dict's subclass is some ten nanoseconds dearer than one to a dict."""


@dataclass(frozen=True)
class Case:
    """The same event on the drop-in and on what it is held against, with the limit of the ratio while running."""

    name: str
    event: Event
    against: Event
    most: float | None = None
    off_most: float | None = OFF_MOST
    before: Event | None = None
    """Something to happen once while telemetry runs, before the event is measured."""


@dataclass(frozen=True)
class Row:
    """Nanoseconds an event, running (median), and the ratios to its counterpart: running, and off."""

    name: str
    running: float
    ratio: Ratio
    off: Ratio
    most: float | None
    off_most: float | None

    def goals(self) -> list[Goal]:
        """The limits that this row has."""
        found = []
        if self.most is not None:
            found.append(Goal.of(f"drop-in / the seed's, at most {self.most:g}", self.name, self.ratio, self.most))
        if self.off_most is not None:
            found.append(Goal.of("drop-in without telemetry / the seed's", self.name, self.off, self.off_most))
        return found


def _sets(experts: int) -> tuple[set[int], set[int], set[int], set[int]]:
    """Routed, predicted, resident and ready: nine of ten are resident, eight of ten predicted."""
    rng = random.Random(experts)
    routed = set(rng.sample(range(128), experts))
    resident = set(rng.sample(sorted(routed), experts - max(1, experts // 10))) | set(rng.sample(range(128), 90))
    predicted = set(rng.sample(sorted(routed), experts * 8 // 10)) | set(rng.sample(range(128), 3))
    return routed, predicted, resident, set(rng.sample(sorted(predicted), len(predicted) // 2))


def _misses(experts: int) -> tuple[Event, Event]:
    routed, predicted, resident, ready = _sets(experts)
    return (
        lambda: profiling.note_miss_attrib(routed, predicted, resident, True, ready),
        lambda: seed.note_miss_attrib(routed, predicted, resident, True, ready),
    )


def _layer(module: Any, *layers: int) -> Event:
    """A union that waits for its layer's misses, as with MISS_ATTRIB=1; of layers in turn."""
    routed, predicted, resident, ready = _sets(10)
    index = cycle(layers)

    def layer() -> None:
        module.note_union(1, 10, next(index))
        module.note_miss_attrib(routed, predicted, resident, True, ready)

    return layer


def _with_union(module: Any, timing: str, layers: int = 48) -> Event:
    """A union of the next layer, and a timing."""
    index = cycle(range(layers))

    def ticked() -> None:
        module.note_union(1, 10, next(index))
        module._tick("fetch", 0.0)

    def timed() -> None:
        module.note_union(1, 10, next(index))
        module.note_tprof("predict_s", 1e-4, count_key="predict_n")

    def union() -> None:
        module.note_union(1, 10, next(index))

    return {"_tick": ticked, "note_tprof": timed, "": union}[timing]


def _one_fetch() -> None:
    profiling.PROF["fetch"] += 0.1


def _block(module: Any) -> Event:
    """One layer's calls and writes, with everything turned on; layers in turn, 48 a pass."""
    routed, predicted, resident, ready = _sets(10)
    layers = count()
    note, tick = module.note_tprof, module._tick

    def block() -> None:
        note("predict_s", 1e-4, count_key="predict_n")
        note("submit_s", 1e-4, count_key="submit_n")
        module.WINDOW_PROF["sum_s"] += 1e-3
        module.WINDOW_PROF["n"] += 1
        module.note_union(1, 10, next(layers) % 48)
        tick("route", 0.0)
        note("take_s", 1e-4)
        note("route_s", 1e-4)
        note("place_s", 1e-4, count_key="place_experts", count=2)
        note("promote_s", 1e-4, count_key="promote_n")
        module.note_miss_attrib(routed, predicted, resident, True, ready)
        recall = module.PREDICT_RECALL_PROF
        recall["hit"] += 8
        recall["routed"] += 10
        recall["n"] += 1
        for segment in ("pyremap", "fetch", "matmul", "combine"):
            tick(segment, 0.0)
        module.PROF["n_calls"] += 1

    return block


def cases(recorder: Recorder) -> list[Case]:
    """Every function and kind of write; `recorder` is one that runs."""
    plain = {"fetch": 0.0, "routed": 0}

    def write(found: Any, key: str, rise: float) -> Event:
        def event() -> None:
            found[key] += rise

        return event

    def guarded(module: Any) -> Event:
        def event() -> None:
            if module.UNION_ON:
                module.note_union(1, 10, 3)

        return event

    def note(module: Any, segment: str, **named: Any) -> Event:
        return lambda: module.note_tprof(segment, 1.3e-4, **named)

    def notes(name: str, segment: str, **named: Any) -> Case:
        return Case(name, note(profiling, segment, **named), note(seed, segment, **named), 2.0)

    def unions(name: str, timing: str, layers: int = 48, most: float = 1.2, **more: Any) -> Case:
        return Case(name, _with_union(profiling, timing, layers), _with_union(seed, timing, layers), most, **more)

    return [
        notes("note_tprof with its count", "predict_s", count_key="predict_n"),
        notes("note_tprof", "take_s"),
        notes("note_tprof, placed", "place_s", count_key="place_experts", count=3),
        Case("_tick", lambda: profiling._tick("fetch", 0.0), lambda: seed._tick("fetch", 0.0), 2.0),
        Case("note_union", lambda: profiling.note_union(1, 10, 3), lambda: seed.note_union(1, 10, 3), 0.6),
        unions("note_union after one PROF[...] +=", "", before=_one_fetch),
        unions("note_union and _tick", "_tick"),
        unions("note_union and note_tprof", "note_tprof"),
        # Where a model has one such layer, each call ends a pass.
        unions("the first, one layer a pass", "", 1, 1.5, before=_one_fetch),
        unions("note_union and _tick, one layer a pass", "_tick", 1, 1.5),
        unions("note_union and note_tprof, one layer a pass", "note_tprof", 1, 1.5),
        Case("note_miss_attrib, 10 experts", *_misses(10), 0.5),
        Case("note_miss_attrib, 25 experts", *_misses(25), 0.3),
        Case("note_union, then note_miss_attrib of 10", _layer(profiling, 3), _layer(seed, 3), 0.75),
        Case(
            "the same, 48 layers, a fourth followed",
            _layer(profiling, *range(48)),
            _layer(seed, *range(48)),
            0.75,
        ),
        Case("PROF[...] += against a dict's", write(profiling.PROF, "fetch", 1e-4), write(plain, "fetch", 1e-4), 10.0),
        Case(
            "MISS_ATTRIB[...] += against a dict's", write(profiling.MISS_ATTRIB, "routed", 1), write(plain, "routed", 1)
        ),
        Case("a call site whose flag is off", guarded(profiling), guarded(seed), OFF_MOST),
        Case("a layer's block, everything on", _block(profiling), _block(seed), 2.0),
    ]


def measure(repeats: int, calls: int) -> list[Row]:
    """Interleaved batches, each case with a telemetry of its own."""
    recorder = Recorder()
    rows = []
    with capture(recorder=recorder):
        recorder.forward(1)
        for case in cases(recorder):
            off = _times(case, repeats, calls)
            with capture():
                if case.before is not None:
                    case.before()
                running = _times(case, repeats, calls)
            rows.append(
                Row(
                    case.name,
                    statistics.median(running["ours"]),
                    ratio(running["ours"], running["theirs"]),
                    ratio(off["ours"], off["theirs"]),
                    case.most,
                    case.off_most,
                )
            )
    return rows


def _times(case: Case, repeats: int, calls: int) -> dict[str, list[float]]:
    number = calls // 8 if "block, everything" in case.name else calls

    def batch(event: Event) -> float:
        seed.reset_samples()
        begin = thread_time()
        for _ in repeat(None, number):
            event()
        if event is case.event:
            flow.flush()
            misses.settle()
        nanoseconds = (thread_time() - begin) / number * 1e9
        flow.home.curves.collect()  # as a scrape does
        return nanoseconds

    return turns({"ours": partial(batch, case.event), "theirs": partial(batch, case.against)}, repeats)


def add(section: Section, rows: list[Row]) -> None:
    """The drop-in's table and goals."""
    section.say("The drop-in for the seed module, deferred work included, against the seed's own functions and dicts:")
    cells = []
    for row in rows:
        most = "" if row.most is None else f", at most {row.most}"
        off = "" if row.off_most is None else f"{row.off.shown()}, at most {row.off_most}"
        cells.append((row.name, f"{row.running:.0f}", row.ratio.shown() + most, off))
    section.table(("drop-in", "ns", "of the seed's", "off: of the seed's"), cells)
    section.goals += [goal for row in rows for goal in row.goals()]
