"""The drop-in's dicts, and what happens to them when they are written to while telemetry runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from typing import Any

from . import values
from .catalog import SEGMENTS, STAGES, STEPS
from .cells import HistogramCell, PhaseCells
from .profiling_dicts import Plain, timed, watched
from .profiling_flow import Flow
from .profiling_times import Series
from .recording import LOG_INTERVAL
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
MISS_ATTRIB: dict[str, int] = Plain(
    routed=0,
    resident_hit=0,
    miss_A_predicted=0,
    miss_B_unpredicted=0,
    n=0,
    dec_routed=0,
    dec_resident_hit=0,
    dec_miss_A=0,
    dec_miss_B=0,
    dec_n=0,
    dec_miss_A_timing=0,
    dec_miss_A_evicted=0,
)
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


Cell = Callable[[PhaseCells], HistogramCell]


def _block(segment: str) -> Cell:
    return lambda cells: cells.block[segment]


def _stage(stage: str) -> Cell:
    return lambda cells: cells.prefetch[stage]


def _step(step: str) -> Cell:
    return lambda cells: cells.promote[step]


def _window(cells: PhaseCells) -> HistogramCell:
    return cells.window


_ALL = (
    *(Series(PROF, segment, _block(segment), lose, before=segment == "route") for segment in SEGMENTS),
    Series(WINDOW_PROF, "sum_s", _window, lose, before=True),
    *(
        Series(PREFETCH_TPROF, f"{stage}_s", _stage(stage), lose, True, f"{stage}_n", stage == "promote")
        for stage in STAGES
    ),
    *(Series(PREFETCH_TPROF, f"{step}_s", _step(step), lose, True, promote=True) for step in STEPS),
)
by_key = {series.key: series for series in _ALL}


def nowhere() -> Store:
    """Where counts go while no telemetry runs: nobody reads them but the dicts."""
    return Store(Identity("", "", "", ""), decode_seq_max=8)


flow = Flow(nowhere(), _ALL, lose, waits=os.environ.get("MISS_ATTRIB") == "1")


def _rise(before: Any, value: Any) -> Any:
    """How much a value has risen; 0 when it fell or was reset."""
    for number in (before, value):
        if not isinstance(number, Real):
            values.amount(number)  # refused, for the reason that it has
    return max(value - before, 0)


def _seconds_changed(key: Any, before: Any, value: Any) -> None:
    """Seconds that are no float, block calls, placed experts; the counts beside seconds are their number anyway."""
    try:
        rise = _rise(before, value)
        series = by_key.get(key)
        if not rise:
            return
        if series is not None:
            series.values.append(values.seconds(rise))
            series.settled += 1
            flow.touched(series)
        elif key == "n_calls":
            flow.called(values.count(rise))
        elif key == "place_experts":
            flow.placed(values.count(rise))
    except Exception as error:
        lose("write", error)


def _recall_changed(key: Any, before: Any, value: Any) -> None:
    try:
        if (rise := _rise(before, value)) and flow.recall.change(key, values.count(rise)):
            flow.watch()
        if key == "n":
            flow.settle_counts()
    except Exception as error:
        lose("write", error)


def _misses_changed(key: Any, before: Any, value: Any) -> None:
    try:
        if (rise := _rise(before, value)) and flow.miss.change(key, values.count(rise)):
            flow.watch()
        if key == "n":
            flow.settle_counts()
    except Exception as error:
        lose("write", error)


def _live_times(target: dict[str, float]) -> type[Plain]:
    series = {found.key: found for found in by_key.values() if found.target is target}
    counters = {found.counter: found for found in series.values() if found.counter is not None}
    return timed({**series, **counters}, _seconds_changed, flow.touched)


_LIVE: tuple[tuple[Any, type[Plain]], ...] = (
    *((target, _live_times(target)) for target in (PROF, WINDOW_PROF, PREFETCH_TPROF)),
    (PREDICT_RECALL_PROF, watched(_recall_changed)),
    (MISS_ATTRIB, watched(_misses_changed)),
)


def switch(store: Store | None) -> None:
    """Feed a telemetry's store from now on, or none; what waits goes where things went before."""
    flow.move(nowhere() if store is None else store, live=store is not None)
    for target, live in _LIVE:
        target.__class__ = Plain if store is None else live
