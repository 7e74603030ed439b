"""From the routing of some forward passes to integers, in a few operations on the device (routing.py says when)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .cells import ExpertLoad, LayerCells
from .losses import lost
from .store import Store
from .values import Refused

IDS_AT_ONCE = 262_144
"""Routed ids in one reduction: what it needs meanwhile stays at a few megabytes."""
LOAD_CALLS = 64
"""Calls of a layer whose token counts by expert are summed on the device before they are read."""
LOAD_GROUPS = 8
"""Sets of layers for which such sums are kept; with more, all are read."""

Mask = mx.array | bytes | None


class Call:
    """One layer call: where it counts, and what the hook was given.

    `indices` are expert ids, integers of any shape, the last axis top-k; `resident`, `predicted` and `ready` are bool
    arrays (experts,), or bytes, one an expert.
    """

    __slots__ = ("capacity", "cells", "experts", "indices", "layer", "predicted", "ready", "resident")

    def __init__(
        self,
        cells: LayerCells,
        layer: int,
        indices: mx.array,
        experts: int,
        resident: Mask,
        predicted: Mask,
        ready: Mask,
    ) -> None:
        self.cells = cells
        self.capacity = cells.capacity  # as it is now: it may change before the figures are read
        self.layer = layer
        self.indices = indices
        self.experts = experts
        self.resident = resident
        self.predicted = predicted
        self.ready = ready

    def kind(self) -> object:
        """What calls must share to be reduced together."""
        if self.resident is None and self.predicted is None:
            return self.experts, self.indices.shape
        return self.experts, self.indices.shape, type(self.resident), type(self.predicted), type(self.ready)


@dataclass(frozen=True)
class LoadSum:
    """Tokens by expert of some layers, summed on the device: `counts` (layers, experts), `calls` by layer."""

    counts: mx.array
    calls: Counter[int]

    def count_in(self, store: Store) -> None:
        """Read the sums and add them to the layers' loads; waits for the device where it is not done yet."""
        rows: list[list[int]] = self.counts.tolist()  # type: ignore[assignment]
        for index, tokens in zip(sorted(self.calls), rows, strict=True):
            layer = store.layers.get(index)  # not so for one over the layer budget
            if layer is not None:
                layer.load = layer.load or ExpertLoad()
                layer.load.add(self.calls[index], tokens)


LoadSums = Mapping[object, LoadSum]


