"""Drop-in for a streaming runtime's private module of timing dicts: the same names, and live telemetry behind them.

    from moe_telemetry.profiling import *

in place of the runtime's own module is enough. The dicts hold what they always held; while telemetry runs, what
reaches them reaches the metrics too (docs/profiling.md: which label comes from where, and what cannot be known).

Flags are read from the environment at import and are on when the variable is exactly 1. The functions raise no
Exception: what they cannot take is dropped and counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from . import profiling_ticks, recording
from .hooks import Phase
from .profiling_misses import add_plain, among, read_items, repeats, truth
from .profiling_state import (
    MISS_ATTRIB,
    PREDICT_RECALL_PROF,
    PREFETCH_TPROF,
    PROF,
    WINDOW_PROF,
    flow,
    lose,
    misses,
    switch,
)
from .profiling_ticks import _tick, note_tprof
from .profiling_views import View, samples, sums
from .reuse import LARGE, MAX_WAITING
from .store import Store

__all__ = [
    "MISS_ATTRIB",
    "PREDICT_RECALL_PROF",
    "PREFETCH_TPROF",
    "PROF",
    "TPROF_ON",
    "UNION_ON",
    "UNION_PROF",
    "UNION_SAMPLES",
    "WINDOW_PROF",
    "_PROF_ON",
    "_tick",
    "note_miss_attrib",
    "note_tprof",
    "note_union",
    "prof_reset",
    "set_phase",
    "tprof_reset",
    "union_reset",
]

_PROF_ON = os.environ.get("STREAM_PROF") == "1"
TPROF_ON = os.environ.get("PREFETCH_TPROF") == "1"
UNION_ON = os.environ.get("UNION_PROF") == "1"

UNION_PROF: dict[int, list[int]] = View(flow.unions, sums, lose)
"""By sequence length: sum of the unions' sizes, and layer calls."""
UNION_SAMPLES: dict[int, dict[int, Any]] = View(flow.unions, samples, lose)
"""By sequence length and layer: every union's size (a sequence; its order is not that of the calls)."""

_fast = flow.unions.fast
_passes = flow.passes
_active = flow.home.active
_decode, _prefill = misses.decode, misses.prefill
_live = False


# -- the functions ----------------------------------------------------------------------------------------------


def note_union(seq: int, union_count: int, layer_idx: int = -1) -> None:
    """Count one layer call that routed to `union_count` distinct experts, in a pass of `seq` tokens."""
    try:
        if flow.busy or _active:
            flow.note(seq, union_count, layer_idx)
            return
        cells = _fast[seq][layer_idx]
        if flow.watched and (layer_idx <= _passes.layer or layer_idx >= _passes.end or seq != _passes.seq):
            if seq == _passes.seq and _passes.settled:  # of the phase of the union before
                _passes.decided(layer_idx, layer_idx <= _passes.layer)
            else:
                flow.turn(seq, layer_idx)
        cells.sizes[union_count] += 1
        cells.unknown += 1
        if union_count > cells.capacity:
            cells.overflows += 1
        _passes.seq = seq
        _passes.layer = layer_idx
    except Exception:  # most often a length, layer or size that is new
        flow.note(seq, union_count, layer_idx)


