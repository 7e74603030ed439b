"""The places hooks write to: plain slots, allocated before the first event.

Concurrency, for every field here: on an interpreter with a lock `cell.field += local` and
`cell.counts[index] += 1` have no switch point between load and store as long as the right side holds no call,
so writers need no lock and signal handlers may interrupt anywhere else. Free-threaded interpreters
run the hooks under a lock (recording.LockedRecorder). Readers take whatever is there: each exported counter is a
sum of fields that only rise, never a difference, so a torn read is late and never makes a counter fall.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import add, attrgetter, mul
from typing import TYPE_CHECKING

from . import catalog

if TYPE_CHECKING:
    from .reuse import Feed
    from .store import Store

UNLIMITED = sys.maxsize
"""Capacity of a layer without a declared pool: no union is above it."""
EXACT_SIZES = 8192
"""Distinct union sizes kept apart for one layer; more can only come from a broken caller."""


class HistogramCell:
    """Counts by bucket, the last one for values above the top bound, and the sum.

    The number of observations is the sum of the counts and is not stored, so the two cannot disagree.
    """

    __slots__ = ("counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def by_bucket(self) -> tuple[int, ...]:
        """A copy of the counts."""
        return tuple(self.counts)


BUCKET = tuple(f"b{bucket}" for bucket in range(len(catalog.HOST_BOUNDS) + 1))
"""A slot's name for each bucket of a host's duration."""


class HostCell(HistogramCell):
    """A host's durations. Hooks raise a slot for each bucket, which takes them an eighth less than an item of a list
    (duration_hooks); what comes in batches is in `counts`."""

    __slots__ = BUCKET

    def __init__(self) -> None:
        super().__init__(catalog.HOST_BOUNDS)
        for bucket in BUCKET:
            setattr(self, bucket, 0)

    def by_bucket(self) -> tuple[int, ...]:
        """The counts of both."""
        return tuple(map(add, self.counts, _SLOTS(self)))


_SLOTS: Callable[[HostCell], tuple[int, ...]] = attrgetter(*BUCKET)


class CountCell:
    """A counter found by a label. A cell and not a number: what the caller hands in as a key is only looked up, and
    never becomes one, however it hashes and compares."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Tally:
    """Exact distribution of small non-negative integers: `sizes[value]` is how often `value` was seen.

    The hooks raise `sizes` themselves where the value is known already; `add` is the way for a new one. Past
    EXACT_SIZES distinct values (memory must stay bounded) only count, sum and maximum of the rest are exact.
    """

    __slots__ = ("rest_count", "rest_max", "rest_sum", "sizes")

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.rest_count = 0
        self.rest_sum = 0
        self.rest_max = 0

    def add(self, value: int, times: int = 1) -> None:
        """Count a value that may be new, so many times."""
        if value in self.sizes or len(self.sizes) < EXACT_SIZES:
            self.sizes.setdefault(value, 0)  # apart from the increment: two threads may meet a new value at once
            self.sizes[value] += times
        else:
            if value > self.rest_max:  # noqa: PLR1730  # max() is a call, hence a switch point before the store
                self.rest_max = value
            self.rest_sum += value * times
            self.rest_count += times

    def count(self) -> int:
        """Number of values seen."""
        return sum(self.sizes.copy().values()) + self.rest_count

    def sum(self) -> int:
        """Sum of the values seen."""
        sizes = self.sizes.copy()
        kept: int = sum(map(mul, sizes, sizes.values()))
        return kept + self.rest_sum

    def max(self) -> int:
        """Largest value seen; 0 before the first."""
        return max(max(self.sizes.copy(), default=0), self.rest_max)


class LayerCells:
    """Everything counted about one layer in passes of one phase and sequence length."""

    __slots__ = (
        "all_hit",
        "bypassed",
        "capacity",
        "curve",
        "evictions",
        "hit",
        "miss_evicted",
        "miss_timing",
        "miss_unpredicted",
        "missed",
        "overflows",
        "partial",
        "prefetch_hits",
        "recalled",
        "sizes",
        "union",
        "unknown",
        "wasted",
    )

    def __init__(self, capacity: int, curve: Feed | None = None) -> None:
        self.curve = curve  # None where the layer is not followed
        self.capacity = capacity  # a copy of the layer's, since one attribute is all the hot path can afford
        self.union = Tally()
        self.sizes = self.union.sizes  # likewise
        self.overflows = 0
        # layer calls by residency
        self.all_hit = self.partial = self.bypassed = self.unknown = 0
        # lookups by outcome
        self.hit = self.miss_timing = self.miss_evicted = self.miss_unpredicted = 0
        self.prefetch_hits = 0
        # routed experts by prediction, and predictions that were not routed
        self.recalled = self.missed = self.wasted = 0
        self.evictions = 0


class PhaseCells:
    """What is counted by phase alone."""

    __slots__ = (
        "block",
        "block_calls",
        "degraded",
        "dropped",
        "name",
        "placed",
        "prefetch",
        "promote",
        "read_bytes",
        "read_duration",
        "stall",
        "tokens",
        "wasted_bytes",
        "window",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefetch = {stage: HostCell() for stage in catalog.STAGES}
        self.promote = {step: HostCell() for step in catalog.STEPS}
        self.block = {segment: HostCell() for segment in catalog.SEGMENTS}
        self.window = HostCell()
        self.stall = HistogramCell(catalog.READ_BOUNDS)
        self.read_duration = {source: HistogramCell(catalog.READ_BOUNDS) for source in ("demand", "prefetch")}
        self.read_bytes = {source: CountCell() for source in ("demand", "prefetch")}
        self.dropped = {reason: CountCell() for reason in catalog.DROP_REASONS}
        self.degraded = {mode: CountCell() for mode in catalog.DEGRADED_MODES}
        self.block_calls = self.placed = self.tokens = self.wasted_bytes = 0


class SeqCells:
    """Cells of passes of one phase and one sequence length: what `forward` selects for the hooks behind it.

    `by_layer` is the hooks' lookup and may hold several keys for one layer (None and -1); `layers` holds each
    layer once, by its index, NONE or OTHER (store).
    """

    __slots__ = (
        *("block", "by_layer", "duration", "layers", "phase", "prefetch", "promote", "seq", "store", "tokens"),
        "window",
    )

    def __init__(self, store: Store, phase: PhaseCells, tokens: int | None, seq: str) -> None:
        self.store = store  # a hook reaches everything from the row: it cannot mix two telemetries
        self.phase = phase
        self.prefetch, self.promote, self.block = phase.prefetch, phase.promote, phase.block
        self.window = phase.window
        self.tokens = tokens  # None where passes of several lengths share these cells
        self.seq = seq
        self.duration = HistogramCell(catalog.FORWARD_BOUNDS)
        self.by_layer: dict[int | None, LayerCells] = {}
        self.layers: dict[int, LayerCells] = {}
