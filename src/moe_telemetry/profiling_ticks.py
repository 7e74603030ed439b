"""The drop-in's `note_tprof` and `_tick`: seconds into the dicts, or while telemetry runs into lists that are added to
the dicts when these are read, and to the metrics when their phase is known (profiling_times.py)."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from .catalog import SEGMENTS
from .profiling_state import PREFETCH_TPROF, PROF, by_key, flow, lose
from .profiling_times import Series

_raw_block: dict[str, list[Any]] = {}
_raw_prefetch: dict[str, tuple[list[Any], str | None]] = {}
"""Segments in use, with the lists that their seconds go to: empty at each start, so that the first use is seen."""
_placed = by_key["place_experts"].raw
_LIMIT = Series.LIMIT
_live = False


def follow(live: bool) -> None:
    """Whether telemetry runs from now on."""
    global _live  # noqa: PLW0603
    _live = False
    _raw_block.clear()
    _raw_prefetch.clear()
    _live = live


def note_tprof(seg: str, dt: float, *, count_key: str | None = None, count: int = 1) -> None:
    """Add `dt` seconds to a segment of PREFETCH_TPROF, and `count` to the entry `count_key`."""
    try:
        if _live:
            seconds, counter = _raw_prefetch[seg]
            if count_key == counter and count == 1:
                seconds.append(dt)
                if len(seconds) > _LIMIT:
                    flow.touched(by_key[seg])
                return
            if count_key == "place_experts" and counter is None:
                seconds.append(dt)
                _placed.append(count)
                if len(seconds) > _LIMIT or len(_placed) > _LIMIT:
                    flow.touched(by_key[seg])
                    flow.touched(by_key[count_key])
                return
            _note_other(seg, dt, count_key, count)
            return
        PREFETCH_TPROF[seg] += dt
        if count_key is not None:
            PREFETCH_TPROF[count_key] += count
    except Exception as error:
        _note_first(error, seg, dt, count_key, count)


def _note_first(error: Exception, seg: Any, dt: Any, count_key: Any, count: Any) -> None:
    """The first use of a segment since the start; or of one that does not exist, or a runtime's own."""
    try:
        if not _live or seg in _raw_prefetch:
            raise error
        series = by_key.get(seg)
        if series is not None and series.target is PREFETCH_TPROF and seg in PREFETCH_TPROF:
            _raw_prefetch[seg] = (series.raw, series.counter)
            flow.touched(series)
            if series.counter is None:
                flow.touched(by_key["place_experts"])
            note_tprof(seg, dt, count_key=count_key, count=count)
            return
        PREFETCH_TPROF[seg] += dt
        if count_key is not None:
            PREFETCH_TPROF[count_key] += count
    except Exception as reason:
        lose("note_tprof", reason)


def _note_other(seg: str, dt: Any, count_key: Any, count: Any) -> None:
    """Seconds with another count than their number."""
    series = by_key[seg]
    if series.counter is not None:
        PREFETCH_TPROF[seg] += dt
    else:
        series.raw.append(dt)
        if len(series.raw) > _LIMIT:
            flow.touched(series)
    if count_key is not None:
        PREFETCH_TPROF[count_key] += count


def _tick(seg: str, t0: float) -> None:
    """Add the seconds since `t0`, a `time.perf_counter()`, to a segment of PROF."""
    try:
        if _live:
            seconds = _raw_block[seg]
            seconds.append(perf_counter() - t0)
            if len(seconds) > _LIMIT:
                flow.touched(by_key[seg])
            return
        PROF[seg] += perf_counter() - t0
    except Exception as error:
        _tick_first(error, seg, t0)


def _tick_first(error: Exception, seg: Any, t0: Any) -> None:
    try:
        if not _live or seg in _raw_block:
            raise error
        if seg in SEGMENTS and seg in PROF:
            _raw_block[seg] = by_key[seg].raw
            flow.touched(by_key[seg])
            _tick(seg, t0)
            return
        PROF[seg] += perf_counter() - t0
    except Exception as reason:
        lose("_tick", reason)
