"""Tokens by layer and expert, summed on the device over some batches before they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from .cells import LOAD_CALLS, ExpertLoad
from .store import Layer, Store

LOAD_GROUPS = 8
"""Sets of layers for which sums are kept; with more, all are read."""


@dataclass(frozen=True)
class LoadSum:
    """Sums of some layers: `counts` int32 (layers, experts + 1), the last column not used; `calls` by layer."""

    counts: mx.array
    calls: Mapping[int, int]

    @staticmethod
    def put(
        sums: dict[object, LoadSum], experts: int, layers: list[int], counts: mx.array, calls: Mapping[int, int]
    ) -> None:
        """Add `counts` (layers, experts + 1) to the sum that is kept for these layers, which are in order."""
        key = (experts, *layers)
        before = sums.get(key)
        if before is not None:
            counts = before.counts + counts
            calls = {layer: number + calls[layer] for layer, number in before.calls.items()}
        sums[key] = LoadSum(counts, calls)

    @staticmethod
    def add_calls(sums: dict[object, LoadSum], experts: int, order: list[int], counts: mx.array) -> None:
        """The same for `counts` (calls, experts + 1) of calls of any layers, `order`."""
        calls = Counter(order)
        layers = sorted(calls)
        position = {layer: row for row, layer in enumerate(layers)}
        nothing = mx.zeros((len(layers), experts + 1), dtype=mx.int32)
        added = nothing.at[mx.array([position[layer] for layer in order])].add(counts)
        LoadSum.put(sums, experts, layers, added, calls)

    def count_in(self, store: Store) -> None:
        """Read the sums and add them to the layers' loads; waits for the device where it is not done yet."""
        rows: list[list[int]] = self.counts.tolist()  # type: ignore[assignment]
        for index, (*tokens, _) in zip(sorted(self.calls), rows, strict=True):
            layer = store.layers.get(index)  # not so for one over the layer budget
            if layer is not None:
                load_of(layer, len(tokens)).add(self.calls[index], tokens)


LoadSums = Mapping[object, LoadSum]


def full(sums: LoadSums) -> bool:
    """Whether it is time to read them."""
    return len(sums) > LOAD_GROUPS or any(max(each.calls.values()) >= LOAD_CALLS for each in sums.values())


def load_of(layer: Layer, experts: int) -> ExpertLoad:
    """The layer's load; begun anew for another model's layer."""
    while (load := layer.load) is None or load.experts != experts:
        made = ExpertLoad(experts)
        if layer.load is load:  # apart from the call: two threads may meet a new layer at once
            layer.load = made
    return load
