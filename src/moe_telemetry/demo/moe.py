"""The routed MLP of one layer, served from a pool of slots: route, promote, acquire, compute."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from moe_telemetry import recorder as rec

from .blobs import ExpertBlobs
from .config import ModelConfig
from .disk import SimulatedDisk
from .model import ResidentModel
from .pool import LayerPool
from .prefetch import Prefetcher
from .reader import PrefetchReader


class StreamedExperts:
    """All layers' routed MLPs.

    The arithmetic of a (token, expert) pair is one row of a gathered matmul whatever slot the expert sits in, and
    pairs are added in the router's order, so outputs do not depend on what was resident.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: ResidentModel,
        pools: Sequence[LayerPool],
        blobs: ExpertBlobs,
        disk: SimulatedDisk,
        reader: PrefetchReader | None,
        prefetcher: Prefetcher | None,
        device_routing: bool,
    ) -> None:
        self._experts = config.experts
        self._expert_bytes = config.expert_bytes
        self._layers = model.layers
        self._pools = pools
        self._blobs = blobs
        self._disk = disk
        self._reader = reader
        self._prefetcher = prefetcher
        self._device_routing = device_routing

    def __call__(self, layer: int, h: mx.array) -> mx.array:
        """The residual stream behind the layer's experts, (T, D) to (T, D), evaluated; `h` must be evaluated."""
        pool, block = self._pools[layer], self._layers[layer]
        began = time.perf_counter()
        x = block.moe_norm(h)
        ids, logits = block.choose(x)
        mx.eval(x, ids, logits)
        rows: list[list[int]] = np.asarray(ids).tolist()
        routed = {expert for row in rows for expert in row}
        rec.block("route", time.perf_counter() - began)

        predicted, ready = (None, None) if self._prefetcher is None else self._prefetcher.promote(layer)
        resident = set(pool.slot_of)
        if self._device_routing:
            rec.routed_array(layer, ids, self._experts, resident=resident, predicted=predicted, ready=ready)
        else:
            rec.routed(layer, routed, resident=resident, predicted=predicted, ready=ready)
        pool.use(routed)

        y = self._compute(pool, x, rows, routed)

        began = time.perf_counter()
        weights = mx.softmax(logits, axis=-1)
        out = h + (y * weights[..., None]).sum(axis=1)
        mx.eval(out)
        rec.block("combine", time.perf_counter() - began)
        rec.block_call()
        if self._prefetcher is not None:
            self._prefetcher.settle(layer)
        pool.declare()
        return out

    def _compute(self, pool: LayerPool, x: mx.array, rows: list[list[int]], routed: set[int]) -> mx.array:
        """Each token's experts' outputs (T, k, D), in waves of what the pool can hold at once.

        Every wave computes all pairs, so that its matmuls have the shapes of a single wave and give the same bits;
        pairs whose expert is not in the wave read some slot and are thrown away.
        """
        order = sorted(routed, key=lambda expert: (expert not in pool.slot_of, expert))
        y: mx.array | None = None
        fetch = remap = matmul = 0.0
        for start in range(0, len(order), pool.capacity):
            wave = frozenset(order[start : start + pool.capacity])
            began = time.perf_counter()
            self._acquire(pool, wave)
            acquired = time.perf_counter()
            slots = mx.array([[pool.slot_of[e] if e in wave else 0 for e in row] for row in rows], dtype=mx.uint32)
            mapped = time.perf_counter()
            now = _apply_experts(pool, x, slots)
            if y is not None:
                inside = mx.array([[e in wave for e in row] for row in rows])
                now = mx.where(inside[..., None], now, y)
            mx.eval(now)
            y = now
            fetch += acquired - began
            remap += mapped - acquired
            matmul += time.perf_counter() - mapped
        rec.block("fetch", fetch)
        rec.block("pyremap", remap)
        rec.block("matmul", matmul)
        assert y is not None
        return y

    def _acquire(self, pool: LayerPool, wave: frozenset[int]) -> None:
        """Make every expert of the wave resident; time spent on reads is a stall."""
        missing = sorted(wave.difference(pool.slot_of))
        if not missing:
            return
        began = time.perf_counter()
        for expert in missing:
            place = pool.insert(expert, wave)
            if not self._take_late(pool.layer, expert, place):
                fd, offset = self._blobs.locate(pool.layer, expert)
                rec.read("demand", self._expert_bytes, self._disk.read_demand(fd, place, offset))
        rec.stall(time.perf_counter() - began)

    def _take_late(self, layer: int, expert: int, place: Sequence[memoryview]) -> bool:
        """Use a prefetch that is under way, or finished since promote, rather than read the expert twice."""
        if self._prefetcher is None or self._reader is None:
            return False
        ticket = self._prefetcher.claim(layer, expert)
        if ticket is None or not self._reader.wait(ticket):
            return False
        self._reader.deliver(ticket, place)
        return True


def _apply_experts(pool: LayerPool, x: mx.array, slots: mx.array) -> mx.array:
    """Gated MLPs of the slots (T, k) on the tokens (T, D): (T, k, D)."""
    both = mx.gather_mm(x[:, None, None, :], pool.w_in, rhs_indices=slots)
    gate, value = mx.split(both, 2, axis=-1)
    return mx.gather_mm(gate * mx.sigmoid(gate) * value, pool.w_out, rhs_indices=slots).squeeze(-2)
