"""Routed arrays of the layers whose pool curve is followed (reuse.py): ids in the order of the passes, whoever read
them, host or device."""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import compress, count

import mlx.core as mx

from .cells import LayerCells
from .reuse import Feed

_NONE = {-1}


class Followed:
    """What a batch of passes routed to in those layers."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Feed, Set[int]]] = []
        self._rows: list[tuple[tuple[int, ...], Feed, list[list[int]]]] = []

    def add(self, number: int, cells: LayerCells, routed: Set[int]) -> None:
        """A call of the pass of that number, if its layer is followed."""
        if cells.curve is not None:
            self._calls.append((number, cells.curve, routed))

    def add_rows(self, numbers: tuple[int, ...], cells: LayerCells, rows: list[list[int]]) -> None:
        """The same for a call of each of these passes: distinct ids, filled up with -1."""
        if cells.curve is not None:
            self._rows.append((numbers, cells.curve, rows))

    def hand_over(self) -> None:
        """All of them, pass by pass: kinds of passes are counted one behind the other."""
        if not self._calls and len({numbers for numbers, _, _ in self._rows}) == 1:  # of one kind
            for _, feed, rows in self._rows:
                feed.hand_over_rows(rows)
            return
        for numbers, feed, rows in self._rows:
            self._calls += [(number, feed, set(row) - _NONE) for number, row in zip(numbers, rows, strict=True)]
        for _, feed, routed in sorted(self._calls, key=lambda call: call[0]):
            if routed:
                feed.hand_over(routed)


class Rows:
    """The same of calls that the device counts: `counts` (calls, experts + 1) of `calls`, (number, cells) each.
    `arrays` is what there is to compute."""

    def __init__(self, counts: mx.array, calls: Iterable[tuple[int, LayerCells]]) -> None:
        found = [(at, call) for at, call in enumerate(calls) if call[1].curve is not None]
        self._calls = [call for _, call in found]
        self.arrays = [counts[mx.array([at for at, _ in found])]] if found else []

    def add_to(self, followed: Followed) -> None:
        """Read them."""
        for counts in self.arrays:
            rows: list[list[int]] = counts.tolist()  # type: ignore[assignment]
            for (number, cells), (*tokens, _) in zip(self._calls, rows, strict=True):
                followed.add(number, cells, set(compress(count(), tokens)))
