"""All cells of one telemetry: binds label sets to cells, once each, within the series budget.

Nothing here locks: hooks may be interrupted by signal handlers and finalizers that call hooks again, so a new
entry is made with `dict.setdefault`, of which exactly one caller wins.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

from . import catalog, values
from .catalog import Metric
from .cells import UNLIMITED, HistogramCell, LayerCells, PhaseCells, SeqCells
from .hooks import HOOKS, Phase
from .loads import ExpertLoad
from .reuse import MODES, PoolCurves
from .values import Refused

if TYPE_CHECKING:
    from .routing import Router

logger = logging.getLogger("moe_telemetry")

NONE = -1
"""Index of records whose layer is unknown."""
OTHER = -2
"""Index of the layer that takes what is over the budget."""
LAYER_BUDGET = 256
TAKE_OVER_SECONDS = 0.5
"""How long a stop waits for hooks that other threads are in."""
EXACT_SEQS = 32
"""Sequence lengths above SEQ_EXACT that a phase keeps apart in the snapshot; later ones share their label's cells."""


@dataclass
class Layer:
    """What is known of a layer whatever the phase; gauges are None until their first value."""

    index: int
    capacity: int | None = None
    resident: int | None = None
    load: ExpertLoad | None = None

    @property
    def load_peak(self) -> float | None:
        """Busiest expert's share of the layer's recent tokens times the number of experts."""
        return None if self.load is None else self.load.peak()

    @property
    def label(self) -> str:
        """Value of the label `layer`."""
        return {NONE: catalog.LAYER_NONE, OTHER: catalog.LAYER_OTHER}.get(self.index, str(self.index))


@dataclass(frozen=True)
class Identity:
    """The run: what `moe.run.info` and the GenAI metrics are labelled with. `start_time` in Unix seconds."""

    model: str
    runtime: str
    run: str
    version: str
    start_time: float = field(default_factory=time.time)

    def gen_ai(self) -> tuple[str, str, str]:
        """Values of the GenAI labels; the model is the server's, never what a client sent."""
        return ("text_completion", self.runtime, self.model)


