"""Hook bodies: from arguments to cells on the calling thread, without the SDK, a lock or a format string (D1).

Every body keeps four rules. What may fail comes before the first increment, so a record counts whole or not at all.
What the caller gave may be changing in another thread: a set is read once, or so that no difference is negative. The
right side of an increment holds no call (cells). And an Exception ends in `lose`, never in the caller; the one that
cannot is the RecursionError of a caller that has no frames left.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from threading import get_ident
from time import perf_counter
from types import MethodType
from typing import TYPE_CHECKING, Any

from . import values
from .catalog import (
    FORWARD_BOUNDS,
    READ_BOUNDS,
    REQUEST_BOUNDS,
    RESIDENCIES,
    TPOT_BOUNDS,
    TTFT_BOUNDS,
)
from .cells import HistogramCell, LayerCells, SeqCells
from .duration_hooks import duration_hook
from .hooks import HOOKS, Recorder
from .losses import lose
from .reuse import LARGE, MAX_WAITING
from .values import MAX_SECONDS, Refused

if TYPE_CHECKING:
    import mlx.core as mx

    from .routing import Router
    from .store import Store


class LiveRecorder(Recorder):
    """The hooks while telemetry runs; swapped in for Recorder by `attach`.

    `_row` holds the cells of the latest forward pass. As long as one thread makes them all, every thread's events
    belong to that pass; the second thread that begins one turns the recorder into a ThreadedRecorder.
    """

    __slots__ = ()

    def forward(self, tokens: Any, phase: Any = None) -> None:
        try:
            store = self._store
            try:
                row = store.forwards[phase, tokens] if type(tokens) is int else store.forward_row(tokens, phase)
            except (KeyError, TypeError):
                row = store.forward_row(tokens, phase)
            thread = get_ident()
            if thread != store.thread:
                _meet_thread(self, thread)
            if self._store is store:  # else stopped or started anew meanwhile
                self._row = row
            store.active[thread] = (row.phase.name, perf_counter())
        except Exception as error:
            lose(self, "forward", error)
            _forget_pass(self)

    def forward_done(self, seconds: Any) -> None:
        try:
            store = self._store
            store.active.pop(get_ident(), None)
            row = self._row
            if type(seconds) is not float or not 0.0 <= seconds <= MAX_SECONDS:
                seconds = values.seconds(seconds)
            cell = row.duration
            cell.counts[bisect_left(FORWARD_BOUNDS, seconds)] += 1
            cell.sum += seconds
            store.forward_done_seen = True
        except Exception as error:
            lose(self, "forward_done", error)

    def tokens(self, n: Any, phase: Any = None) -> None:
        try:
            store = self._store
            cells = self._row.phase if phase is None else store.phase(phase)
            number = values.count(n)
            cells.tokens += number
        except Exception as error:
            lose(self, "tokens", error)

    def speculation(self, proposed: Any, accepted: Any) -> None:
        try:
            store = self._store
            taken = values.count(accepted)
            refused = values.count(proposed) - taken
            if refused < 0:
                raise Refused("out_of_range", accepted)
            store.accepted += taken
            store.rejected += refused
        except Exception as error:
            lose(self, "speculation", error)

    def request(self, time_to_first_token: Any, duration: Any, output_tokens: Any, *, idle: Any = True) -> None:
        try:
            store = self._store
            whole = values.seconds(duration)
            number = values.count(output_tokens)
            first = None if time_to_first_token is None else values.seconds(time_to_first_token)
            if type(idle) is not bool:
                values.refuse_lazy(idle)
                idle = bool(idle)
            if first is not None and first > whole:
                raise Refused("out_of_range", time_to_first_token)
            _observe(store.request, REQUEST_BOUNDS, whole)
            if first is not None:
                _observe(store.ttft, TTFT_BOUNDS, first)
                if number > 1:
                    _observe(store.tpot, TPOT_BOUNDS, (whole - first) / (number - 1))
            if idle:
                store.drain()
        except Exception as error:
            lose(self, "request", error)

    # One body: a call costs as much as four increments, and this is the hook of every layer of every pass.
    def routed(  # noqa: PLR0912, PLR0915
        self, layer: Any, experts: Any, resident: Any = None, predicted: Any = None, ready: Any = None
    ) -> None:
        try:
            row = self._row
            if type(experts) is not set:
                experts = values.ids(experts)
            number = len(experts)
            # Differences: built in half the time that the intersections take, as few of the ids are in them.
            if predicted is None:
                recalled = missed = wasted = 0
            else:
                if type(predicted) is not set:
                    predicted = values.ids(predicted)
                unused = predicted - experts
                recalled = len(predicted)  # no switch point between this and the first read of it
                wasted = len(unused)
                recalled -= wasted
                missed = number - recalled
                if recalled < 0 or missed < 0:  # there was one: no lock, or ids that compare as they like
                    recalled = 0 if recalled < 0 else number
                    missed = number - recalled
            late = evicted = by_prefetch = 0
            if resident is not None:
                if type(resident) is not set:
                    resident = values.ids(resident)
                absent = experts - resident
                misses = len(absent)
                hits = number - misses
                if hits < 0:  # experts grew under our hands: there is no right figure
                    raise Refused("changed", experts)
                # Only predicted experts can be late or evicted, and only they can owe their hit to a prefetch.
                if recalled:
                    if ready is None:
                        if misses:
                            late = len(absent & predicted)
                    else:
                        if type(ready) is not set:
                            ready = values.ids(ready)
                        if not ready <= predicted:
                            ready = ready & predicted
                        untaken = unused & ready
                        by_prefetch = len(ready)  # as above
                        by_prefetch -= len(untaken)
                        for expert in absent:  # a few, for which sets of their own would take longer
                            if expert in predicted:
                                if expert in ready:
                                    evicted += 1
                                else:
                                    late += 1
                        by_prefetch -= evicted
                        if by_prefetch < 0 or by_prefetch > hits:
                            by_prefetch = 0 if by_prefetch < 0 else hits
            try:
                cells = row.by_layer[layer] if type(layer) is int else row.store.layer_cells(row, layer)
            except KeyError:
                cells = row.store.layer_cells(row, layer)
            curve = cells.curve
            if curve is not None:
                try:
                    # The usual case of what the call does, which costs as much again.
                    if number <= LARGE and experts <= curve.known and len(curve.waiting) < MAX_WAITING:
                        curve.waiting.append([curve, *experts])
                    else:
                        curve.hand_over(experts)
                except Exception:
                    curve.stack.leave_out()
            try:
                cells.sizes[number] += 1
            except KeyError:
                cells.union.add(number)
            if number > cells.capacity:
                cells.overflows += 1
            if resident is None:
                cells.unknown += 1
            else:
                cells.hit += hits
                if misses:
                    cells.partial += 1
                    cells.miss_timing += late
                    cells.miss_evicted += evicted
                    cells.miss_unpredicted += misses - late - evicted
                else:
                    cells.all_hit += 1
                cells.prefetch_hits += by_prefetch
            if predicted is not None:
                cells.recalled += recalled
                cells.missed += missed
                cells.wasted += wasted
        except Exception as error:
            lose(self, "routed", error)

    def routed_array(
        self,
        layer: Any,
        indices: Any,
        num_experts: Any,
        resident: Any = None,
        predicted: Any = None,
        ready: Any = None,
    ) -> None:
        try:
            row = self._row
            try:
                router = row.store.routers[get_ident()]
            except KeyError:
                router = _new_router(row.store, indices)
            router.take(row, layer, indices, num_experts, resident, predicted, ready)
        except Exception as error:
            lose(self, "routed_array", error)

    def union(self, layer: Any, size: Any, residency: Any = None) -> None:
        try:
            row = self._row
            if residency is not None and (not isinstance(residency, str) or residency not in RESIDENCIES):
                raise Refused("unknown_label", residency)
            if type(size) is not int:
                size = values.count(size)
            try:
                cells = row.by_layer[layer] if type(layer) is int else _new_cells(row, layer, size)
            except KeyError:
                cells = _new_cells(row, layer, size)
            try:
                cells.sizes[size] += 1
            except KeyError:  # a new size, or one that is none
                cells.union.add(values.count(size))
            if size > cells.capacity:
                cells.overflows += 1
            if residency is None or residency == "unknown":
                cells.unknown += 1
            elif residency == "all_hit":
                cells.all_hit += 1
            elif residency == "partial":
                cells.partial += 1
            else:
                cells.bypassed += 1
        except Exception as error:
            lose(self, "union", error)

    def recall(self, layer: Any, predicted: Any, routed: Any) -> None:
        try:
            chosen = values.ids(routed)  # of sets, copies
            named = values.ids(predicted)
            wasted = len(named - chosen)
            recalled = len(chosen & named)
            missed = len(chosen) - recalled
            cells = _layer_cells(self._row, layer)
            cells.recalled += recalled
            cells.missed += missed
            cells.wasted += wasted
        except Exception as error:
            lose(self, "recall", error)

    prefetch = duration_hook("prefetch", "stage")
    promote = duration_hook("promote", "step")
    block = duration_hook("block", "segment")
    window = duration_hook("window")

    def stall(self, seconds: Any) -> None:
        try:
            _observe(self._row.phase.stall, READ_BOUNDS, seconds)
        except Exception as error:
            lose(self, "stall", error)

    def read(self, source: Any, nbytes: Any, seconds: Any, phase: Any = None) -> None:
        try:
            store = self._store
            cells = self._row.phase if phase is None else store.phase(phase)
            durations, sizes = cells.read_duration[source], cells.read_bytes[source]
            number = values.count(nbytes)
            _observe(durations, READ_BOUNDS, seconds)
            sizes.count += number
        except Exception as error:
            lose(self, "read", error)

    def block_call(self) -> None:
        try:
            cells = self._row.phase
            cells.block_calls += 1
        except Exception as error:
            lose(self, "block_call", error)

    def placed(self, experts: Any = 1, phase: Any = None) -> None:
        try:
            cells = self._row.phase if phase is None else self._store.phase(phase)
            number = values.count(experts)
            cells.placed += number
        except Exception as error:
            lose(self, "placed", error)

    def prefetch_dropped(self, reason: Any, experts: Any = 1, nbytes: Any = 0, phase: Any = None) -> None:
        try:
            cells = self._row.phase if phase is None else self._store.phase(phase)
            cell = cells.dropped[reason]
            number = values.count(experts)
            wasted = values.count(nbytes)
            cell.count += number
            cells.wasted_bytes += wasted
        except Exception as error:
            lose(self, "prefetch_dropped", error)

    def evicted(self, layer: Any, experts: Any = 1) -> None:
        try:
            number = values.count(experts)
            cells = _layer_cells(self._row, layer)
            cells.evictions += number
        except Exception as error:
            lose(self, "evicted", error)

    def degraded(self, mode: Any, experts: Any = 1) -> None:
        try:
            cell = self._row.phase.degraded[mode]
            number = values.count(experts)
            cell.count += number
        except Exception as error:
            lose(self, "degraded", error)

    def pool(self, layer: Any, capacity: Any = None, resident: Any = None) -> None:
        try:
            slots = None if capacity is None else values.count(capacity)
            used = None if resident is None else values.count(resident)
            self._store.declare_pool(layer, slots, used)
        except Exception as error:
            lose(self, "pool", error)

    def cumulative(self, metric: Any, value: Any, **labels: Any) -> None:
        try:
            number = values.amount(value)
            self._store.feed(metric, number, labels)
        except Exception as error:
            lose(self, "cumulative", error)

    def timed(self, hook: Callable[..., None], *args: Any) -> AbstractContextManager[None]:
        return _Timed(self, hook, args)


class ThreadedRecorder(LiveRecorder):
    """The hooks where several threads make forward passes: each thread's events belong to its own."""

    __slots__ = ()

    @property
    def _row(self) -> SeqCells:
        store = self._store
        return store.by_thread.get(get_ident()) or store.latest

    @_row.setter
    def _row(self, row: SeqCells) -> None:
        store = row.store
        store.by_thread[get_ident()] = store.latest = row


