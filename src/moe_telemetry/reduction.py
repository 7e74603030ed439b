"""From the routing of some forward passes to integers (routing.py says when).

Few ids in memory that the host shares with the device (Metal, CPU) are read as they are. On CUDA, whose host pays for a
page with each array it reads, and for the many ids of a prefill, the device counts first: tokens by call and expert,
from which everything else is a sum. docs/design.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from . import counting
from .cells import LayerCells
from .loads import LoadSum, LoadSums, full, load_of
from .losses import lost
from .passes import DevicePasses, HostPasses, Pass, flat
from .store import Store
from .values import Refused

HOST_IDS = 64
"""Ids of one call that the host reads, where it can: the verify pass of eight tokens, top-8."""
IDS_AT_ONCE = 262_144
"""Routed ids in one reduction: what it needs meanwhile stays at a few megabytes."""
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
    """Passes under reduction. Once made, the device has begun, and large routing is not held any more.

    `carried` are token sums by layer and expert, for the next batch to go on with.
    """

    def __init__(self, passes: Iterable[Pass | Sequence[Call]], carried: LoadSums) -> None:
        host_reads = not counting.on_cuda()
        sums = dict(carried)
        self._parts: list[HostPasses | DevicePasses | _HostCalls | _DeviceCalls] = []
        kinds: dict[tuple[type, object], list[Any]] = {}
        for each in passes:
            ones: Sequence[Any] = (each,) if isinstance(each, Pass) else each
            for one in ones:
                kinds.setdefault((type(one), one.kind()), []).append(one)
        for (kind, _), alike in kinds.items():
            first = alike[0]
            if kind is Pass and host_reads and first.size <= HOST_IDS:
                self._parts.append(HostPasses(alike))
            elif kind is Call and host_reads and first.on_host():
                self._parts.append(_HostCalls(alike))
            else:
                step = max(1, IDS_AT_ONCE // max(1, first.size * getattr(first, "number", 1)))
                device: type[DevicePasses | _DeviceCalls] = DevicePasses if kind is Pass else _DeviceCalls
                for begin in range(0, len(alike), step):
                    self._parts.append(device(alike[begin : begin + step], sums))
        pending = [part.pending for part in self._parts if isinstance(part, (DevicePasses, _DeviceCalls))]
        if pending:
            mx.async_eval(pending, [each.counts for each in sums.values()])  # type: ignore[no-untyped-call]
        self._loads = list(sums.values()) if full(sums) else []
        self.carried: LoadSums = {} if self._loads else sums

    def count(self, store: Store) -> None:
        """Read the integers and count them; waits for the device where it is not done yet."""
        for part in self._parts:
            part.count(store)
        for load in self._loads:
            load.count_in(store)


class _HostCalls:
    """Calls of one kind whose few ids the host reads as they are."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def count(self, store: Store) -> None:
        for call in self._calls:
            _count_ids(call, store)


class _DeviceCalls:
    """Calls of one kind that the device counts; `pending` is what it has to compute for that."""

    def __init__(self, calls: Sequence[Call], sums: dict[object, LoadSum]) -> None:
        experts = calls[0].experts
        counts, figures = counting.token_counts([call.indices for call in calls], experts)
        self.pending = [figures, _predictions(calls, counts)]
        LoadSum.add_calls(sums, experts, [call.layer for call in calls], counts)
        self._calls = calls
        for call in calls:
            call.indices = _NO_INDICES

    def count(self, store: Store) -> None:
        read: list[Any] = [each.tolist() for each in self.pending]
        (sizes, invalid), rows = read
        for call, number, bad, row in zip(self._calls, sizes, invalid, rows, strict=True):
            if bad:
                lost(store, "routed_array", Refused("out_of_range", bad))
            else:
                call.count(number, *row)


def _count_ids(call: Call, store: Store) -> None:
    """Read the ids of a call and count them as `routed` would."""
    ids = flat(call.indices)
    routed = set(ids)
    if routed and not (0 <= min(routed) and max(routed) < call.experts):
        lost(store, "routed_array", Refused("out_of_range", ids))
        return
    layer = store.layers.get(call.layer)  # not so for one over the layer budget
    if layer is not None:
        load_of(layer, call.experts).count(ids)
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


def _predictions(calls: Sequence[Call], counts: mx.array) -> mx.array:
    """What `Call.count` takes behind the number, (calls, 6), or (calls, 0) where nothing but the routing is known; of
    calls of one kind with `counts` (calls, experts + 1)."""
    first = calls[0]
    if first.resident is None and first.predicted is None:
        return mx.zeros((len(calls), 0), dtype=mx.int32)
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
                flat[row * experts + int(expert)] = 1  # what equals an id may be a float
        return mx.array(flat).reshape(-1, experts) != 0  # type: ignore[arg-type]
    return mx.stack(list(masks))  # type: ignore[arg-type]


_NO_INDICES = mx.zeros((0,), dtype=mx.int32)
