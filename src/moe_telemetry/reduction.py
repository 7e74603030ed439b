"""From the routing of some forward passes to integers (routing.py says when).

Few ids in memory that the host shares with the device (Metal, CPU) are read as they are. On CUDA, whose host pays for a
page with each array it reads, and for the many ids of a prefill, the device counts first: tokens by call and expert,
from which everything else is a sum. docs/design.md has the measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import mlx.core as mx

from . import counting
from .cells import LOAD_CALLS, ExpertLoad, LayerCells
from .losses import lost
from .store import Layer, Store
from .values import Refused

HOST_IDS = 64
"""Ids of one call that the host reads, where it can: the verify pass of eight tokens, top-8."""
IDS_AT_ONCE = 262_144
"""Routed ids in one reduction: what it needs meanwhile stays at a few megabytes."""
LOAD_GROUPS = 8
"""Sets of layers for which token counts are summed on the device; with more, all are read."""

Mask = mx.array | frozenset[int] | None
NOTHING: frozenset[int] = frozenset()


class Call:
    """One layer call: where it counts, and what the hook was given.

    `indices` are expert ids, integers of any shape, the last axis top-k; `resident`, `predicted` and `ready` are bool
    arrays (experts,), or sets of ids below `experts`.
    """

    __slots__ = ("capacity", "cells", "experts", "indices", "layer", "predicted", "ready", "resident", "size")

    def __init__(
        self,
        cells: LayerCells,
        layer: int,
        indices: mx.array,
        experts: int,
        resident: Mask = None,
        predicted: Mask = None,
        ready: Mask = None,
    ) -> None:
        self.cells = cells
        self.capacity = cells.capacity  # as it is now: it may change before the figures are read
        self.layer = layer
        self.indices = indices
        self.size = indices.size
        self.experts = experts
        self.resident = resident
        self.predicted = predicted
        self.ready = ready

    def on_host(self) -> bool:
        """Whether the host may read it as it is, where it can read at all."""
        masks = (self.resident, self.predicted, self.ready)
        return self.size <= HOST_IDS and not any(type(mask) is mx.array for mask in masks)

    def kind(self) -> object:
        """What calls must share to be reduced together."""
        if self.resident is None and self.predicted is None:
            return self.experts, self.indices.shape
        return self.experts, self.indices.shape, type(self.resident), type(self.predicted), type(self.ready)

    def count(
        self,
        number: int,
        misses: int = 0,
        recalled: int = 0,
        wasted: int = 0,
        named_misses: int = 0,
        evicted: int = 0,
        by_prefetch: int = 0,
    ) -> None:
        """Count `number` distinct experts: `misses` not resident, `recalled` and `wasted` predictions,
        `named_misses` predicted ones among the misses, `evicted` ready ones among those, `by_prefetch` hits."""
        cells = self.cells
        try:
            cells.sizes[number] += 1
        except KeyError:
            cells.union.add(number)
        if number > self.capacity:
            cells.overflows += 1
        if self.resident is None:
            cells.unknown += 1
        else:
            hits = number - misses
            cells.hit += hits
            cells.prefetch_hits += by_prefetch
            if misses:
                late = named_misses - evicted
                unpredicted = misses - named_misses
                cells.partial += 1
                cells.miss_timing += late
                cells.miss_evicted += evicted
                cells.miss_unpredicted += unpredicted
            else:
                cells.all_hit += 1
        if self.predicted is not None:
            missed = number - recalled
            cells.recalled += recalled
            cells.missed += missed
            cells.wasted += wasted


class Batch:
    """Calls under reduction. Once made, the device has begun, and large routing is not held any more.

    `carried` are token sums by layer and expert, for the next batch to go on with.
    """

    def __init__(self, forwards: Iterable[Sequence[Call]], carried: LoadSums) -> None:
        host_reads = not counting.on_cuda()
        self._host: list[Call] = []
        self._parts: list[tuple[list[Call], mx.array, mx.array | None]] = []
        kinds: dict[object, list[Call]] = {}
        for forward in forwards:
            for call in forward:
                if host_reads and call.on_host():
                    self._host.append(call)
                else:
                    kinds.setdefault(call.kind(), []).append(call)
        sums = dict(carried)
        for calls in kinds.values():
            step = max(1, IDS_AT_ONCE // max(1, calls[0].size))
            for begin in range(0, len(calls), step):
                part = calls[begin : begin + step]
                counts, figures = counting.token_counts([call.indices for call in part], part[0].experts)
                self._parts.append((part, figures, _predictions(part, counts)))
                _add(sums, part, counts)
        if kinds:
            wanted = [figures for part in self._parts for figures in part[1:] if figures is not None]
            mx.async_eval(wanted, [each.counts for each in sums.values()])  # type: ignore[no-untyped-call]
        for calls, *_ in self._parts:
            for call in calls:
                call.indices = _NO_INDICES
        full = len(sums) > LOAD_GROUPS or any(max(each.calls.values()) >= LOAD_CALLS for each in sums.values())
        self._loads = list(sums.values()) if full else []
        self.carried: LoadSums = {} if full else sums

    def count(self, store: Store) -> None:
        """Read the integers and count them; waits for the device where it is not done yet."""
        for call in self._host:
            _count_ids(call, store)
        for calls, figures, predictions in self._parts:
            counted: list[list[int]] = figures.tolist()  # type: ignore[assignment]
            rows: Iterable[Sequence[int]] = repeat(()) if predictions is None else predictions.tolist()  # type: ignore[assignment]
            for call, (number, invalid), row in zip(calls, counted, rows, strict=False):
                if invalid:
                    lost(store, "routed_array", Refused("out_of_range", invalid))
                else:
                    call.count(number, *row)
        for load in self._loads:
            load.count_in(store)


@dataclass(frozen=True)
class LoadSum:
    """Tokens by expert of some layers, summed on the device: `counts` (layers, experts + 1), `calls` by layer."""

    counts: mx.array
    calls: Counter[int]

    def count_in(self, store: Store) -> None:
        """Read the sums and add them to the layers' loads; waits for the device where it is not done yet."""
        rows: list[list[int]] = self.counts.tolist()  # type: ignore[assignment]
        for index, (*tokens, _) in zip(sorted(self.calls), rows, strict=True):
            layer = store.layers.get(index)
            if layer is not None:
                _load(layer, len(tokens)).add(self.calls[index], tokens)


