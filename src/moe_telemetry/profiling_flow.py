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
from .store import NONE, Store
from .values import MAX_COUNT, MAX_LAYER, refuse_lazy

BATCH = 48
"""Seconds of a segment are put into buckets when so many belong to passes of a known phase."""


class Flow:
    """Where the runtime is, and what waits for a label.

    `busy` says that `note_union` must come here; otherwise it writes to cells by itself.
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
        self.waits = self.busy = self._waits_at_first and live
        self.timed = False
        self.seq, self.layer = UNKNOWN, NONE  # of the last union
        self.phase = self._explicit or "decode"  # of the layer decided last
        self._pending_phase: str | None = None
        self._end = 0  # last layer of the pass before
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
        if told is None and not self.busy and self.seq != UNKNOWN:
            return self.of(self.seq)
        return told or self.phase

    def watch(self) -> None:
        """From now on there is something that a union may decide."""
        if not self.busy:
            self.phase = self.known()
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
            if self.busy or self.home.active:
                self._union(seq, size, layer)
                return
            phase = self.of(seq)
            cells = self.unions.add(phase, seq, size, layer)
            if cells is not None:
                cells.unknown += 1
                self.unions.remember(phase, seq)
            self.seq, self.layer = seq, layer
        except Exception as error:
            self._lose("note_union", error)

    def _union(self, seq: int, size: int, layer: int) -> None:
        if seq < 1 or not 0 <= size <= MAX_COUNT or layer > MAX_LAYER:
            self.unions.add("decode", seq, size, layer)
        if self.miss.owed or self.recall.owed:
            self.settle_counts()
        if self.unions.pending is not None:
            self.resolve()
        begins = layer <= self.layer or seq != self.seq or layer < 0
        if begins and self.layer >= 0:
            self._end = self.layer
        self.seq = seq
        self.layer = layer
        if self.waits:
            if begins and self.timed:
                for series in self._series:
                    if not series.before:
                        series.mark = len(series)
            self._pending_phase = self.told() if self.home.active or self._explicit else None
            left = self.unions.pending  # with the next line an exchange without a call: no union is lost or taken twice
            self.unions.pending = (seq, size, layer)
            if left is not None:
                self._count(left)
            return
        phase = self.of(seq)
        if begins or phase != self.phase or layer >= self._end or not self._learned:
            self._decide(phase, layer, waited=False)
        else:
            self._marked = False
        cells = self.unions.add(phase, seq, size, layer)
        if cells is not None:
            cells.unknown += 1

    def misses(self, phase: str) -> tuple[LayerCells, bool]:
        """Cells for the lookups of the layer at hand, and whether they are the first to tell of the layer call."""
        if self.miss.owed or self.recall.owed:
            self.settle_counts()
        told = self.told() or phase if self.home.active or self._explicit else phase
        unions = self.unions
        pending = unions.pending
        unions.pending = None
        if pending is not None:
            seq, size, layer = pending
            if self.timed or told != self.phase or self.recall.owed:
                self._decide(told, layer, waited=True)
            try:
                cells = unions.by_phase[phase][seq][layer]
                cells.sizes[size] += 1
            except KeyError:
                unions.add(phase, seq, size, layer)
                return unions.cells(phase, seq, layer), True
            if size > cells.capacity:
                cells.overflows += 1
            return cells, True
        untold = self.waits or self.seq == UNKNOWN
        if not self.waits:
            self.waits = True
            self.watch()
        if self.timed or told != self.phase:
            self._decide(told, self.layer, waited=False)
        try:
            return unions.by_phase[phase][self.seq][self.layer], untold
        except KeyError:
            return unions.cells(phase, self.seq, self.layer), untold

    def resolve(self) -> None:
        """Count the union that no `note_miss_attrib` came for."""
        pending = self.unions.pending
        self.unions.pending = None
        if pending is not None:
            self._count(pending)

    def _count(self, pending: tuple[int, int, int]) -> None:
        seq, size, layer = pending
        phase = self._pending_phase or self.of(seq)
        self._decide(phase, layer, waited=True)
        try:
            cells = self.unions.add(phase, seq, size, layer)
            if cells is not None:
                cells.unknown += 1
        except Exception as error:
            self._lose("note_union", error)

    def _decide(self, phase: str, layer: int, waited: bool) -> None:
        """The layer at hand is of this phase; `waited`: since its union."""
        if not self._learned and self.timed:
            self._learn_order()
        if phase != self.phase:
            self._change(phase, waited)
        if self.recall.owed:
            self.recall.add(self.unions.cells(phase, self.seq, layer))
        cells = self.home.phases[phase]
        if self.timed:
            self._marked = layer >= self._end or layer < 0
            if self._marked:
                for series in self._series:
                    number = len(series)
                    if number >= BATCH:
                        series.drain(number, cells)
                    elif series.before:
                        series.mark = number

    def _learn_order(self) -> None:
        """What decides may come before promote, or behind it: the first layer shows."""
        if any(len(series) for series in self._series if series.before):
            self._learned = True
            for series in self._series:
                if series.either:
                    series.before = len(series) > 0

    def _change(self, phase: str, waited: bool) -> None:
        """Put what belongs to the passes behind into their phase; the rest waits on, for the new one."""
        old = self.home.phases[self.phase]
        for series in self._series:
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
        self.timed = True
        self.watch()
        if len(series) > Series.LIMIT:
            series.drain(len(series), self.home.phases[self.known()])

    def settle_counts(self) -> None:
        """Export what in-place writes have added up to, as far as its layer and phase are known."""
        if self.miss.owed:
            self.miss.add(
                self.unions.cells("prefill", self.seq, self.layer) if self.miss.owes_prefill() else None,
                self.unions.cells("decode", self.seq, self.layer) if self.miss.owes_decode() else None,
            )
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