class Batch:
    """Calls under reduction. Once made, the device has begun, and the routing itself is not held any more.

    `carried` are the token sums so far, for the next batch to go on with.
    """

    def __init__(self, forwards: Iterable[Sequence[Call]], carried: LoadSums) -> None:
        kinds: dict[object, list[Call]] = {}
        for forward in forwards:
            for call in forward:
                kinds.setdefault(call.kind(), []).append(call)
        self._parts: list[_Part] = []
        sums = dict(carried)
        for calls in kinds.values():
            step = max(1, IDS_AT_ONCE // max(1, calls[0].indices.size))
            for begin in range(0, len(calls), step):
                part = calls[begin : begin + step]
                counts = _token_counts(part)
                self._parts.append(_Part(part, counts))
                _add(sums, part, counts[:, :-1])
        full = len(sums) > LOAD_GROUPS or any(max(each.calls.values()) >= LOAD_CALLS for each in sums.values())
        self._loads = list(sums.values()) if full else []
        self.carried: LoadSums = {} if full else sums
        mx.async_eval([part.columns for part in self._parts], [each.counts for each in sums.values()])  # type: ignore[no-untyped-call]

    def count(self, store: Store) -> None:
        """Read the integers and count them; waits for the device where it is not done yet."""
        for part in self._parts:
            part.count(store)
        for load in self._loads:
            load.count_in(store)


class _Part:
    """Calls of one kind, and a column of integers (calls,) for each figure."""

    def __init__(self, calls: Sequence[Call], counts: mx.array) -> None:
        self._places = [(call.cells, call.capacity) for call in calls]
        first = calls[0]
        self._resident, self._predicted = first.resident is not None, first.predicted is not None
        routed = counts[:, :-1] > 0
        self.columns = [counts[:, -1], routed.sum(-1)]
        if not self._resident and not self._predicted:
            return
        resident = _rows([call.resident for call in calls], first.experts)
        predicted = _rows([call.predicted for call in calls], first.experts)
        ready = _rows([call.ready for call in calls], first.experts)
        named = routed & predicted
        absent = routed & ~resident
        arrived = named & ready
        self.columns += [
            figure.sum(-1)
            for figure in (absent, named, predicted & ~routed, named & absent, arrived & absent, arrived & resident)
        ]

    def count(self, store: Store) -> None:
        columns: list[list[int]] = [column.tolist() for column in self.columns]  # type: ignore[misc]
        known = self._resident or self._predicted
        nothing: Sequence[int] = (0,) * 6
        rest = zip(*columns[2:], strict=True) if known else (nothing for _ in self._places)
        for (cells, capacity), invalid, number, figures in zip(self._places, *columns[:2], rest, strict=True):
            if invalid:
                lost(store, "routed_array", Refused("out_of_range", invalid))
                continue
            try:
                cells.sizes[number] += 1
            except KeyError:
                cells.union.add(number)
            if number > capacity:
                cells.overflows += 1
            if not known:
                cells.unknown += 1
                continue
            self._count_known(cells, number, *figures)

    def _count_known(
        self,
        cells: LayerCells,
        number: int,
        misses: int,
        recalled: int,
        wasted: int,
        named_misses: int,
        evicted: int,
        by_prefetch: int,
    ) -> None:
        if self._resident:
            hits = number - misses
            late = named_misses - evicted
            unpredicted = misses - named_misses
            cells.hit += hits
            cells.prefetch_hits += by_prefetch
            if misses:
                cells.partial += 1
                cells.miss_timing += late
                cells.miss_evicted += evicted
                cells.miss_unpredicted += unpredicted
            else:
                cells.all_hit += 1
        else:
            cells.unknown += 1
        if self._predicted:
            missed = number - recalled
            cells.recalled += recalled
            cells.missed += missed
            cells.wasted += wasted


def _token_counts(calls: Sequence[Call]) -> mx.array:
    """Tokens by call and expert, int32 (calls, experts + 1); the last column counts ids that are none."""
    number, experts = len(calls), calls[0].experts
    counts = mx.zeros((number * (experts + 1),), dtype=mx.int32)
    if calls[0].indices.size:
        ids = mx.concatenate([call.indices for call in calls]).reshape(number, -1).astype(mx.int64)
        # An id out of range would be written out of bounds.
        ids = mx.where((ids >= 0) & (ids < experts), ids, experts)
        ids = ids + (mx.arange(number) * (experts + 1))[:, None]
        counts = counts.at[ids.reshape(-1)].add(1)
    return counts.reshape(number, experts + 1)


def _add(sums: dict[object, LoadSum], calls: Sequence[Call], counts: mx.array) -> None:
    """Add the calls' token counts to the sum that is kept for their layers."""
    times = Counter(call.layer for call in calls)
    layers = sorted(times)
    position = {layer: row for row, layer in enumerate(layers)}
    key = (calls[0].experts, *layers)
    before = sums.get(key)
    rows = mx.zeros((len(layers), calls[0].experts), dtype=mx.int32) if before is None else before.counts
    rows = rows.at[mx.array([position[call.layer] for call in calls])].add(counts)
    sums[key] = LoadSum(rows, times if before is None else before.calls + times)


def _rows(masks: Sequence[Mask], experts: int) -> mx.array:
    """Masks of one kind as a bool array (calls, experts), or one that is False throughout."""
    if masks[0] is None:
        return mx.array(False)
    if isinstance(masks[0], bytes):
        return mx.array(bytearray(b"".join(masks))).reshape(-1, experts) != 0  # type: ignore[arg-type]
    return mx.stack(list(masks))  # type: ignore[arg-type]