class _Timed:
    """Times a with-block; the duration is recorded when the block raises, too."""

    __slots__ = ("_args", "_begin", "_hook", "_recorder")

    def __init__(self, recorder: Recorder, hook: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._recorder = recorder
        self._hook = hook
        self._args = args

    def __enter__(self) -> None:
        self._begin = perf_counter()

    def __exit__(self, *_: object) -> None:
        elapsed = perf_counter() - self._begin
        try:
            self._hook(*self._args, elapsed)
        except Exception as error:  # not a hook, or one argument too few: off, it would have gone unnoticed
            lose(self._recorder, _name_of(self._hook), error)


def routed_pass(
    recorder: Recorder,
    layers: tuple[int | None, ...],
    experts: tuple[int, ...],
    indices: list[mx.array],
    packed: mx.array | None = None,
) -> None:
    """`routed_array` for all layers of a pass at once: an item for each call, in their order; `packed` are the same
    indices as one array."""
    try:
        row = recorder._row
        router = row.store.routers.get(get_ident())
        if router is None:
            from .routing import router_of

            router = router_of(row.store)
        router.take_pass(row, layers, experts, indices, packed)
    except Exception as error:
        lose(recorder, "routed_array", error)


def _name_of(hook: Any) -> str:
    """A hook's name, "timed" for what is none."""
    with suppress(Exception):
        if type(hook) is MethodType:
            return HOOKS[HOOKS.index(hook.__name__)]
    return "timed"


def _new_router(store: Store, indices: object) -> Router:
    core = sys.modules.get("mlx.core")
    if core is None or type(indices) is not core.array:  # before mlx is imported for a caller that has none
        raise Refused("not_a_number", indices)
    from .routing import router_of

    return router_of(store)


def _observe(cell: HistogramCell, bounds: tuple[float, ...], seconds: Any) -> None:
    if type(seconds) is not float or not 0.0 <= seconds <= MAX_SECONDS:
        seconds = values.seconds(seconds)
    cell.counts[bisect_left(bounds, seconds)] += 1
    cell.sum += seconds


# Functions, not methods: a recorder may be switched off in the middle of a hook, and has no such methods then.


def _layer_cells(row: SeqCells, layer: Any) -> LayerCells:
    try:
        return row.by_layer[layer] if type(layer) is int else row.store.layer_cells(row, layer)
    except KeyError:
        return row.store.layer_cells(row, layer)


def _forget_pass(recorder: Recorder) -> None:
    """The pass that begins is of unknown phase: what belongs to it must not count for the one before."""
    with suppress(Exception):
        store = recorder._store
        thread = get_ident()
        store.active.pop(thread, None)
        if thread != store.thread:
            _meet_thread(recorder, thread)
        recorder._row = store.refused


def _new_cells(row: SeqCells, layer: Any, size: int) -> LayerCells:
    values.count(size)  # before a refused record makes a layer known
    return row.store.layer_cells(row, layer)


def _meet_thread(recorder: Recorder, thread: int) -> None:
    """Prepare for a pass of a thread other than the first one that made passes."""
    store = recorder._store
    if thread in store.by_thread:
        return
    store.watch(thread)
    first = store.thread
    if first is None:
        store.thread = thread
    elif not isinstance(recorder, ThreadedRecorder):
        store.latest = recorder._row
        store.by_thread[first] = recorder._row
        # No call, hence no switch point, before the change: it must not undo a stop or a start meanwhile.
        if recorder.__class__ is LiveRecorder and recorder._store is store:
            recorder.__class__ = ThreadedRecorder
