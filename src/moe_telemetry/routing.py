"""Routing that stays on the device: lazy arrays are kept for a few passes, reduced together and read later (D8).

Reading routed ids where they are made waits for the device in every layer. Here a call only keeps what it was given;
after FORWARDS passes everything kept is reduced in a handful of operations (reduction.py) and evaluated
asynchronously, and the integers are read BATCHES_BEHIND batches later, when the device has long been done.

Nothing is computed that the model did not compute: the router behind the last use of a prefill chunk is dead code, and
stays dead. All of it happens on the thread that makes the passes, in the call that begins a new one; only a stop takes
over what another thread has left. This module and reduction.py are imported once an MLX array has come to a hook.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sized
from threading import get_ident
from typing import Any

import mlx.core as mx

from . import counting, values
from .calls import Call, Calls, mask_of
from .cells import SeqCells
from .counting import SHARED_EXPERTS
from .losses import lost
from .passes import Pass, Plan
from .pending import Pending
from .reduction import Batch, Tallies, Unit, count_parts
from .store import Store
from .values import Refused

FORWARDS = 16
"""Forward passes reduced together."""
BATCHES_BEHIND = 1
"""Batches launched behind one before it is read."""
MAX_IDS = 32_768
"""Routed ids kept before a batch is reduced early: those of a long prefill are not small."""
MAX_CALL_IDS = 1 << 24
"""Routed ids of one call, two million tokens top-8: to count more would take memory that the model needs."""
MAX_PLANS = 256

_HOOK = "routed_array"
_INTEGERS = frozenset((mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64))

_NOTHING = Calls()


class Router:
    """What the passes of one thread have handed in and is not counted yet.

    A pass is in progress until the next one begins, then pending until it, or a later one, is found to be evaluated,
    then closed, in a batch, and counted.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Held in every call, and waited for by a stop only: where a call finds it taken, it has come in the middle of
        # another one of its thread (a signal handler, a finalizer), or of the stop.
        self._lock = threading.Lock()
        self._ended = False
        self._left_out = False
        self._row: SeqCells | None = None  # of the pass in progress, where more calls may belong to it
        self._layers: set[int] = set()
        self._forward: Unit = _NOTHING
        self._pending = Pending(store)
        self._closed: list[Unit] = []
        self._ids = 0
        self._batches: deque[Batch] = deque()
        self._tallies: Tallies = {}
        self._plans: dict[tuple[SeqCells, tuple[int | None, ...]], Plan] = {}

    # One body: see live.LiveRecorder.routed.
    def take(  # noqa: PLR0912
        self, row: SeqCells, layer: Any, indices: Any, experts: Any, resident: Any, predicted: Any, ready: Any
    ) -> None:
        """Keep one layer call of the pass that `row` stands for. A layer that comes again begins a new pass."""
        if type(experts) is not int or not 0 < experts <= SHARED_EXPERTS:
            experts = values.count(experts)
            if not 0 < experts <= SHARED_EXPERTS:
                raise Refused("out_of_range", experts)
        if type(indices) is not mx.array or indices.dtype not in _INTEGERS or not indices.ndim:
            raise Refused("not_a_number", indices)
        size = indices.size
        if size > MAX_CALL_IDS:
            raise Refused("too_many", indices)
        if resident is not None:
            resident = mask_of(resident, experts)
        if predicted is not None:
            predicted = mask_of(predicted, experts)
            if ready is not None:
                ready = mask_of(ready, experts)
        if predicted is None or resident is None:
            ready = None  # says nothing then (hooks.Recorder.routed)
        index = layer if type(layer) is int and layer >= 0 else values.layer_index(layer)
        if not self._lock.acquire(False):
            self._come_between(indices)
            return
        try:
            if self._ended:
                return
            if row is not self._row or index in self._layers:
                self._begin()
                self._row, self._layers, self._forward = row, set(), Calls()
            if self._pending.overgrown:
                raise Refused("unevaluated", indices)
            try:
                cells = row.by_layer[index]
            except KeyError:
                cells = row.store.layer_cells(row, layer)
            # A copy shares the values, and keeps them when the caller's own array is written to.
            kept = mx.array.__copy__(indices)
            self._forward.append(Call(cells, index, kept, size, experts, resident, predicted, ready))  # type: ignore[union-attr]
            self._layers.add(index)
            self._ids += size
        finally:
            self._lock.release()

    def take_pass(
        self,
        row: SeqCells,
        layers: tuple[int | None, ...],
        experts: tuple[int, ...],
        indices: list[mx.array],
        packed: mx.array | None = None,
    ) -> None:
        """Keep a whole pass: the calls' layers, their numbers of experts, and indices, which nobody writes to; or the
        same as one array (`adding.pack`).

        It may be that nobody evaluates it.
        """
        if not self._lock.acquire(False):
            self._come_between(indices)
            return
        try:
            if self._ended:
                return
            self._begin()
            if self._pending.overgrown:
                raise Refused("unevaluated", indices)
            plan = self._plans.get((row, layers))
            if plan is None or plan.experts != experts[0] or plan.pools != row.store.pools:
                plan = self._plan(row, layers, experts[0])
            elif plan.folded:
                row.store.folded += plan.folded
            whole = Pass(plan, indices, packed)
            if whole.type not in _INTEGERS:
                raise Refused("not_a_number", indices)
            if whole.size > MAX_CALL_IDS:
                raise Refused("too_many", indices)
            self._ids += whole.size * len(indices)
            if (whole.packed or whole.uniform()) and experts.count(experts[0]) == len(experts):
                self._forward = whole
            else:
                sizes = [array.size for array in indices]
                calls = zip(plan.cells, plan.layers, indices, sizes, experts, strict=True)
                self._forward = Calls((Call(*call) for call in calls), told=False, whole=True)
        finally:
            self._lock.release()

    def drain(self, end: bool = False) -> None:
        """Count all that was handed in so far, waiting for the device; with `end` nothing is taken any more."""
        if not self._lock.acquire(False):
            if end:  # by a signal handler in the middle of a call
                self._leave_out()
            return
        try:
            self._ended = self._ended or end
            if self._left_out:
                self._let_go()
                return
            self._row = None
            if self._forward:
                self._pending.add(self._forward)
                self._forward = _NOTHING
            self._pending.close(self._closed, every=True)
            self._pending.give_up()
            self._pending.overgrown = False
            self._count()
        finally:
            self._lock.release()

    def take_over(self, seconds: float) -> None:
        """End from another thread than the one that makes the passes, and count what it left.

        Without what is not known to be evaluated, the pass in progress above all: that thread may be at it.
        """
        if not self._lock.acquire(timeout=max(0.0, seconds)):  # it waits for the device
            self._leave_out()
            return
        try:
            self._ended = True
            left = [unit for unit in self._closed if unit.has_arrays()]
            self._closed = [unit for unit in self._closed if not unit.has_arrays()]
            if self._forward.told:
                left.append(self._forward)
            self._forward = _NOTHING
            self._lose(left)
            self._pending.give_up()
            self._count()
        finally:
            self._lock.release()

    def _come_between(self, indices: object) -> None:
        if not self._store.ended:
            raise Refused("changed", indices)

    def _leave_out(self) -> None:
        """End while a call is in progress, which has the rest in its hands."""
        self._ended = self._left_out = True
        self._lose([self._forward, self._pending, *self._closed, *self._batches, *self._tallies.values()])

    def _let_go(self) -> None:
        """What was left out is told as a loss: it must not count as well."""
        self._forward, self._pending, self._closed = _NOTHING, Pending(self._store), []
        self._batches.clear()
        self._tallies = {}

    def _lose(self, left: Iterable[Sized]) -> None:
        if records := sum(map(len, left)):
            lost(self._store, _HOOK, Refused("unevaluated", self), records)

    def _plan(self, row: SeqCells, layers: tuple[int | None, ...], experts: int) -> Plan:
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        plan = self._plans[row, layers] = Plan(row, layers, experts)
        return plan

    def _begin(self) -> None:
        """A pass begins: the one before it is complete."""
        self._row = None
        forward, self._forward = self._forward, _NOTHING
        if forward and (self._pending.add(forward) or self._ids >= MAX_IDS):
            self._pending.close(self._closed)
            if len(self._closed) >= FORWARDS or self._ids >= MAX_IDS:
                self._launch()
                self._read(BATCHES_BEHIND)

    def _launch(self) -> None:
        """Reduce the closed passes, and let the device begin."""
        closed, self._closed, self._ids = self._closed, [], 0
        if not closed:
            return
        try:
            self._reduce(closed)
        except Exception:  # one odd array must not take the other passes with it
            counting.give_up_kernels()
            for unit in closed:
                try:
                    self._reduce([unit])
                except Exception as error:
                    lost(self._store, _HOOK, error, len(unit))

    def _reduce(self, units: list[Unit]) -> None:
        batch = Batch(units, self._tallies)
        self._tallies = batch.carried
        self._batches.append(batch)

    def _read(self, behind: int) -> None:
        """Count the batches that at least so many were launched behind."""
        while len(self._batches) > behind:
            batch = self._batches.popleft()
            with self._store.lock:
                batch.count(self._store)

    def _count(self) -> None:
        """Count everything that is closed."""
        self._launch()
        self._read(0)
        tallies, self._tallies = self._tallies, {}
        with self._store.lock:
            count_parts(self._store, tallies.values())


def router_of(store: Store) -> Router:
    """The calling thread's router, made at its first call."""
    router: Router = store.routers.setdefault(get_ident(), Router(store))
    store.watch(get_ident())
    store.drain_orphans()
    if store.ended:
        router.drain(end=True)
    return router
