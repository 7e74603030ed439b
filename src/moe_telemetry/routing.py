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
from functools import lru_cache
from io import StringIO
from threading import get_ident
from typing import Any

import mlx.core as mx

from . import values
from .cells import SeqCells
from .counting import SHARED_EXPERTS
from .loads import LoadSums
from .losses import losing, lost
from .passes import Pass, Plan
from .reduction import Batch, Call, Mask
from .store import Store
from .values import Refused

FORWARDS = 8
"""Forward passes reduced together."""
BATCHES_BEHIND = 2
"""Batches launched behind one before it is read."""
MAX_IDS = 32_768
"""Routed ids kept before a batch is reduced early: those of a long prefill are not small."""
MAX_GRAPH = 4_000_000
"""Characters that a graph nobody has evaluated may draw (some 20 passes), before a thread's calls are refused: what
walks it goes down one frame a node."""
MAX_PLANS = 256
TAKE_OVER_SECONDS = 0.5
"""How long a stop waits for a hook that another thread is in."""

_HOOK = "routed_array"
_INTEGERS = frozenset((mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64))


class Router:
    """What the passes of one thread have handed in and is not counted yet."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Held in each call by the thread that makes the passes, so that a stop can take over between two.
        self._lock = threading.RLock()
        self._ended = False
        self._row: SeqCells | None = None
        self._forward: list[Call] = []
        self._layers: set[int] = set()
        self._plans: dict[tuple[SeqCells, tuple[int | None, ...]], Plan] = {}
        self._closed: list[
            tuple[Pass | list[Call], bool]
        ] = []  # with whether it is a loss if nobody evaluates the pass
        self._ids = 0
        self._batches: deque[Batch] = deque()
        self._sums: LoadSums = {}
        self._overgrown = False

    def take(
        self, row: SeqCells, layer: Any, indices: Any, experts: Any, resident: Any, predicted: Any, ready: Any
    ) -> None:
        """Keep one layer call of the pass that `row` stands for. A layer that comes again begins a new pass."""
        if type(experts) is not int or not 0 < experts <= SHARED_EXPERTS:
            experts = values.count(experts)
            if not 0 < experts <= SHARED_EXPERTS:
                raise Refused("out_of_range", experts)
        if type(indices) is not mx.array or indices.dtype not in _INTEGERS or not indices.ndim:
            raise Refused("not_a_number", indices)
        if resident is not None:
            resident = _mask(resident, experts)
        if predicted is not None:
            predicted = _mask(predicted, experts)
            if ready is not None:
                ready = _mask(ready, experts)
        if predicted is None or resident is None:
            ready = None  # says nothing then (hooks.Recorder.routed)
        index = layer if type(layer) is int and layer >= 0 else values.layer_index(layer)
        with self._lock:
            if self._ended:
                return
            if index in self._layers or row is not self._row:
                self._begin(row)
            if self._overgrown:
                raise Refused("unevaluated", indices)
            try:
                cells = row.by_layer[index]
            except KeyError:
                cells = row.store.layer_cells(row, layer)
            # A copy shares the values, and keeps them when the caller's own array is written to.
            self._forward.append(Call(cells, index, mx.array.__copy__(indices), experts, resident, predicted, ready))
            self._layers.add(index)
            self._ids += indices.size

    def take_pass(
        self, row: SeqCells, layers: tuple[int | None, ...], experts: tuple[int, ...], indices: list[mx.array]
    ) -> None:
        """Keep a whole pass: the calls' layers, their numbers of experts, and indices, which nobody writes to.

        It may be that nobody evaluates it.
        """
        with self._lock:
            if self._ended:
                return
            self._begin(row)
            if self._overgrown:
                raise Refused("unevaluated")
            plan = self._plans.get((row, layers))
            if plan is None or plan.experts != experts[0]:
                if len(self._plans) >= MAX_PLANS:
                    self._plans.clear()
                plan = self._plans[row, layers] = Plan(row, layers, experts[0])
            whole = Pass(plan, indices)
            if whole.uniform() and experts.count(experts[0]) == len(experts):
                self._closed.append((whole, False))
            else:
                calls = zip(plan.cells, plan.layers, indices, experts, strict=True)
                self._closed.append(([Call(*call) for call in calls], False))
            self._ids += whole.size * whole.number

    def drain(self, end: bool = False) -> None:
        """Count all that was handed in so far, waiting for the device; with `end` nothing is taken any more."""
        with self._lock:
            self._ended = self._ended or end
            self._close()
            self._launch()
            self._read(0)
            self._overgrown = False
            sums, self._sums = self._sums, {}
            for each in sums.values():
                with losing(self._store, _HOOK):
                    each.count_in(self._store)

    def take_over(self) -> None:
        """End from another thread than the one that makes the passes, and count what it left."""
        if not self._lock.acquire(timeout=TAKE_OVER_SECONDS):
            lost(self._store, _HOOK, Refused("unevaluated", self))  # that thread waits for the device
            return
        try:
            self.drain(end=True)
        finally:
            self._lock.release()

    def _begin(self, row: SeqCells) -> None:
        self._close()
        self._row = row
        if len(self._closed) >= FORWARDS or self._ids >= MAX_IDS:
            self._launch()
            self._read(BATCHES_BEHIND)

    def _close(self) -> None:
        if self._forward:
            self._closed.append((self._forward, True))
            self._forward = []
            self._layers = set()

    def _launch(self) -> None:
        """Reduce the closed passes, and let the device begin."""
        closed, self._closed, self._ids = self._closed, [], 0
        computed: list[Pass | list[Call]] = []
        for forward, told in closed:
            number = self._evaluated(forward.indices if isinstance(forward, Pass) else [c.indices for c in forward])
            if not number:
                if told:
                    lost(self._store, _HOOK, Refused("unevaluated", forward))
            elif isinstance(forward, Pass):
                forward.number = number
                computed.append(forward)
            else:
                computed.append(forward[:number])
        if not computed:
            return
        try:
            self._reduce(computed)
        except Exception:  # one odd array must not take the other passes with it
            for one in computed:
                with losing(self._store, _HOOK):
                    self._reduce([one])

    def _reduce(self, forwards: list[Pass | list[Call]]) -> None:
        batch = Batch(forwards, self._sums)
        self._sums = batch.carried
        self._batches.append(batch)

    def _read(self, behind: int) -> None:
        """Count the batches that at least so many were launched behind."""
        while len(self._batches) > behind:
            batch = self._batches.popleft()
            with losing(self._store, _HOOK):
                batch.count(self._store)

    def _evaluated(self, indices: list[mx.array]) -> int:
        """How many of a pass' calls the model has computed: every layer needs the routing of those before it.

        None in a pass under a transformation (mx.compile, mx.grad), in one that failed or that nobody asked for, and
        in a prefill chunk whose only MoE layers are behind the last use.
        """
        number = len(indices)
        if graph := _graph(indices[0]):
            self._overgrown = self._overgrown or graph > MAX_GRAPH
            number = 0
        while number and _graph(indices[number - 1]):
            number -= 1
        return number


def router_of(store: Store) -> Router:
    """The calling thread's router, made at its first call."""
    router: Router = store.routers.setdefault(get_ident(), Router(store))
    store.watch(get_ident())
    store.drain_orphans()
    if store.ended:
        router.drain(end=True)
    return router


def _mask(given: Any, experts: int) -> Mask:
    """A set of expert ids as it is now: a bool array (experts,), or whatever else `routed` takes."""
    if type(given) is mx.array:
        if given.dtype != mx.bool_ or given.shape != (experts,):
            raise Refused("not_a_number", given)
        return mx.array.__copy__(given)
    found = frozenset(values.ids(given))
    if found <= _ids(experts):  # one call: a pool has a hundred ids, and comes with each layer
        return found
    if any(type(expert) is not int for expert in found):
        found = frozenset(map(values.count, found))
    if not found <= _ids(experts):
        raise Refused("out_of_range", given)
    return found


@lru_cache(maxsize=16)
def _ids(experts: int) -> frozenset[int]:
    return frozenset(range(experts))


def _graph(array: mx.array) -> int:
    """Length of the drawn graph behind an array that is not evaluated; 0 once it has been computed, or begun."""
    drawn = StringIO()
    mx.export_to_dot(drawn, array)
    text = drawn.getvalue()
    return len(text) if "->" in text else 0
