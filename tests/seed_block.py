"""A replica of the seed runtime's block, without its model: every call and write of one layer of one forward pass."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from seed_reference import Reference

from moe_telemetry import profiling

UNIT = 2.0**-20
"""About a microsecond; sums of its multiples are exact."""
EXPERTS = 32


class Runtime:
    """Drives the drop-in and the reference alike, and keeps what the metrics must show by phase in `expected`.

    `order`: whether the union is noted before promote or behind it, or behind it with work before
    its misses. `flags`: what is noted at all.
    """

    def __init__(self, order: str, layers: int = 4, seed: int = 7, flags: str = "tick tprof union miss recall") -> None:
        self.order = order
        self.layers = layers
        self.flags = flags.split()
        self.reference = Reference()
        self.expected: Counter[tuple[str, ...]] = Counter()
        self.routed: list[tuple[int, str, set[int]]] = []
        """Layer, phase and ids, where both the union and the misses are noted."""
        self.now = 0.0
        self._random = random.Random(seed)

    def forward(self, tokens: int, phase: str) -> None:
        """One pass, layer by layer."""
        for layer in range(self.layers):
            self._block(layer, tokens, phase)

    def _block(self, layer: int, tokens: int, phase: str) -> None:
        ids = range(EXPERTS)
        routed = set(self._random.sample(ids, min(4 * tokens, EXPERTS) - self._random.randrange(2)))
        predicted = set(self._random.sample(ids, 8))
        ready = set(self._random.sample(sorted(predicted), 5))
        resident = set(self._random.sample(ids, 20)) | (routed if self._random.random() < 0.3 else set())
        self._note("predict", phase)
        self._note("submit", phase)
        self._window(phase)
        if self.order == "union first":
            self._union(tokens, routed, layer, phase)
        self._tick("route", phase)
        for step in ("take", "route", "place"):
            self._note_step(step, phase)
        self._note("promote", phase)
        if self.order == "promote first":
            self._union(tokens, routed, layer, phase)
        if self.order == "misses last":
            self._union(tokens, routed, layer, phase)
            self._tick("pyremap", phase)
            self._tick("fetch", phase)
        if "miss" in self.flags:
            self._misses(routed, predicted, resident, ready, layer, phase)
        if "recall" in self.flags:
            self._recall(routed, predicted, layer, phase)
        for segment in ("pyremap", "fetch", "matmul", "combine"):
            self._tick(segment, phase)
        self.reference.PROF["n_calls"] += 1
        profiling.PROF["n_calls"] += 1
        self.expected["moe.block.calls", phase] += 1

    def _seconds(self) -> float:
        return self._random.randrange(1, 2000) * UNIT

    def _note(self, stage: str, phase: str) -> None:
        if "tprof" in self.flags:
            seconds = self._seconds()
            for found in (self.reference, profiling):
                found.note_tprof(f"{stage}_s", seconds, count_key=f"{stage}_n")
            self._expect_seconds("moe.prefetch.duration", seconds, phase, stage)

    def _note_step(self, step: str, phase: str) -> None:
        if "tprof" in self.flags:
            seconds, count = self._seconds(), self._random.randrange(4)
            named: dict[str, Any] = {"count_key": "place_experts", "count": count} if step == "place" else {}
            for found in (self.reference, profiling):
                found.note_tprof(f"{step}_s", seconds, **named)
            self._expect_seconds("moe.promote.duration", seconds, phase, step)
            if named:
                self.expected["moe.prefetch.placed", phase] += count

    def _tick(self, segment: str, phase: str) -> None:
        if "tick" in self.flags:
            begin, seconds = self.now, self._seconds()
            self.now += seconds
            self.reference.tick(segment, self.now - begin)
            profiling._tick(segment, begin)
            self._expect_seconds("moe.block.duration", seconds, phase, segment)

    def _window(self, phase: str) -> None:
        seconds = self._seconds()
        for found in (self.reference.WINDOW_PROF, profiling.WINDOW_PROF):
            found["sum_s"] += seconds
            found["n"] += 1
        self._expect_seconds("moe.prefetch.window", seconds, phase)

    def _union(self, tokens: int, routed: set[int], layer: int, phase: str) -> None:
        if "union" in self.flags:
            for found in (self.reference, profiling):
                found.note_union(tokens, len(routed), layer)
            self.expected["moe.expert.union", phase, str(tokens), "count"] += 1
            self.expected["moe.expert.union", phase, str(tokens), "sum"] += len(routed)
            self.expected["moe.layer.experts", phase, str(layer)] += len(routed)
            if "miss" not in self.flags:
                self.expected["moe.layer.calls", phase, str(layer), "unknown"] += 1

    def _misses(self, routed: set[int], predicted: set[int], resident: set[int], ready: set[int], *at: Any) -> None:
        layer, phase = at
        for found in (self.reference, profiling):
            found.note_miss_attrib(routed, predicted, resident, phase == "decode", ready)
        label = str(layer) if "union" in self.flags else "none"
        if "union" in self.flags:
            self.routed.append((layer, phase, set(routed)))
        outcomes = {
            "hit": routed & resident,
            "miss_evicted": (routed & predicted & ready) - resident,
            "miss_timing": (routed & predicted) - ready - resident,
            "miss_unpredicted": routed - resident - predicted,
        }
        for outcome, experts in outcomes.items():
            self.expected["moe.expert.lookups", phase, label, outcome] += len(experts)
        self.expected["moe.layer.calls", phase, label, "all_hit" if routed <= resident else "partial"] += 1
        self.expected["moe.prefetch.hits", phase] += len(routed & resident & predicted & ready)

    def _recall(self, routed: set[int], predicted: set[int], layer: int, phase: str) -> None:
        for found in (self.reference.PREDICT_RECALL_PROF, profiling.PREDICT_RECALL_PROF):
            found["hit"] += len(routed & predicted)
            found["routed"] += len(routed)
            found["n"] += 1
        label = str(layer) if "union" in self.flags else "none"
        self.expected["moe.predictor.experts", phase, label, "recalled"] += len(routed & predicted)
        self.expected["moe.predictor.experts", phase, label, "missed"] += len(routed - predicted)

    def _expect_seconds(self, name: str, seconds: float, *labels: str) -> None:
        self.expected[(name, *labels, "count")] += 1
        self.expected[(name, *labels, "sum")] += seconds


def recorded(snapshot: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """A snapshot's counters and histograms in the form of `Runtime.expected`, zeros left out, and the pool curve, which
    `Runtime.routed` is for."""
    found = {}
    for name, metric in snapshot["metrics"].items():
        if name.startswith(("moe.telemetry", "moe.pool.simulated", "process")) or metric["kind"] == "gauge":
            continue
        for series in metric["series"]:
            labels = tuple(series["labels"].values())
            if metric["kind"] == "counter":
                found[(name, *labels)] = series["value"]
            else:
                found[(name, *labels, "count")] = series["count"]
                found[(name, *labels, "sum")] = series["sum"]
    return {key: value for key, value in found.items() if value}
