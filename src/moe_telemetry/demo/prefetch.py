"""Prediction, submission and promotion: what happens to a layer's experts before its router has spoken."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from moe_telemetry import Phase
from moe_telemetry import recorder as rec

from .config import ModelConfig
from .model import ResidentModel
from .pool import LayerPool
from .reader import PrefetchReader, Ticket

LOOKAHEAD = 1
"""Layers between the input that is looked at and the gate that is applied to it.

With 2 a read has more time (timing misses 0.034 of the decode lookups, not 0.045), but recall falls from 0.79 to
0.75 and unpredicted misses rise as much: the hit rate is the same, 0.90, and 1 asks for fewer reads.
"""
BUDGET = 4
"""Reads submitted for one layer in one pass, at most: those with the highest logits."""


class Prefetcher:
    """Guesses each layer's experts from an earlier layer's input, and has the missing ones read meanwhile."""

    def __init__(
        self, config: ModelConfig, model: ResidentModel, pools: Sequence[LayerPool], reader: PrefetchReader
    ) -> None:
        self.permutation: list[int] | None = None
        """A fault: ids are exchanged by this permutation, as if another layer's gate had been applied."""
        self._layers = model.layers
        self._pools = pools
        self._reader = reader
        self._expert_bytes = config.expert_bytes
        self._predicted: list[set[int]] = [set() for _ in pools]
        self._tickets: list[dict[int, Ticket]] = [{} for _ in pools]
        self._submitted_at = [0.0] * len(pools)

    def look_ahead(self, layer: int, h: mx.array, phase: Phase) -> None:
        """Predict from a layer's evaluated input `h` (T, D), and submit the reads that the guess needs.

        The first layer's input, the embedding, also serves the layers that nobody else looks ahead to.
        """
        targets = range(LOOKAHEAD + 1) if layer == 0 else (layer + LOOKAHEAD,)
        for target in targets:
            if target < len(self._pools):
                self._predict(target, h, phase)

    def _predict(self, layer: int, h: mx.array, phase: Phase) -> None:
        began = time.perf_counter()
        block = self._layers[layer]
        ids, logits = block.choose(block.moe_norm(h))
        mx.eval(ids, logits)
        best: dict[int, float] = {}
        for expert, logit in zip(np.asarray(ids).ravel().tolist(), np.asarray(logits).ravel().tolist(), strict=True):
            guess = expert if self.permutation is None else self.permutation[expert]
            best[guess] = max(logit, best.get(guess, logit))
        self._predicted[layer] = set(best)
        rec.prefetch("predict", time.perf_counter() - began)

        began = time.perf_counter()
        pool, tickets = self._pools[layer], self._tickets[layer]
        missing = [expert for expert in best if expert not in pool.slot_of]
        wanted = [expert for expert in missing if pool.admits(expert, best)]
        wanted.sort(key=lambda expert: (-best[expert], expert))
        for expert in wanted[:BUDGET]:
            ticket = self._reader.submit(layer, expert, phase)
            if ticket is not None:
                tickets[expert] = ticket
        if len(missing) > len(wanted):
            rec.prefetch_dropped("no_slot", len(missing) - len(wanted))
        if len(wanted) > BUDGET:
            rec.prefetch_dropped("budget", len(wanted) - BUDGET)
        if refused := min(len(wanted), BUDGET) - len(tickets):
            rec.prefetch_dropped("queue_full", refused)
        self._submitted_at[layer] = began
        rec.prefetch("submit", time.perf_counter() - began)

    def promote(self, layer: int) -> tuple[set[int], set[int]]:
        """Move what has been read into slots; return the predicted experts and those that were ready.

        Ready are predicted experts whose read was finished by now, placed or not, and residents that an earlier
        prefetch placed and no pass has used since: a hit on either was made by a prefetch.
        """
        began = time.perf_counter()
        pool, tickets, predicted = self._pools[layer], self._tickets[layer], self._predicted[layer]
        if tickets:
            rec.window(began - self._submitted_at[layer])
        taken = [expert for expert, ticket in tickets.items() if self._reader.is_done(ticket)]
        taken_at = time.perf_counter()
        rec.promote("take", taken_at - began)

        places: dict[int, tuple[memoryview, ...]] = {}
        for expert in taken:
            if pool.admits(expert, predicted):
                places[expert] = pool.insert(expert, predicted)
        pool.unused.update(places)
        routed_at = time.perf_counter()
        rec.promote("route", routed_at - taken_at)

        for expert in taken:
            self._reader.deliver(tickets.pop(expert), places.get(expert, ()))
        rec.promote("place", time.perf_counter() - routed_at)

        if places:
            rec.placed(len(places))
        if refused := len(taken) - len(places):
            rec.prefetch_dropped("no_slot", refused, refused * self._expert_bytes)
        ready = set(taken) | (pool.unused & predicted)
        rec.prefetch("promote", time.perf_counter() - began)
        return predicted, ready

    def claim(self, layer: int, expert: int) -> Ticket | None:
        """The read of a routed expert that was still under way at promote, if there is one."""
        return self._tickets[layer].pop(expert, None)

    def settle(self, layer: int) -> None:
        """The layer has what it needs: give up the reads that came too late or for nothing."""
        for ticket in self._tickets[layer].values():
            self._reader.abandon(ticket)
        self._tickets[layer].clear()
        self._predicted[layer] = set()
