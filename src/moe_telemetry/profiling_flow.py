"""Which pass and layer the drop-in's calls belong to: the labels that the seed's functions were never given.

A union names its layer and sequence length, `note_miss_attrib` the phase. One layer of one pass comes as predict,
submit, window, promote (take, route, place) and the union, in an order of the runtime's; then its misses, fetch,
matmul, combine. What decides the phase is `note_miss_attrib` where unions wait for it, else the union itself. So the
seconds that come before their layer's decision wait for it, and those behind it belong to the layer decided last.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident
from typing import Any

from .cells import LayerCells
from .profiling_balances import MissBalance, RecallBalance
from .profiling_times import Lose, Series
from .profiling_unions import UNKNOWN, Unions
from .reuse import Feed
from .store import NONE, Store
from .values import MAX_COUNT, MAX_LAYER, refuse_lazy

BATCH = 192
"""Seconds are put into buckets at the end of a pass when there have been so many unions since the last time."""


class Flow:
    """Where the runtime is, and what waits for a label.

    `busy` says that `note_union` must come here; otherwise it writes to cells by itself, and asks for a `turn` where
    a pass begins or ends while the phase is `watched`.
    """

    def __init__(self, home: Store, series: Iterable[Series], lose: Lose, waits: bool) -> None:
        self.home = home
        self.unions = Unions(home)
        self._series = tuple(series)
        self._lose = lose
        self._waits_at_first = waits
        self._explicit: str | None = None
        self._begin(live=False)

    def move(self, home: Store, live: bool) -> None:
        """Hand over everything to the store so far, then count for another one."""
        self.flush()
        self.home = home
        self.unions.move(home)
        self._begin(live)

    def _begin(self, live: bool) -> None:
        # `busy`: the next union has something to do. `watched`: `phase` is kept up to date, union by union.
        self.waits = self.busy = self.watched = self._waits_at_first and live
        self.timed = False
        self._used: tuple[Series, ...] = ()  # series that have had a value
        self._before: tuple[Series, ...] = ()  # those that wait for their layer's decision
        self._ordered = True  # nothing is to be learned of them now
        self._due = BATCH  # unions until the series are drained
        self._first = 0  # first layer of the pass
        self.seq, self.layer = UNKNOWN, NONE  # of the last union
        self.phase = self._explicit or "decode"  # of the layer decided last
        self._pending_phase: str | None = None
        self.end = 0  # last layer of the pass before
        self._marked = True  # the series' marks are those of the last decision
        self._learned = False  # the order of a layer's calls
        self.miss = MissBalance()
        self.recall = RecallBalance()
        for series in self._series:
            series.mark = 0
            if series.either:
                series.before = True

    # -- phases ----------------------------------------------------------------------------------------------

    def set_phase(self, phase: str | None) -> None:
        """The phase of everything from now on; None: by the rules again."""
        self.flush()
        self._explicit = phase
        self.unions.fast.clear()
        self.phase = phase or self.known()

    def told(self) -> str | None:
        """The phase that the runtime has named: by `set_phase`, or by the recorder's pass of this thread."""
        if self._explicit is not None:
            return self._explicit
        active = self.home.active
        return active[get_ident()][0] if active and get_ident() in active else None

    def of(self, seq: int) -> str:
        """The phase of a pass of which only the length is known."""
        return self.told() or ("decode" if seq <= self.home.decode_seq_max else "prefill")

    def known(self) -> str:
        """The phase as far as it is known now, for what can wait no longer."""
        told = self.told()
        if told is None and not self.watched and self.seq != UNKNOWN:
            return self.of(self.seq)
        return told or self.phase

    def watch(self) -> None:
        """There is something that the next union may decide."""
        if not self.watched:
            self.phase = self.known()
            self.watched = True
        self.busy = True

    # -- unions and decisions ----------------------------------------------------------------------------------

    def note(self, seq: Any, size: Any, layer: Any) -> None:
        """A union as `note_union` was given it. Raises no Exception."""
        try:
            if type(seq) is not int or type(size) is not int or type(layer) is not int:
                seq, size = whole(seq), whole(size)
                layer = NONE if layer is None else whole(layer)
            if layer < 0:
                layer = NONE
            self._union(seq, size, layer)
        except Exception as error:
            self._lose("note_union", error)

    def _union(self, seq: int, size: int, layer: int) -> None:
        if seq < 1 or not 0 <= size <= MAX_COUNT or layer > MAX_LAYER:
            self.unions.add("decode", seq, size, layer)
        active = bool(self.home.active)
        self.busy = self.waits or active  # a pass of the recorder's may end before the next union
        if self.miss.owed or self.recall.owed:
            self.settle_counts()
        if self.unions.pending is not None:
            self.resolve()
        if not self.waits:
            phase = self.of(seq)
            if self.watched:
                self._turn(phase, seq, layer, always=not self._learned)
            self.seq, self.layer = seq, layer
            cells = self.unions.add(phase, seq, size, layer)
            if cells is not None:
                cells.unknown += 1
                if not active:
                    self.unions.remember(phase, seq)
            return
        if layer <= self.layer or seq != self.seq or layer < 0:
            if self.layer >= 0:
                self.end = self.layer
            for series in self._used:
                if not series.before:
                    series.mark = len(series)
        self.seq = seq
        self.layer = layer
        self._pending_phase = self.told() if active or self._explicit else None
        left = self.unions.pending  # with the next line an exchange without a call: no union is lost or taken twice
        self.unions.pending = (seq, size, layer)
        if left is not None:
            self._count(left)

    def turn(self, seq: int, layer: int) -> None:
        """A pass begins or ends with this union, of which nothing is counted yet."""
        if seq != self.seq or not self._ordered:
            self._turn(self.of(seq), seq, layer)
            return
        if layer <= self.layer:
            self._first = layer
            if self.layer >= 0:
                self.end = self.layer
        if 0 <= layer < self.end:
            self._marked = False
            return
        self._marked = True
        self._due -= 1 + layer - self._first
        if self._due <= 0:
            self._drain()
            return
        for series in self._before:
            series.mark = len(series.seen) + len(series.raw)

    def _turn(self, phase: str, seq: int, layer: int, always: bool = False) -> None:
        begins = layer <= self.layer or seq != self.seq or layer < 0
        if begins:
            self._first = layer
            if self.layer >= 0:
                self.end = self.layer
        if begins or phase != self.phase or layer >= self.end or always:
            self._decide(phase, seq, layer, waited=False)
        else:
            self._marked = False

    def misses(self, phase: str) -> tuple[LayerCells, bool, Feed | None]:
        """Cells for the lookups of the layer at hand, whether they are the first to tell of the layer call, and where
        their ids go: only behind their union is the layer known to be theirs, which a pool curve must not mix up."""
        if self.miss.owed or self.recall.owed:
            self.settle_counts()
        told = self.told() or phase if self.home.active or self._explicit else phase
        unions = self.unions
        pending = unions.pending
        unions.pending = None
        if pending is not None:
            seq, size, layer = pending
            if self.timed or told != self.phase or self.recall.owed:
                self._decide(told, seq, layer, waited=True)
            try:
                cells = unions.by_phase[phase][seq][layer]
                cells.sizes[size] += 1
            except KeyError:
                unions.add(phase, seq, size, layer)
                cells = unions.cells(phase, seq, layer)
                return cells, True, cells.curve
            if size > cells.capacity:
                cells.overflows += 1
            return cells, True, cells.curve
        untold = self.waits or self.seq == UNKNOWN
        first = not self.waits
        if first:
            self.waits = True
            self.watch()
        if self.timed or told != self.phase:
            self._decide(told, self.seq, self.layer, waited=False)
        cells = unions.cells(phase, self.seq, self.layer)
        return cells, untold, cells.curve if first else None

    def resolve(self) -> None:
        """Count the union that no `note_miss_attrib` came for."""
        pending = self.unions.pending
        self.unions.pending = None
        if pending is not None:
            self._count(pending)

    def _count(self, pending: tuple[int, int, int]) -> None:
        seq, size, layer = pending
        phase = self._pending_phase or self.of(seq)
        self._decide(phase, seq, layer, waited=True)
        try:
            cells = self.unions.add(phase, seq, size, layer)
            if cells is not None:
                cells.unknown += 1
        except Exception as error:
            self._lose("note_union", error)

    def _decide(self, phase: str, seq: int, layer: int, waited: bool) -> None:
        """The layer at hand is of this phase; `waited`: since its union."""
        if not self._learned and self.timed:
            self._learn_order()
        if phase != self.phase:
            self._change(phase, waited)
        if self.recall.owed:
            self.recall.add(self.unions.cells(phase, seq, layer))
        if layer >= self.end or layer < 0:
            self._mark(layer)
        else:
            self._marked = False

    def _mark(self, layer: int) -> None:
        """A pass ends: all that came so far is of its phase."""
        self._marked = True
        self._due -= 1 + layer - self._first
        if self._due <= 0:
            self._drain()
            return
        for series in self._before:
            series.mark = len(series.seen) + len(series.raw)

    def _drain(self) -> None:
        self._due = BATCH
        cells = self.home.phases[self.phase]
        for series in self._used:
            series.drain(len(series), cells)

    def _learn_order(self) -> None:
        """What decides may come before promote, or behind it: the first layer shows."""
        if any(len(series) for series in self._used if series.before):
            self._learned = True
            for series in self._series:
                if series.either:
                    series.before = len(series) > 0
            self._sort_used()

    def _sort_used(self) -> None:
        self._before = tuple(series for series in self._used if series.before)
        self._ordered = self._learned or not self._before

    def _change(self, phase: str, waited: bool) -> None:
        """Put what belongs to the passes behind into their phase; the rest waits on, for the new one."""
        old = self.home.phases[self.phase]
        for series in self._used:
            number = len(series)
            if not series.before:
                cut = series.mark if waited else number
            elif self._marked:
                cut = series.mark
            else:  # the pass before ended early: one value of a segment is the layer's at hand
                cut = max(series.mark, number - 1)
            series.drain(cut, old)
        self.phase = phase

    def reset_unions(self) -> None:
        """Empty the dicts of unions."""
        self.resolve()
        self.unions.reset()

    # -- seconds and counts ------------------------------------------------------------------------------------

    def touched(self, series: Series) -> None:
        """A series has got its first value, or too many to wait longer."""
        if series not in self._used:
            self._used += (series,)
            self._sort_used()
            self.timed = True
            self.watch()
        if len(series) > Series.LIMIT:
            series.drain(len(series), self.home.phases[self.known()])

    def settle_counts(self) -> None:
        """Export what in-place writes have added up to, as far as its layer and phase are known."""
        self.settle_misses()
        self.settle_recall()

    def settle_misses(self) -> None:
        """Lookups: never between the totals of a layer and its `dec_` entries, or they count in both phases."""
        self.miss.complete = False
        if self.miss.owed:
            self.miss.add(
                self.unions.cells("prefill", self.seq, self.layer) if self.miss.owes_prefill() else None,
                self.unions.cells("decode", self.seq, self.layer) if self.miss.owes_decode() else None,
            )

    def settle_recall(self) -> None:
        """Recall: waits for its union's phase."""
        if self.recall.owed and self.unions.pending is None:
            self.recall.add(self.unions.cells(self.known(), self.seq, self.layer))

    def flush(self) -> None:
        """Give everything that waits the phase known last."""
        self.settle_counts()
        self.resolve()
        self.settle_counts()
        cells = self.home.phases[self.known()]
        for series in self._series:
            series.drain(len(series), cells)


def whole(value: Any) -> int:
    """A number as int() makes it, unless that would evaluate it."""
    if type(value) is int:
        return value
    refuse_lazy(value)
    return int(value)
