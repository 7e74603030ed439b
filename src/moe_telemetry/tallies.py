"""Whole passes counted on the device, layer by layer, and added up over some batches before anything is read.

What the host reads from CUDA memory is moved first, an allocation, a copy and a free each time; so a batch leaves its
counts where they are (docs/design.md has the figures).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count
from operator import attrgetter
from time import perf_counter
from typing import Any

import mlx.core as mx

from . import adding
from .following import Followed
from .loads import load_of
from .losses import lost
from .passes import Pass, Plan, count_unions
from .store import Store
from .values import Refused

SECONDS = 1.0
"""After which what was added up is read."""
PASSES = 256
"""Passes of a plan after which it is."""
TALLIES = 8
"""Plans and sizes for which something is added up; with more, all are read."""


@dataclass(frozen=True)
class Tally:
    """Passes of one plan and size, added up. `counts` are those of `adding.add_passes`, `sets` the ids that it finds,
    with the numbers of their passes. `began` is a time of perf_counter."""

    plan: Plan
    counts: mx.array
    sets: tuple[tuple[tuple[int, ...], mx.array], ...]
    passes: int
    calls: int
    began: float

    @staticmethod
    def add(tallies: dict[Key, Tally], passes: Sequence[Pass]) -> None:
        """Add passes of one kind to what is there."""
        first = passes[0]
        plan, called = first.plan, len(first)
        before = tallies.get((plan, first.size))
        if before is None:
            nothing = adding.nothing(len(plan.layers), plan.experts, first.size)
            before = Tally(plan, nothing, (), 0, 0, perf_counter())
        indices = [array for each in passes for array in each.indices]
        # Of all passes, the size at least, or the kernel reads beyond the smaller ones; their types take too long.
        if len({array.dtype for array in first.indices}) > 1 or len(set(map(_ITEM_SIZE, indices))) > 1:
            indices = [array.astype(mx.int64) for array in indices]
        counts, found = adding.add_passes(before.counts, indices, called, plan.experts, plan.followed, first.packed)
        sets = before.sets
        if found is not None:
            sets = (*sets, (tuple(each.number for each in passes), found))
        done = before.passes + len(passes), before.calls + called * len(passes)
        tallies[plan, first.size] = Tally(plan, counts, sets, *done, before.began)

    def __len__(self) -> int:
        """Layer calls."""
        return self.calls

    @property
    def arrays(self) -> list[mx.array]:
        """What the device has to compute."""
        return [self.counts, *(found for _, found in self.sets)]

    def joined(self) -> Tally:
        """The same with one array to read for all sets of as many layers."""
        layers = sorted({found.shape[1] for _, found in self.sets})
        sets = []
        for number in layers:
            of = [(numbers, found) for numbers, found in self.sets if found.shape[1] == number]
            together = mx.concatenate([found for _, found in of]) if len(of) > 1 else of[0][1]
            sets.append((tuple(number for numbers, _ in of for number in numbers), together))
        return replace(self, sets=tuple(sets))

    def count(self, store: Store, followed: Followed) -> None:
        """Read the sums and count them; waits for the device where it is not done yet."""
        plan = self.plan
        try:
            rows: Any = self.counts.tolist()
            sets: Any = [(numbers, found.tolist()) for numbers, found in self.sets]
        except Exception as error:
            lost(store, "routed_array", error, len(self))
            return
        for cells, capacity, layer, row in zip(plan.cells, plan.capacities, plan.layers, rows, strict=True):
            tokens, invalid, unions = row[: plan.experts], row[plan.experts], row[plan.experts + 1 :]
            if invalid:
                lost(store, "routed_array", Refused("out_of_range", invalid), invalid)
            calls = sum(unions)
            count_unions(cells, capacity, calls, zip(compress(count(), unions), filter(None, unions), strict=True))
            known = store.layers.get(layer) if calls else None  # not so for one over the layer budget
            if known is not None:
                load_of(known, plan.experts).add(calls, tokens)
        for numbers, found in sets:
            for at, of_layer in zip(plan.followed, zip(*found, strict=True), strict=False):
                followed.add_rows(numbers, plan.cells[at], list(of_layer))


def full(tallies: Collection[Tally]) -> bool:
    """Whether it is time to read them."""
    if len(tallies) > TALLIES or any(tally.passes >= PASSES for tally in tallies):
        return True
    return bool(tallies) and perf_counter() - min(tally.began for tally in tallies) >= SECONDS


Key = tuple[Plan, int]
_ITEM_SIZE = attrgetter("itemsize")