# One body: a call costs as much as four increments, and this is called for every layer of every pass.
def note_miss_attrib(  # noqa: PLR0912, PLR0915
    uniq: Any, predicted: Any, resident: Any, is_decode: bool, ready: Any = None
) -> None:
    """Count what became of one layer's routed experts; call it after promote and before acquire.

    Args:
        uniq: ids of the routed experts. The dict counts an id as often as it comes, the metrics once.
        predicted: ids that were predicted; None for none.
        resident: ids in the pool now; anything that knows `in`.
        is_decode: whether the pass is decode (or verify).
        ready: predicted ids whose read has finished; None for none.
    """
    try:
        decode = is_decode if type(is_decode) is bool else truth(is_decode)
        items = None
        if type(uniq) is not set:
            items = read_items(uniq)
            uniq = set(items)
        if type(resident) is not set:
            resident = among(uniq, resident)
        if type(predicted) is not set:
            predicted = _NOTHING if predicted is None else among(uniq, predicted)
        if type(ready) is not set:
            ready = _NOTHING if ready is None else among(uniq, ready)
        absent = uniq - resident
        number, missed = len(uniq), len(absent)
        if missed > number:  # noqa: PLR1730  # the set has shrunk meanwhile, in another thread; max() costs a call
            number = missed
        late = evicted = by_prefetch = 0
        if ready:
            arrived = uniq & ready
            if not arrived <= predicted:  # it is nearly always
                arrived = arrived & predicted
            by_prefetch = len(arrived)
        if missed and not absent.isdisjoint(predicted):
            named = absent & predicted
            late = len(named)
            if ready:
                evicted = len(named & ready)
                late -= evicted
                by_prefetch = max(by_prefetch - evicted, 0)
        if not _live:
            add_plain(MISS_ATTRIB, decode, number, missed, late, evicted)
            if items is not None and len(items) != number:
                add_plain(MISS_ATTRIB, decode, *repeats(items, absent, predicted, ready), calls=0)
            return
        unpredicted = missed - late - evicted
        hits = number - missed
        if decode:
            cells, untold, curve = flow.misses("decode")
            sums = _decode
        else:
            cells, untold, curve = flow.misses("prefill")
            sums = _prefill
        if curve is not None:
            try:
                # The usual case of what the call does, which costs as much again.
                if number <= LARGE and uniq <= curve.known and len(curve.waiting) < MAX_WAITING:
                    curve.waiting.append([curve, *uniq])
                else:
                    curve.hand_over(uniq)
            except Exception:
                curve.stack.leave_out()
        sums.calls += 1
        sums.routed += number
        cells.hit += hits
        cells.prefetch_hits += by_prefetch
        if missed:
            sums.misses += missed
            sums.late += late
            sums.evicted += evicted
            cells.miss_timing += late
            cells.miss_evicted += evicted
            cells.miss_unpredicted += unpredicted
            if untold:
                cells.partial += 1
        elif untold:
            cells.all_hit += 1
        if items is not None and len(items) != number:
            sums.add(*repeats(items, absent, predicted, ready))
    except Exception as error:
        lose("note_miss_attrib", error)


_NOTHING: frozenset[Any] = frozenset()


# -- phases, resets, start and stop -----------------------------------------------------------------------------


def set_phase(phase: Phase | str | None) -> None:
    """Name the phase of what comes from now on: prefill or decode; None lets the calls tell it again."""
    try:
        flow.set_phase(None if phase is None else flow.home.phase(phase).name)
    except Exception as error:
        lose("set_phase", error)


def tprof_reset() -> None:
    """Set PREFETCH_TPROF to zero; the metrics keep their totals, as with every reset."""
    for key in list(PREFETCH_TPROF):
        PREFETCH_TPROF[key] = 0 if isinstance(PREFETCH_TPROF[key], int) else 0.0


def prof_reset() -> None:
    """Set every entry of PROF to 0.0."""
    for key in list(PROF):
        PROF[key] = 0.0


def union_reset() -> None:
    """Empty UNION_PROF and UNION_SAMPLES."""
    flow.reset_unions()


def _follow(store: Store | None) -> None:
    """Go where the global recorder goes."""
    global _live, _active  # noqa: PLW0603
    _live = False
    profiling_ticks.follow(False)
    try:
        switch(store)
    except Exception as error:  # a start or a stop must not fail for what waited here
        lose("switch", error)
    _active = flow.home.active
    _live = store is not None
    profiling_ticks.follow(_live)


def _locked(function: Callable[..., None]) -> Callable[..., None]:
    """The variant for interpreters without a global lock."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> None:
        with recording.hook_lock():
            function(*args, **named)

    return call


if recording.needs_lock():
    for _function in (note_tprof, _tick, note_union, note_miss_attrib, tprof_reset, prof_reset, union_reset, set_phase):
        globals()[_function.__name__] = _locked(_function)
recording.follow(_follow)
