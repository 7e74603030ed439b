"""Seconds on their way from the drop-in's calls to its dicts and to the histograms.

A call appends a number to a list: less work than an entry of a dict and a bucket of a histogram. What is appended is
added to the dict when that is read (`settle`), in the order of the calls, so that the dict is equal to one that every
call had added to; and put into buckets many at a time (`drain`), once the phase that they belong to is known.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import reduce
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
    """One segment's seconds, oldest first. The first `settled` are in the dict already, the rest is not.

    `mark`: how many belong to passes whose phase is known; what came later does if `before` is False, and waits for
    its phase if it is True.
    """

    LIMIT: ClassVar[int] = 512
    """Values that wait at most."""

    __slots__ = ("before", "cell", "counter", "key", "lose", "mark", "promote", "settled", "target", "values")

    def __init__(
        self,
        target: dict[str, Any],
        key: str,
        cell: Callable[[PhaseCells], HistogramCell],
        lose: Lose,
        before: bool,
        counter: str | None = None,
        promote: bool = False,
    ) -> None:
        self.target = target
        self.key = key
        self.counter = counter  # the dict's entry that counts the calls
        self.cell = cell
        self.lose = lose
        self.before = before
        self.promote = promote
        self.values: list[Any] = []
        self.settled = 0
        self.mark = 0

    def settle(self) -> None:
        """Bring the dict up to date."""
        begin, end = self.settled, len(self.values)
        if begin == end:
            return
        self.settled = end
        target, key = self.target, self.key
        try:
            total = add_up(self.values[begin:end], dict.__getitem__(target, key))
        except Exception:
            total = None
        if type(total) is float:
            dict.__setitem__(target, key, total)
        else:
            end = begin + self._settle_each(begin, end)
        if self.counter is not None:
            try:
                dict.__setitem__(target, self.counter, dict.__getitem__(target, self.counter) + end - begin)
            except Exception as error:
                self.lose("note_tprof", error)

    def _settle_each(self, begin: int, end: int) -> int:
        """The same for values of any type, without those that are no numbers; how many were kept."""
        kept = []
        for value in self.values[begin:end]:
            try:
                if not isinstance(value, Real):
                    values.seconds(value)
                dict.__setitem__(self.target, self.key, dict.__getitem__(self.target, self.key) + value)
                kept.append(value)
            except Exception as error:
                self.lose("note_tprof", error)
        self.values[begin:end] = kept
        self.settled = begin + len(kept)
        self.mark = min(self.mark, self.settled)
        return len(kept)

    def drain(self, number: int, phase: PhaseCells) -> None:
        """Put the `number` oldest values into the histogram of a phase."""
        if self.settled < number:
            self.settle()
        batch = self.values[:number]
        if not batch:
            return
        del self.values[:number]
        number = len(batch)
        self.settled -= number
        self.mark = max(0, self.mark - number)
        _observe(self.cell(phase), batch, self.lose)


def _observe(cell: HistogramCell, batch: list[Any], lose: Lose) -> None:
    total = sum(batch, 0.0)
    if type(total) is float and -inf < total < inf:
        batch.sort()
    else:
        batch = _seconds(batch, lose)
        total = sum(batch, 0.0)
    if batch and (batch[0] < 0.0 or batch[-1] > MAX_SECONDS):
        batch = _seconds(batch, lose)
        total = sum(batch, 0.0)
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
    counts[top] += number
    cell.sum += total


def _seconds(batch: list[Any], lose: Lose) -> list[float]:
    """What a histogram takes of these, ascending."""
    found = []
    for value in batch:
        try:
            found.append(values.seconds(value))
        except Refused as error:
            lose("note_tprof", error)
    return sorted(found)