class Store:
    """Cells of one telemetry, and the way from a hook's arguments to them."""

    def __init__(
        self, identity: Identity, decode_seq_max: int = 8, layers: Iterable[int] = (), pool_curve: str = MODES[0]
    ) -> None:
        self.identity = identity
        self.curves = PoolCurves(pool_curve)
        self.decode_seq_max = decode_seq_max
        self.phases = {name: PhaseCells(name) for name in catalog.PHASES}
        self.rows: dict[tuple[str, int | str], SeqCells] = {}
        self.forwards: dict[tuple[object, int], SeqCells] = {}  # forward()'s arguments -> its row
        self.guest_rows: list[SeqCells] = []  # rows of another set of hooks than the recorder's (profiling)
        self.layers: dict[int, Layer] = {}
        self.has_lookups = False
        self.has_predictor = False
        self.accepted = self.rejected = 0
        self.ttft = HistogramCell(catalog.TTFT_BOUNDS)
        self.tpot = HistogramCell(catalog.TPOT_BOUNDS)
        self.request = HistogramCell(catalog.REQUEST_BOUNDS)
        self.lost = dict.fromkeys(catalog.LOST_REASONS, 0)
        self.hook_errors = dict.fromkeys(HOOKS, 0)
        self.logged_at = -math.inf
        self.folded = 0
        self.pools = 0  # raised with every change of a pool's capacity
        # Counters fed as absolute values: what was added so far, and the source's last value.
        self.fed: dict[tuple[str, tuple[str, ...]], int | float] = {}
        self._fed_last: dict[tuple[str, tuple[str, ...]], int | float] = {}
        # Forwards in progress: thread -> (phase, time.perf_counter at its begin).
        self.active: dict[int, tuple[str, float]] = {}
        self.forward_done_seen = False
        self.ended = False  # no pass is in progress any more, whatever `active` holds
        self.latest = self.row("decode", 1)
        self.refused: Any = _RefusedPass(self)
        # Which thread made the first pass; rows by thread once a second one makes passes (recording).
        self.thread: int | None = None
        self.by_thread: dict[int, SeqCells] = {}
        # Held where cells are written to outside of a hook; a lock where hooks hold one, too (recording).
        self.lock: AbstractContextManager[object] = nullcontext()
        # What routed_array holds back by thread, and what threads that have ended left (routing).
        self.routers: dict[int, Router] = {}
        self.orphans: list[Router] = []
        self._watches = threading.local()
        for index in layers:
            self.layer(values.layer_index(index))

    # -- binding ---------------------------------------------------------------------------------------------

    def phase(self, phase: object) -> PhaseCells:
        """Cells of a phase given by name or member of Phase."""
        name = phase.value if isinstance(phase, Enum) else phase
        if not isinstance(name, str) or name not in self.phases:
            raise Refused("unknown_label", phase)
        return self.phases[name]

    def forward_row(self, tokens: object, phase: object) -> SeqCells:
        """Cells of a pass as `forward` was told of it; remembered for the next one where that is bounded."""
        length = values.count(tokens)
        if length == 0:
            raise Refused("out_of_range", tokens)
        if phase is None:
            cells = self.phases["decode" if length <= self.decode_seq_max else "prefill"]
        else:
            cells = self.phase(phase)
        row = self.row(cells.name, length)
        if row.tokens is not None and (phase is None or type(phase) in (str, Phase)):
            # Of these types only: a subclass may equal nothing, and would be kept with all that it holds.
            self.forwards.setdefault((phase, length), row)
        return row

    def row(self, phase: str, tokens: int) -> SeqCells:
        """Cells of a phase and a sequence length of at least 1."""
        known = self.rows.get((phase, tokens))
        if known is not None:
            return known
        seq = catalog.seq_label(tokens)
        exact: int | None = tokens
        if tokens > catalog.SEQ_EXACT:
            apart = sum(
                row.phase.name == phase and (row.tokens or 0) > catalog.SEQ_EXACT for row in list(self.rows.values())
            )
            exact = tokens if apart < EXACT_SEQS else None
        row = SeqCells(self, self.phases[phase], exact, seq)
        return self.rows.setdefault((phase, seq if exact is None else exact), row)

    def layer(self, index: int) -> Layer:
        """The layer, or OTHER when it is new and the budget is spent."""
        known = self.layers.get(index)
        if known is not None:
            return known
        named = len(self.layers) - (NONE in self.layers) - (OTHER in self.layers)
        if index >= 0 and named >= LAYER_BUDGET:
            if OTHER not in self.layers:
                logger.warning(
                    'more than %d layers: further ones are exported as layer="%s" and counted in %s',
                    LAYER_BUDGET,
                    catalog.LAYER_OTHER,
                    catalog.LAYER_FOLDED.prometheus,
                )
            index = OTHER
        return self.layers.setdefault(index, Layer(index))

    def layer_cells(self, row: SeqCells, given: object) -> LayerCells:
        """Cells of a layer given in any accepted form; `row.by_layer` finds them directly from then on."""
        known = row.layers  # first: a refused record makes no layer known
        index = values.layer_index(given)
        layer = self.layer(index)
        if layer.index == OTHER:
            self.folded += 1
        capacity = UNLIMITED if layer.capacity is None else layer.capacity
        cells = known.get(layer.index)
        if cells is None:
            made = LayerCells(capacity, self.curves.feed(layer.index, row.phase.name))
            cells = known.setdefault(layer.index, made)
        if layer.index != OTHER:
            row.by_layer[index] = cells
            if given is None:
                row.by_layer[None] = cells
        return cells

    def watch(self, thread: int) -> None:
        """Forget the calling thread when it ends: a later one may get its identifier, and is not its heir."""
        if not hasattr(self._watches, "own"):
            self._watches.own = _Watch(self, thread)

    def forget(self, thread: int) -> None:
        """Drop what is kept for a thread, its unfinished pass included."""
        self.by_thread.pop(thread, None)
        self.active.pop(thread, None)
        router = self.routers.pop(thread, None)
        if router is not None:
            self.orphans.append(router)
        if self.thread == thread:
            self.thread = None

    # -- routing on the device --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Count what `routed_array` holds back of the calling thread's passes; waits for the device."""
        router = self.routers.get(threading.get_ident())
        if router is not None:
            router.drain()

    def drain_orphans(self) -> None:
        """Count what threads that have ended left behind."""
        while self.orphans:
            try:
                router = self.orphans.pop()
            except IndexError:  # another thread was faster
                return
            router.drain(end=True)

    def end(self) -> None:
        """No pass is in progress any more: count what all threads hold back, and take nothing from now on."""
        self.ended = True  # first: a pass cut off here would age in every later snapshot
        own = threading.get_ident()
        deadline = time.monotonic() + TAKE_OVER_SECONDS
        for thread, router in list(self.routers.items()):
            if thread == own:
                router.drain(end=True)
            else:
                router.take_over(deadline - time.monotonic())
        self.drain_orphans()

    # -- slow-path state -------------------------------------------------------------------------------------

    def declare_pool(self, given: object, capacity: int | None, resident: int | None) -> None:
        """Set a layer's gauges. Capacity holds for unions from now on. The shared layer OTHER has no pool."""
        layer = self.layer(values.layer_index(given))
        self.has_lookups = self.has_predictor = True
        if layer.index == OTHER:
            self.folded += 1
            return
        if resident is not None:
            layer.resident = resident
        if capacity is not None and capacity != layer.capacity:
            layer.capacity = capacity
            self.pools += 1
            for row in [*self.rows.values(), *self.guest_rows]:
                cells = row.layers.get(layer.index)
                if cells is not None:
                    cells.capacity = capacity

    def feed(self, name: str, value: int | float, labels: Mapping[str, object]) -> None:
        """Take an absolute value of a counter kept elsewhere; a fall is a reset of its source."""
        metric = catalog.BY_NAME.get(name) if isinstance(name, str) else None
        if metric is None or metric.kind is not catalog.Kind.COUNTER or metric.name in _NOT_FED:
            raise Refused("unknown_metric", name)
        key = (metric.name, self._label_values(metric, labels))
        # The zero shows that the runtime has these, as a hook's first event would.
        self.has_lookups = self.has_lookups or metric is catalog.LOOKUPS
        self.has_predictor = self.has_predictor or metric in _PREDICTOR
        fed, seen = self.fed, self._fed_last
        fed.setdefault(key, 0)
        seen.setdefault(key, 0)
        # An exchange without a call, hence without a switch point: two feeders must not add the same rise.
        last = seen[key]
        seen[key] = value
        fed[key] += value - last if value >= last else value

    def _label_values(self, metric: Metric, labels: Mapping[str, object]) -> tuple[str, ...]:
        """Values in the catalog's order; the layer last, since looking it up makes a new one known."""
        if labels.keys() != set(metric.keys):
            raise Refused("unknown_label", labels)
        found: dict[str, str] = {}
        for label in metric.labels:
            given = labels[label.key]
            value = given.value if isinstance(given, Enum) else given
            if label.key != "layer":
                if not isinstance(value, str) or value not in label.values:
                    raise Refused("unknown_label", given)
                found[label.key] = label.values[label.values.index(value)]  # the catalog's own, whatever equals it
        if "layer" in labels:
            layer = self.layer(values.layer_index(labels["layer"]))
            if layer.index == OTHER:  # sources that share a series would be taken for one that resets
                raise Refused("out_of_range", labels["layer"])
            found["layer"] = layer.label
        return tuple(found[key] for key in metric.keys)


class _RefusedPass:
    """The row of a pass whose forward() was refused: its phase is unknown, and that of the pass before it is wrong, so
    its events are refused, too."""

    __slots__ = ("store",)

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> NoReturn:
        raise Refused("unknown_pass")


class _Watch:
    """Lives in a thread's local storage, which the interpreter clears when the thread ends."""

    __slots__ = ("_store", "_thread")

    def __init__(self, store: Store, thread: int) -> None:
        self._store = weakref.ref(store)
        self._thread = thread

    def __del__(self) -> None:
        store = self._store()
        if store is not None:
            store.forget(self._thread)


_NOT_FED = frozenset(
    metric.name for metric in (catalog.LOST, catalog.LAYER_FOLDED, catalog.HOOK_ERRORS, catalog.PROCESS_CPU)
)
"""Counters that telemetry keeps about itself and the process."""
_PREDICTOR = (catalog.PREDICTOR_EXPERTS, catalog.PREDICTOR_CANDIDATES)
