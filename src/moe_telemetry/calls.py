"""Layer calls that were handed over one by one (`routed_array`), perhaps with sets, and how they are counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from . import counting, values
from .cells import LayerCells
from .following import Followed, Rows
from .loads import load_of
from .losses import lost
from .passes import flat
from .store import Store
from .values import Refused

HOST_IDS = 64
"""Ids of one call that the host reads, where it can: the verify pass of eight tokens, top-8."""
Mask = mx.array | frozenset[int] | None
NOTHING: frozenset[int] = frozenset()


class Call:
    """One layer call: where it counts, and what the hook was given.

    `indices` are expert ids, integers of any shape, the last axis top-k; `resident`, `predicted` and `ready` are bool
    arrays (experts,), or sets of ids below `experts`.
    """

    __slots__ = ("capacity", "cells", "experts", "indices", "layer", "number", "predicted", "ready", "resident", "size")

    def __init__(
        self,
        cells: LayerCells,
        layer: int,
        indices: mx.array,
        size: int,
        experts: int,
        resident: Mask = None,
        predicted: Mask = None,
        ready: Mask = None,
    ) -> None:
        self.cells = cells
        self.capacity = cells.capacity  # as it is now: it may change before the figures are read
        self.layer = layer
        self.number = 0  # of its pass
        self.indices = indices
        self.size = size
        self.experts = experts
        self.resident = resident
        self.predicted = predicted
        self.ready = ready

    def has_arrays(self) -> bool:
        """Whether masks came as arrays."""
        return any(type(mask) is mx.array for mask in (self.resident, self.predicted, self.ready))

    def on_host(self) -> bool:
        """Whether the host may read it as it is, where it can read at all."""
        return self.size <= HOST_IDS and not self.has_arrays()

    def kind(self) -> object:
        """What calls must share to be reduced together."""
        alike = self.experts, self.indices.shape, self.indices.dtype
        if self.resident is None and self.predicted is None:
            return alike
        return alike, type(self.resident), type(self.predicted), type(self.ready)

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


class Calls(list[Call]):
    """The calls of a pass, in their order. `told`: whether it is a loss if nobody evaluates them; `whole`: whether
    those behind the last evaluated one never will be."""

    __slots__ = ("told", "whole")
    patience = 1

    def __init__(self, calls: Iterable[Call] = (), told: bool = True, whole: bool = False) -> None:
        super().__init__(calls)
        self.told = told
        self.whole = whole

    def routing(self, number: int) -> mx.array:
        """The indices of one call."""
        return self[number].indices

    def split(self, number: int) -> tuple[Calls, list[Calls]]:
        """The first calls, which the model has evaluated, and the others, where it may do so yet."""
        return Calls(self[:number]), [] if self.whole else [Calls(self[number:], told=False)]

    def has_arrays(self) -> bool:
        """Whether there is anything besides the indices that may have to be evaluated."""
        return any(call.has_arrays() for call in self)


class HostCalls:
    """Calls of one kind whose few ids the host reads as they are."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def __len__(self) -> int:
        return len(self._calls)

    def count(self, store: Store, followed: Followed) -> None:
        for call in self._calls:
            _count_ids(call, store, followed)


class DeviceCalls:
    """Calls of one kind that the device counts; `arrays` is what it has to compute for that."""

    def __init__(self, calls: Sequence[Call]) -> None:
        experts = calls[0].experts
        counts, figures = counting.token_counts([call.indices for call in calls], experts)
        self._rows = Rows(counts, ((call.number, call.cells) for call in calls))
        layers = sorted({call.layer for call in calls})
        position = {layer: row for row, layer in enumerate(layers)}
        sums = mx.zeros((len(layers), experts + 1), dtype=mx.int32)
        sums = sums.at[mx.array([position[call.layer] for call in calls])].add(counts)
        self._layers = layers
        self._read = [figures, _predictions(calls, counts), sums]
        self.arrays = [*self._read, *self._rows.arrays]
        self._calls = calls

    def __len__(self) -> int:
        return len(self._calls)

    def release(self) -> None:
        """Hold the routing no longer: it has been handed to the device."""
        for call in self._calls:
            call.indices = _NO_INDICES

    def count(self, store: Store, followed: Followed) -> None:
        self._rows.add_to(followed)
        try:
            read: list[Any] = [each.tolist() for each in self._read]
        except Exception as error:
            lost(store, "routed_array", error, len(self))
            return
        (sizes, invalid), predictions, sums = read
        valid = dict.fromkeys(self._layers, 0)
        for call, number, bad, row in zip(self._calls, sizes, invalid, predictions, strict=True):
            if bad:
                lost(store, "routed_array", Refused("out_of_range", bad))
            else:
                call.count(number, *row)
                valid[call.layer] += 1
        for (index, calls), (*tokens, _) in zip(valid.items(), sums, strict=True):
            layer = store.layers.get(index)  # not so for one over the layer budget
            if layer is not None and calls:
                load_of(layer, len(tokens)).add(calls, tokens)


def _count_ids(call: Call, store: Store, followed: Followed) -> None:
    """Read the ids of a call and count them as `routed` would."""
    ids = flat(call.indices)
    routed = set(ids)
    if routed and not (0 <= min(routed) and max(routed) < call.experts):
        lost(store, "routed_array", Refused("out_of_range", ids))
        return
    layer = store.layers.get(call.layer)  # not so for one over the layer budget
    if layer is not None:
        load_of(layer, call.experts).count(ids)
    followed.add(call.number, call.cells, routed)
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


def mask_of(given: Any, experts: int) -> Mask:
    """A set of expert ids as it is now: a bool array (experts,), or whatever else `routed` takes."""
    if type(given) is mx.array:
        if given.dtype != mx.bool_ or given.shape != (experts,):
            raise Refused("not_a_number", given)
        return mx.array.__copy__(given)
    found = frozenset(values.ids(given))
    if found <= _ids(experts):  # one call: a pool has a hundred ids, and comes with each layer
        return found
    if any(type(expert) is not int for expert in found):
        found = frozenset(map(values.count, found))
    if not found <= _ids(experts):
        raise Refused("out_of_range", given)
    return found


@lru_cache(maxsize=16)
def _ids(experts: int) -> frozenset[int]:
    return frozenset(range(experts))
