"""Whole passes of which only the routing is known: how a model's own code is watched (integrations).

A layer costs an item of a list when its routing is handed over, and an addition when it is counted: where it belongs
is looked up once for all passes of the same layers (`Plan`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import mlx.core as mx

from . import counting
from .cells import LayerCells, SeqCells
from .following import Followed, Rows
from .loads import LoadSum, load_of
from .losses import lost
from .store import Store
from .values import Refused


class Plan:
    """Where the calls of a pass count: the layers of a model, in their order, in passes of one phase and length."""

    def __init__(self, row: SeqCells, layers: tuple[int | None, ...], experts: int) -> None:
        store = row.store
        self.pools = store.pools  # what a pass was within is what its pools were when it was handed over
        self.cells = [row.by_layer.get(layer) or store.layer_cells(row, layer) for layer in layers]
        self.capacities = [cells.capacity for cells in self.cells]
        self.folded = sum(layer not in row.by_layer for layer in layers)
        self.layers = [-1 if layer is None else layer for layer in layers]
        self.experts = experts
        self.known = frozenset(range(experts))
        self.times = Counter(self.layers)


class Pass:
    """A pass that was handed over: the `indices` of its calls, integer arrays of any shape, in the plan's order."""

    __slots__ = ("indices", "number", "plan", "shape", "size", "type")
    told = False
    """Whether it is a loss if nobody evaluates it."""

    def __init__(self, plan: Plan, indices: list[mx.array]) -> None:
        self.plan = plan
        self.indices = indices
        self.number = 0  # in its batch
        self.shape = indices[0].shape
        self.size = indices[0].size
        self.type = indices[0].dtype

    def __len__(self) -> int:
        return len(self.indices)

    def uniform(self) -> bool:
        """Whether all calls have the same shape."""
        shape = self.shape
        return all(array.shape == shape for array in self.indices)

    def routing(self, number: int) -> mx.array:
        """The indices of one call."""
        return self.indices[number]

    def split(self, number: int) -> tuple[Pass, list[Pass]]:
        """The first calls, which the model has evaluated; the others it never will."""
        self.indices = self.indices[:number]
        return self, []

    def has_arrays(self) -> bool:
        """Whether there is anything besides the indices that may have to be evaluated."""
        return False

    def kind(self) -> object:
        """What passes must share to be counted together."""
        return self.plan, self.shape, self.type, len(self.indices)


class HostPasses:
    """Passes of one kind whose few ids the host reads as they are."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self._passes = passes

    def count(self, store: Store, followed: Followed) -> None:
        first = self._passes[0]
        plan, number = first.plan, len(first)
        for at, (cells, capacity, layer) in enumerate(
            zip(plan.cells[:number], plan.capacities, plan.layers, strict=False)
        ):
            known = store.layers.get(layer)
            load = None if known is None else load_of(known, plan.experts)
            sizes: list[int] = []
            tokens: list[int] = []
            for each in self._passes:
                ids = flat(each.indices[at])
                routed = set(ids)
                if not routed <= plan.known:
                    lost(store, "routed_array", Refused("out_of_range", ids))
                    continue
                tokens += ids
                if cells.curve is not None:
                    followed.add(each.number, cells, routed)
                sizes.append(len(routed))
            _count(cells, capacity, sizes)
            if load is not None:
                load.count(tokens, len(sizes))


class DevicePasses:
    """Passes of one kind that the device counts; `pending` is what it has to compute for that."""

    def __init__(self, passes: Sequence[Pass], sums: dict[object, LoadSum]) -> None:
        first = passes[0]
        plan, number = first.plan, len(first)
        self._plan, self._number = plan, number
        indices = [array for each in passes for array in each.indices]
        # Of all passes, the size at least, or the kernel reads beyond the smaller ones; their types take too long.
        if len({array.dtype for array in first.indices}) > 1 or len(set(map(_ITEM_SIZE, indices))) > 1:
            indices = [array.astype(mx.int64) for array in indices]
        counts, self._figures = counting.token_counts(indices, plan.experts)
        self._rows = Rows(counts, ((each.number, cells) for each in passes for cells in plan.cells[:number]))
        self.pending = [self._figures, *self._rows.pending]
        times = plan.times if number == len(plan.layers) else Counter(plan.layers[:number])
        layers = sorted(times)
        if plan.layers[:number] == layers:
            added = counts.reshape(len(passes), number, -1).sum(0)
            LoadSum.put(sums, plan.experts, layers, added, dict.fromkeys(layers, len(passes)))
        else:
            LoadSum.add_calls(sums, plan.experts, plan.layers[:number] * len(passes), counts)

    def count(self, store: Store, followed: Followed) -> None:
        self._rows.add_to(followed)
        read: Any = self._figures.tolist()
        sizes, invalid = read
        for bad in filter(None, invalid):
            lost(store, "routed_array", Refused("out_of_range", bad))
        plan, number = self._plan, self._number
        for at, (cells, capacity) in enumerate(zip(plan.cells[:number], plan.capacities, strict=False)):
            of_layer = sizes[at::number]
            if any(invalid):
                of_layer = list(compress(of_layer, map(not_, invalid[at::number])))
            _count(cells, capacity, of_layer)


def _count(cells: LayerCells, capacity: int, sizes: list[int]) -> None:
    """Count the calls of one layer: the numbers of distinct experts."""
    calls = len(sizes)
    for size in set(sizes):
        times = sizes.count(size)
        cells.union.add(size, times)
        if size > capacity:
            cells.overflows += times
    cells.unknown += calls


_ITEM_SIZE = attrgetter("itemsize")


def flat(indices: mx.array) -> list[int]:
    """The ids of an evaluated array."""
    ids: Any = indices.tolist()
    for _ in range(indices.ndim - 1):
        ids = ids[0] if len(ids) == 1 else [one for row in ids for one in row]
    found: list[int] = ids
    return found
