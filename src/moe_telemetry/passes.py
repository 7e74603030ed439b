"""Whole passes of which only the routing is known: how a model's own code is watched (integrations).

A layer costs an item of a list when its routing is handed over, and an addition when it is counted: where it belongs
is looked up once for all passes of the same layers (`Plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from .cells import LayerCells, SeqCells
from .following import Followed
from .loads import load_of
from .losses import lost
from .store import Store
from .values import Refused

PATIENCE = 4
"""Packed passes that are looked at together for being evaluated: they hold nothing large meanwhile, and what draws one
array draws four in hardly more time."""


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
        self.followed = tuple(at for at, cells in enumerate(self.cells) if cells.curve is not None)


class Pass:
    """A pass that was handed over: the `indices` of its calls, integer arrays of any shape, in the plan's order; or,
    `packed`, one array (calls, size) of all of them."""

    __slots__ = ("_calls", "indices", "number", "packed", "patience", "plan", "shape", "size", "type")
    told = False
    """Whether it is a loss if nobody evaluates it."""

    def __init__(self, plan: Plan, indices: list[mx.array], packed: mx.array | None = None) -> None:
        self.plan = plan
        self.packed = packed is not None
        self.patience = PATIENCE if self.packed else 1
        self.indices = indices if packed is None else [packed]
        self._calls = len(indices)
        self.number = 0  # of all passes
        self.shape = indices[0].shape
        self.size = indices[0].size
        self.type = indices[0].dtype

    def __len__(self) -> int:
        return self._calls

    def uniform(self) -> bool:
        """Whether all calls have the same shape."""
        shape = self.shape
        return all(array.shape == shape for array in self.indices)

    def routing(self, number: int) -> mx.array:
        """The indices of one call, or of all."""
        return self.indices[0 if self.packed else number]

    def split(self, number: int) -> tuple[Pass, list[Pass]]:
        """The first calls, which the model has evaluated; the others it never will."""
        self.indices, self._calls = self.indices[:number], number
        return self, []

    def has_arrays(self) -> bool:
        """Whether there is anything besides the indices that may have to be evaluated."""
        return False

    def kind(self) -> object:
        """What passes must share to be counted together."""
        return self.plan, self.shape, self.type, self._calls, self.packed


class HostPasses:
    """Passes of one kind whose few ids the host reads as they are."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self._passes = passes

    def __len__(self) -> int:
        """Layer calls."""
        return sum(map(len, self._passes))

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
            count_unions(cells, capacity, len(sizes), ((size, sizes.count(size)) for size in set(sizes)))
            if load is not None:
                load.count(tokens, len(sizes))


def count_unions(cells: LayerCells, capacity: int, calls: int, sizes: Iterable[tuple[int, int]]) -> None:
    """Count so many calls of one layer: numbers of distinct experts, and how often each was."""
    for size, times in sizes:
        cells.union.add(size, times)
        if size > capacity:
            cells.overflows += times
    cells.unknown += calls


def flat(indices: mx.array) -> list[int]:
    """The ids of an evaluated array."""
    ids: Any = indices.tolist()
    for _ in range(indices.ndim - 1):
        ids = ids[0] if len(ids) == 1 else [one for row in ids for one in row]
    found: list[int] = ids
    return found
