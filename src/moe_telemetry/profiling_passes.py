"""Where in a pass the runtime is, and of which pass the seconds are that it has timed.

A pass begins where the layers do not rise or the length changes, and ends with the layer that the one before it ended
with. A layer's phase is known at its decision (profiling_flow.py). Seconds of segments that come before it (predict,
submit, window, promote with its steps, route) wait for it; those of the others (pyremap, fetch, matmul, combine) belong
to the layer decided last. A phase lasts whole passes, so that it is enough to mark, where a pass ends, how much of each
series belongs to it or to those before.
"""

from __future__ import annotations

from collections.abc import Iterable

from .cells import PhaseCells
from .profiling_times import Series
from .profiling_unions import UNKNOWN
from .store import NONE

BATCH = 192
"""Seconds are put into buckets at the end of a pass when there have been so many unions since the last time."""


class Passes:
    """The last union's length and layer, and the series that are in use, with their marks.

    `phase` has the cells of the layer decided last, `end` the last layer of the pass before. `timed`: any series is in
    use; `settled`: it is known which of those come before their layer's decision.
    """

    phase: PhaseCells

    def __init__(self, series: Iterable[Series]) -> None:
        self._all = tuple(series)
        self.begin()

    def begin(self) -> None:
        """Before the first pass."""
        self.seq, self.layer = UNKNOWN, NONE
        self.end = 0
        self._first = 0  # first layer of the pass
        self.timed, self.settled = False, True
        self._learned = False
        self._used: tuple[Series, ...] = ()
        self._before: tuple[Series, ...] = ()  # those of them that wait for their layer's decision
        self._marked = True  # the marks are those of the last decision
        self._due = BATCH  # unions until the series are put away
        for series in self._all:
            series.mark = 0
            if series.either:
                series.before = True

    def use(self, series: Series) -> bool:
        """Take a series in; False where it is in use already."""
        if series in self._used:
            return False
        self._used += (series,)
        self.timed = True
        self._sort()
        return True

    def waits(self, seq: int, layer: int) -> None:
        """A union of this length and layer is noted, and its decision is to come."""
        if layer <= self.layer or seq != self.seq:
            self._begin_with(layer)
            for series in self._used:
                if not series.before:  # what comes from now on is not the last pass's
                    series.mark = len(series)
        self.seq, self.layer = seq, layer

    # -- decisions ---------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """At a decision that something was timed before: what may come before it, or behind it, shows."""
        if any(len(series) for series in self._before):
            self._learned = True
            for series in self._all:
                if series.either:
                    series.before = len(series) > 0
            self._sort()

    def change(self, phase: PhaseCells, waited: bool) -> None:
        """Another phase is decided: put away what is of the last one; `waited`: since the layer's union."""
        for series in self._used:
            number = len(series)
            if not series.before:
                cut = series.mark if waited else number
            elif self._marked:
                cut = series.mark
            else:  # the pass before ended early: one value of a segment is the layer's at hand
                cut = max(series.mark, number - 1)
            series.drain(cut, self.phase)
        self.phase = phase

    def decided(self, layer: int, begins: bool) -> None:
        """The phase of a layer is known, with which a pass `begins`, or goes on: where it ends, so is that of all that
        came so far."""
        if begins:
            self._begin_with(layer)
        if 0 <= layer < self.end:
            self._marked = False
            return
        self._marked = True
        self._due -= 1 + layer - self._first
        if self._due > 0:
            for series in self._before:
                series.mark = len(series.seen) + len(series.raw)
            return
        self._due = BATCH
        for series in self._used:
            series.drain(len(series), self.phase)

    def put_away(self, phase: PhaseCells) -> None:
        """All seconds, marked or not, as of this phase."""
        for series in self._all:
            series.drain(len(series), phase)

    def _begin_with(self, layer: int) -> None:
        self._first = layer
        if self.layer >= 0:
            self.end = self.layer

    def _sort(self) -> None:
        self._before = tuple(series for series in self._used if series.before)
        self.settled = self._learned or not self._before