LoadSums = Mapping[object, LoadSum]


def _load(layer: Layer, experts: int) -> ExpertLoad:
    if layer.load is None or len(layer.load.tokens) != experts:  # the first, or another model's layer
        layer.load = ExpertLoad(experts)
    return layer.load


def _count_ids(call: Call, store: Store) -> None:
    """Read the ids of a call and count them as `routed` would."""
    ids = call.indices.tolist()
    for _ in range(call.indices.ndim - 1):
        ids = [id_ for row in ids for id_ in row]  # type: ignore[union-attr]
    routed: set[int] = set(ids)  # type: ignore[arg-type]
    if routed and not (0 <= min(routed) and max(routed) < call.experts):
        lost(store, "routed_array", Refused("out_of_range", ids))
        return
    layer = store.layers.get(call.layer)  # not so for one over the layer budget
    if layer is not None:
        _load(layer, call.experts).count(ids)  # type: ignore[arg-type]
    resident, predicted, ready = call.resident, call.predicted, call.ready
    if resident is None and predicted is None:
        call.count(len(routed))
        return
    assert not isinstance(resident, mx.array)
    assert not isinstance(predicted, mx.array)
    assert not isinstance(ready, mx.array)
    named = routed & (predicted or NOTHING)
    absent = routed - (resident or NOTHING)
    arrived = named & (ready or NOTHING)
    wasted = len(predicted or NOTHING) - len(named)
    evicted = len(arrived & absent)
    call.count(len(routed), len(absent), len(named), wasted, len(named & absent), evicted, len(arrived) - evicted)


def _predictions(calls: Sequence[Call], counts: mx.array) -> mx.array | None:
    """What `Call.count` takes behind the number, (calls, 6), of calls of one kind with `counts` (calls, experts + 1);
    None where nothing else than the routing is known."""
    first = calls[0]
    if first.resident is None and first.predicted is None:
        return None
    routed = counts[:, :-1] > 0
    resident = _rows([call.resident for call in calls], first.experts)
    predicted = _rows([call.predicted for call in calls], first.experts)
    ready = _rows([call.ready for call in calls], first.experts)
    named = routed & predicted
    absent = routed & ~resident
    arrived = named & ready
    figures = (absent, named, predicted & ~routed, named & absent, arrived & absent, arrived & resident)
    return mx.stack([mx.broadcast_to(figure, routed.shape).sum(-1) for figure in figures], axis=-1)


def _rows(masks: Sequence[Mask], experts: int) -> mx.array:
    """Masks of one kind as a bool array (calls, experts), or one that is False throughout."""
    if masks[0] is None:
        return mx.array(False)
    if isinstance(masks[0], frozenset):
        flat = bytearray(len(masks) * experts)
        for row, mask in enumerate(masks):
            for expert in mask:  # type: ignore[union-attr]
                flat[row * experts + expert] = 1
        return mx.array(flat).reshape(-1, experts) != 0  # type: ignore[arg-type]
    return mx.stack(list(masks))  # type: ignore[arg-type]


def _add(sums: dict[object, LoadSum], calls: Sequence[Call], counts: mx.array) -> None:
    """Add the calls' token counts (calls, experts + 1) to the sum that is kept for their layers."""
    order = [call.layer for call in calls]
    times = Counter(order)
    layers = sorted(times)
    key = (calls[0].experts, *layers)
    before = sums.get(key)
    if order == layers * (len(order) // len(layers)):  # whole passes: nothing to look up
        added = counts.reshape(-1, len(layers), counts.shape[-1]).sum(0)
    else:
        position = {layer: row for row, layer in enumerate(layers)}
        nothing = mx.zeros((len(layers), counts.shape[-1]), dtype=mx.int32)
        added = nothing.at[mx.array([position[layer] for layer in order])].add(counts)
    sums[key] = LoadSum(added, times) if before is None else LoadSum(before.counts + added, before.calls + times)


_NO_INDICES = mx.zeros((0,), dtype=mx.int32)
