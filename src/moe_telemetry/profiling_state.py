"""The drop-in's dicts, and what happens to them when they are written to while telemetry runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import Any

from . import values
from .catalog import SEGMENTS, STAGES, STEPS
from .cells import HistogramCell, PhaseCells
from .losses import LOG_INTERVAL
from .profiling_balances import MissBalance
from .profiling_dicts import Plain, settled, watched
from .profiling_flow import Flow
from .profiling_misses import ENTRIES, Misses
from .profiling_times import Series, block_calls, counts_into, placed, seconds_into
from .store import Identity, Store, logger
from .values import Refused

PROF: dict[str, float] = Plain(route=0.0, pyremap=0.0, fetch=0.0, matmul=0.0, combine=0.0, n_calls=0)
"""Seconds of the MoE block by segment, and its calls."""
WINDOW_PROF: dict[str, float] = Plain(sum_s=0.0, n=0)
"""Seconds from submit to promote of one layer, and how many layers."""
PREDICT_RECALL_PROF: dict[str, int] = Plain(hit=0, routed=0, n=0)
"""Routed experts that were predicted, routed experts, layer calls."""
PREFETCH_TPROF: dict[str, float] = Plain(
    predict_s=0.0,
    predict_n=0,
    submit_s=0.0,
    submit_n=0,
    promote_s=0.0,
    promote_n=0,
    take_s=0.0,
    route_s=0.0,
    place_s=0.0,
    place_experts=0,
)
"""Host seconds and calls of the prefetch stages, seconds of the steps inside promote, experts placed."""
MISS_ATTRIB: dict[str, int] = Plain(dict.fromkeys(ENTRIES, 0))
"""Routed experts by what became of them, over all passes and (`dec_`) over decode passes."""


def lose(hook: str, error: Exception) -> None:
    """Count a record that was not taken, and say so at most once in LOG_INTERVAL."""
    with suppress(Exception):
        store = flow.home
        unknown = isinstance(error, KeyError)
        reason = error.reason if isinstance(error, Refused) else "unknown_label" if unknown else "error"
        store.lost[reason] += 1
        now = time.monotonic()
        if now - store.logged_at >= LOG_INTERVAL:
            store.logged_at = now
            detail = error.kind if isinstance(error, Refused) else type(error).__name__
            logger.warning("profiling.%s() dropped a record: %s (%s)", hook, reason, detail)


def _of(name: str, key: str) -> Callable[[PhaseCells], HistogramCell]:
    return lambda cells: getattr(cells, name)[key]


_ALL = (
    *(
        Series(PROF, key, seconds_into(_of("block", key)), lose, key == "route", either=key == "route")
        for key in SEGMENTS
    ),
    Series(WINDOW_PROF, "sum_s", seconds_into(lambda cells: cells.window), lose, before=True),
    *(
        Series(
            *(PREFETCH_TPROF, f"{key}_s", seconds_into(_of("prefetch", key)), lose, True, f"{key}_n"),
            either=key == "promote",
        )
        for key in STAGES
    ),
    *(
        Series(PREFETCH_TPROF, f"{key}_s", seconds_into(_of("promote", key)), lose, before=True, either=True)
        for key in STEPS
    ),
    Series(PREFETCH_TPROF, "place_experts", counts_into(placed), lose, before=True, either=True),
    Series(PROF, "n_calls", counts_into(block_calls), lose, before=False, either=True),
)
by_key = {series.key: series for series in _ALL}


def nowhere() -> Store:
    """Where counts go while no telemetry runs: nobody reads them but the dicts."""
    return Store(Identity("", "", "", ""), decode_seq_max=8)


flow = Flow(nowhere(), _ALL, lose, waits=os.environ.get("MISS_ATTRIB") == "1")


misses = Misses(MISS_ATTRIB, lose)


def _rise(before: Any, value: Any) -> Any:
    """How much a value has risen; 0 when it fell or was reset."""
    for number in (before, value):
        if not isinstance(number, Real):
            values.amount(number)  # refused, for the reason that it has
    return max(value - before, 0)


def _number_changed(numbers: dict[str, Series], key: Any, before: Any, value: Any) -> None:
    """A write into a dict of seconds that is no float, or of an entry that is only the number of the others."""
    series = numbers.get(key)
    if series is None:
        return
    try:
        if rise := _rise(before, value):
            series.seen.append(rise)
            flow.touched(series)
    except Exception as error:
        lose("write", error)


def _recall_changed(key: Any, before: Any, value: Any) -> None:
    try:
        rise = value - before if type(value) is int and type(before) is int else _rise(before, value)
        if rise <= 0:
            return
        recall = flow.recall
        if key == "hit":
            recall.hit += rise if type(rise) is int else values.count(rise)
        elif key == "routed":
            recall.routed += rise if type(rise) is int else values.count(rise)
        else:
            if key == "n":
                flow.settle_recall()
            return
        recall.owed = True
        if not flow.busy:
            flow.watch()
    except Exception as error:
        lose("write", error)


def _misses_changed(key: Any, before: Any, value: Any) -> None:
    try:
        if flow.miss.complete and key in MissBalance.TOTALS:
            flow.settle_misses()
        if key in MissBalance.ENTRIES or key == "n":
            rise = value - before if type(value) is int and type(before) is int else _rise(before, value)
            if key == "n":
                flow.miss.complete = rise > 0
            elif rise > 0:
                flow.miss.change(key, rise if type(rise) is int else values.count(rise))
                if not flow.busy:
                    flow.watch()
    except Exception as error:
        lose("write", error)


def _with_seconds(target: dict[str, float]) -> type[Plain]:
    numbers = {found.key: found for found in _ALL if found.target is target}
    counters = {found.counter: found for found in numbers.values() if found.counter is not None}
    return settled({**numbers, **counters}, numbers, partial(_number_changed, numbers), flow.touched)


_LIVE: tuple[tuple[Any, type[Plain]], ...] = (
    *((target, _with_seconds(target)) for target in (PROF, WINDOW_PROF, PREFETCH_TPROF)),
    (PREDICT_RECALL_PROF, watched(_recall_changed)),
    (MISS_ATTRIB, settled(dict.fromkeys(ENTRIES, misses), {}, _misses_changed, flow.touched)),
)


def switch(store: Store | None) -> None:
    """Feed a telemetry's store from now on, or none; what waits goes where things went before."""
    try:
        misses.settle()
    finally:
        try:
            flow.move(nowhere() if store is None else store, live=store is not None)
        finally:
            for target, live in _LIVE:
                target.__class__ = Plain if store is None else live
