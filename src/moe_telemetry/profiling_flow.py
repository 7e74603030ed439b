"""What the seed's calls say by their order: the labels that its functions were never given.

One layer of one pass comes as

    predict, submit, window              seconds that wait for the layer's decision
    promote (take, route, place), route  the same, or behind it: the first layer of the run shows which
    note_union                           the layer, and the pass's length
    note_miss_attrib                     the phase
    pyremap, fetch, matmul, combine      seconds of the layer decided last

with the union anywhere before the misses, and recall behind it. The decision, from which a layer's phase is known, is
`note_miss_attrib` where unions wait for it, else the union: its phase is then the one that the runtime has named, or
that of its length. Where passes begin and end, and what that means for seconds, is in profiling_passes.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident
from typing import Any

from .cells import LayerCells
from .profiling_balances import MissBalance, RecallBalance
from .profiling_passes import Passes
from .profiling_times import Lose, Series
from .profiling_unions import UNKNOWN, Unions
from .reuse import Feed
from .store import NONE, Store
from .values import MAX_COUNT, MAX_LAYER, refuse_lazy


class Flow:
    """Told of each union and each layer's misses; decides of which phase is what comes in between.

    `busy` says that `note_union` must come here; otherwise it writes to cells by itself, and while the phase is
    `watched` tells the passes where one begins or ends, or asks for a `turn` where the phase may be another one.
    """

    def __init__(self, home: Store, series: Iterable[Series], lose: Lose, waits: bool) -> None:
        self.home = home
        self.unions = Unions(home)
        self.passes = Passes(series)
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
        # `waits`: unions wait for their misses. `busy`: the next union has something to do. `watched`: `phase` is kept
        # up to date, union by union.
        self.waits = self.busy = self.watched = self._waits_at_first and live
        self._told: str | None = None  # the phase that was named when the union that waits was noted
        self.miss = MissBalance()
        self.recall = RecallBalance()
        self.passes.begin()
        self._now(self._explicit or "decode")

    # -- phases ----------------------------------------------------------------------------------------------

    def set_phase(self, phase: str | None) -> None:
        """The phase of everything from now on; None: by the rules again."""
        self.flush()
        self._explicit = phase
        self.unions.fast.clear()
        self._now(phase or self.known())

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
        told = self.told() if self._explicit or self.home.active else None
        if told is None and not self.watched and self.passes.seq != UNKNOWN:
            return self.of(self.passes.seq)
        return told or self.phase

    def watch(self) -> None:
        """There is something that the next union may decide."""
        if not self.watched:
            self._now(self.known())
            self.watched = True
        self.busy = True

    def _now(self, phase: str) -> None:
        """That of the layer decided last."""
        self.phase = phase
        self.passes.phase = self.home.phases[phase]

    # -- unions ------------------------------------------------------------------------------------------------

    def note(self, seq: Any, size: Any, layer: Any) -> None:
        """A union as `note_union` was given it. Raises no Exception."""
        try:
            if type(seq) is not int or type(size) is not int or type(layer) is not int:
                seq, size = whole(seq), whole(size)
                layer = NONE if layer is None else whole(layer)
            if layer < 0:
                layer = NONE
            if seq < 1 or not 0 <= size <= MAX_COUNT or layer > MAX_LAYER:
                self.unions.add("decode", seq, size, layer)  # refuses: only the dicts take it
            active = bool(self.home.active)
            self.busy = self.waits or active  # a pass of the recorder's may end before the next union
            if self.miss.owed or self.recall.owed:
                self.settle_counts()
            if self.unions.pending is not None:
                self.resolve()
            if self.waits:
                self.passes.waits(seq, layer)
                self._told = self.told() if active or self._explicit else None
                left = self.unions.pending  # with the next line an exchange without a call: none is lost or taken twice
                self.unions.pending = (seq, size, layer)
                if left is not None:
                    self._decide_alone(*left)
            else:
                self._union(seq, size, layer, active)
        except Exception as error:
            self._lose("note_union", error)

    def _union(self, seq: int, size: int, layer: int, active: bool) -> None:
        """One that waits for nothing."""
        if self.watched:
            self.turn(seq, layer)
        self.passes.seq, self.passes.layer = seq, layer
        phase = self.of(seq)
        if self._count(phase, seq, size, layer) and not active:
            self.unions.remember(phase, seq)

    def turn(self, seq: int, layer: int) -> None:
        """A union decides its layer's phase by its length, where nothing waits and nothing is owed."""
        passes = self.passes
        self._decide(self.of(seq), seq, layer, begins=layer <= passes.layer or seq != passes.seq)

    def resolve(self) -> None:
        """Decide and count the union that no `note_miss_attrib` came for."""
        pending = self.unions.pending
        self.unions.pending = None
        if pending is not None:
            self._decide_alone(*pending)

    def _decide_alone(self, seq: int, size: int, layer: int) -> None:
        phase = self._told or self.of(seq)
        self._decide(phase, seq, layer, waited=True)
        try:
            self._count(phase, seq, size, layer)
        except Exception as error:
            self._lose("note_union", error)

    def _count(self, phase: str, seq: int, size: int, layer: int) -> bool:
        """A union whose residency is not known; False where only the dicts take it."""
        cells = self.unions.add(phase, seq, size, layer)
        if cells is None:
            return False
        cells.unknown += 1
        return True

    # -- misses and decisions ----------------------------------------------------------------------------------

    def misses(self, phase: str) -> tuple[LayerCells, bool, Feed | None]:
        """Cells for the lookups of the layer at hand, whether they are the first to tell of the layer call, and where
        their ids go: only behind their union is the layer known to be theirs, which a pool curve must not mix up."""
        if self.miss.owed or self.recall.owed:
            self.settle_counts()
        told = self.told() or phase if self.home.active or self._explicit else phase
        unions, passes = self.unions, self.passes
        pending = unions.pending
        unions.pending = None
        if pending is not None:
            seq, size, layer = pending
            if told != self.phase or self.recall.owed or not passes.settled:
                self._decide(told, seq, layer, waited=True)
            elif passes.timed:
                passes.decided(layer, False)
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
        seq, layer = passes.seq, passes.layer
        untold = self.waits or seq == UNKNOWN
        first = not self.waits
        if first:  # of the run: they tell that unions are to wait
            self.waits = True
            self.watch()
        if passes.timed or told != self.phase:
            self._decide(told, seq, layer)
        cells = unions.cells(phase, seq, layer)
        return cells, untold, cells.curve if first else None

    def _decide(self, phase: str, seq: int, layer: int, waited: bool = False, begins: bool = False) -> None:
        """The layer at hand is of this phase; `waited`: since its union; `begins`: with that a pass does, which the
        passes have not been told of."""
        passes = self.passes
        if not passes.settled:
            passes.learn()
        if phase != self.phase:
            passes.change(self.home.phases[phase], waited)
            self.phase = phase
        if self.recall.owed:
            self.recall.add(self.unions.cells(phase, seq, layer))
        passes.decided(layer, begins)

    # -- what is put away --------------------------------------------------------------------------------------

    def touched(self, series: Series) -> None:
        """A series has got its first value, or too many to wait longer."""
        if self.passes.use(series):
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
            at = self.passes
            self.miss.add(
                self.unions.cells("prefill", at.seq, at.layer) if self.miss.owes_prefill() else None,
                self.unions.cells("decode", at.seq, at.layer) if self.miss.owes_decode() else None,
            )

    def settle_recall(self) -> None:
        """Recall: waits for its union's phase."""
        if self.recall.owed and self.unions.pending is None:
            self.recall.add(self.unions.cells(self.known(), self.passes.seq, self.passes.layer))

    def flush(self) -> None:
        """Give everything that waits the phase known last."""
        self.settle_counts()
        self.resolve()
        self.settle_counts()
        self.passes.put_away(self.home.phases[self.known()])

    def reset_unions(self) -> None:
        """Empty the dicts of unions."""
        self.resolve()
        self.unions.reset()


def whole(value: Any) -> int:
    """A number as int() makes it, unless that would evaluate it."""
    if type(value) is int:
        return value
    refuse_lazy(value)
    return int(value)
