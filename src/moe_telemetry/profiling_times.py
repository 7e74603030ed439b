"""Numbers on their way from the drop-in's calls to its dicts and to the metrics.

A call appends a number to a list: less work than an entry of a dict and a bucket of a histogram. What is appended is
added to the dict when that is read (`settle`), in the order of the calls, so that the dict is equal to one that every
call had added to; and handed to the cells many at a time (`drain`), once the phase that they belong to is known.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import reduce
from itertools import repeat
from math import inf
from numbers import Real
from operator import add
from typing import Any, ClassVar

from . import values
from .catalog import HOST_BOUNDS
from .cells import HistogramCell, PhaseCells
from .values import MAX_SECONDS, Refused

Lose = Callable[[str, Exception], None]
"""Told of a record that was not taken: the hook's name, and why."""


def _one_by_one(numbers: Iterable[Any], start: Any) -> Any:
    return reduce(add, numbers, start)


add_up: Callable[[Iterable[Any], Any], Any] = _one_by_one if sys.version_info >= (3, 12) else sum
"""Adds as repeated `+=` does. From 3.12 on sum() compensates the rounding of floats, and would not."""


class Series:
    """What one entry of a dict was given, oldest first: `seen` is in the dict already, `raw` (behind it) is not.

    `mark`: how many of both belong to passes whose phase is known. What came later belongs to the layer decided
    last, too, where `before` is False; where it is True it comes before its layer's decision, and waits.
    """

    LIMIT: ClassVar[int] = 512
    """Numbers that wait at most."""

    __slots__ = (
        *("_export", "_lose", "_settling", "before", "counter", "either", "key", "mark", "raw", "seen", "target"),
    )

    def __init__(
        self,
        target: dict[str, Any],
        key: str,
        export: Callable[[PhaseCells, list[Any], Lose], None],
        lose: Lose,
        before: bool,
        counter: str | None = None,
        either: bool = False,
    ) -> None:
        self.target = target
        self.key = key
        self.counter = counter  # the dict's entry that counts the calls
        self.before = before
        self.either = either  # whether it is before is for the runtime's first layer to show
        self.raw: list[Any] = []
        self.seen: list[Any] = []
        self.mark = 0
        self._export = export
        self._lose = lose
        self._settling = False

    def __len__(self) -> int:
        return len(self.seen) + len(self.raw)

    def settle(self) -> None:
        """Bring the dict up to date, unless another thread is at it."""
        if self._settling:
            return
        self._settling = True  # no call in between, where another thread could come in
        try:
            self._settle()
        finally:
            self._settling = False

    def _settle(self) -> None:
        batch = self.raw[:]
        del self.raw[:]  # the same here: what is appended is in one of both
        if not batch:
            return
        target, key = self.target, self.key
        try:
            total = add_up(batch, dict.__getitem__(target, key))
        except Exception:
            total = None
        if type(total) is float or type(total) is int:
            dict.__setitem__(target, key, total)
        else:
            batch = self._settle_each(batch)
        self.seen += batch
        if self.counter is not None:
            try:
                count = dict.__getitem__(target, self.counter)
                count = count + len(batch) if type(count) is int else add_up(repeat(1, len(batch)), count)
                dict.__setitem__(target, self.counter, count)
            except Exception as error:
                self._lose("note_tprof", error)

    def _settle_each(self, batch: list[Any]) -> list[Any]:
        """The same for numbers of any type; those that were taken."""
        taken = []
        for value in batch:
            try:
                if not isinstance(value, Real):
                    values.amount(value)  # refused, for the reason that it has
                dict.__setitem__(self.target, self.key, dict.__getitem__(self.target, self.key) + value)
                taken.append(value)
            except Exception as error:
                self._lose("note_tprof", error)
        return taken

    def drain(self, number: int, phase: PhaseCells) -> None:
        """Hand the `number` oldest to the cells of a phase."""
        if self.raw:
            self.settle()
        batch = self.seen[:number]
        del self.seen[:number]  # as in _settle
        if batch:
            self.mark = max(0, self.mark - len(batch))
            try:
                self._export(phase, batch, self._lose)
            except Exception as error:  # a write in place must raise no more than a dict's
                self._lose("write", error)


def seconds_into(cell: Callable[[PhaseCells], HistogramCell]) -> Callable[[PhaseCells, list[Any], Lose], None]:
    """An export of seconds into a histogram."""

    def export(phase: PhaseCells, batch: list[Any], lose: Lose) -> None:
        _observe(cell(phase), batch, lose)

    return export


def counts_into(add_to: Callable[[PhaseCells, int], None]) -> Callable[[PhaseCells, list[Any], Lose], None]:
    """An export of counts into a counter of a phase."""

    def export(phase: PhaseCells, batch: list[Any], lose: Lose) -> None:
        add_to(phase, sum(_taken(values.count, batch, lose)))

    return export


def placed(phase: PhaseCells, number: int) -> None:
    """Experts that promote placed."""
    phase.placed += number


def block_calls(phase: PhaseCells, number: int) -> None:
    """Calls of the MoE block."""
    phase.block_calls += number


def _observe(cell: HistogramCell, batch: list[Any], lose: Lose) -> None:
    try:
        total = sum(batch, 0.0)
    except OverflowError:  # an int beyond floats
        total = inf
    if type(total) is float and -inf < total < inf:
        batch.sort()
    else:
        batch = sorted(_taken(values.seconds, batch, lose))
    if batch and (batch[0] < 0.0 or batch[-1] > MAX_SECONDS):
        batch = sorted(_taken(values.seconds, batch, lose))
    if not batch:
        return
    counts = cell.counts
    lowest, top = bisect_left(HOST_BOUNDS, batch[0]), bisect_left(HOST_BOUNDS, batch[-1])
    begin = 0
    for index in range(lowest, top):
        end = bisect_right(batch, HOST_BOUNDS[index])
        number = end - begin
        counts[index] += number
        begin = end
    number = len(batch) - begin
    total = float(sum(batch))
    counts[top] += number
    cell.sum += total


def _taken(convert: Callable[[Any], Any], batch: list[Any], lose: Lose) -> list[Any]:
    found = []
    for value in batch:
        try:
            found.append(convert(value))
        except Refused as error:
            lose("note_tprof", error)
    return found
