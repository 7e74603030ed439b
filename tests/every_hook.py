"""Good calls of every hook, and what they add: material for the tests that treat all hooks alike."""

from __future__ import annotations

import mlx.core as mx

from moe_telemetry.hooks import HOOKS

INDICES = mx.array([[1, 2], [3, 3]])
mx.eval(INDICES)

SECONDS = 0.01

CALLS = {
    "forward": ((1,), {}),
    "forward_done": ((SECONDS,), {}),
    "tokens": ((3,), {}),
    "speculation": ((4, 3), {}),
    "request": ((0.5, 2.0, 11), {}),
    "routed": ((2, {1, 2, 3, 4}, {1, 2}, {2, 3, 9}, {2, 3}), {}),
    "routed_array": ((2, INDICES, 16, {1, 2}, {2, 3, 9}, {2, 3}), {}),
    "union": ((2, 7, "bypassed"), {}),
    "recall": ((2, {1, 2, 3}, {2, 3, 4, 5}), {}),
    "prefetch": (("submit", SECONDS), {}),
    "promote": (("place", SECONDS), {}),
    "window": ((SECONDS,), {}),
    "placed": ((2,), {}),
    "prefetch_dropped": (("unused", 3, 100), {}),
    "block": (("fetch", SECONDS), {}),
    "block_call": ((), {}),
    "read": (("demand", 1000, SECONDS), {}),
    "stall": ((SECONDS,), {}),
    "evicted": ((2, 5), {}),
    "degraded": (("cpu", 2), {}),
    "pool": ((2, 8, 6), {}),
    "cumulative": (("moe.tokens", 1000), {"phase": "prefill"}),
}
"""Positional and named arguments of one good call of each hook."""

DECODE = (("phase", "decode"),)
LAYER = (("layer", "2"), ("phase", "decode"))


def with_label(key: str, value: str, *others: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(((key, value), *others)))


COUNTED = {
    ("moe.tokens", DECODE): 3,
    ("moe.tokens", (("phase", "prefill"),)): 1000,
    ("moe.speculation.tokens", (("outcome", "accepted"),)): 3,
    ("moe.speculation.tokens", (("outcome", "rejected"),)): 1,
    ("moe.expert.lookups", with_label("outcome", "hit", *LAYER)): 4,
    ("moe.expert.lookups", with_label("outcome", "miss_evicted", *LAYER)): 2,
    ("moe.expert.lookups", with_label("outcome", "miss_unpredicted", *LAYER)): 1,
    ("moe.layer.calls", with_label("residency", "partial", *LAYER)): 2,
    ("moe.layer.calls", with_label("residency", "bypassed", *LAYER)): 1,
    ("moe.layer.experts", LAYER): 14,
    ("moe.predictor.experts", with_label("outcome", "recalled", *LAYER)): 6,
    ("moe.predictor.experts", with_label("outcome", "missed", *LAYER)): 5,
    ("moe.predictor.candidates", with_label("outcome", "used", *DECODE)): 6,
    ("moe.predictor.candidates", with_label("outcome", "wasted", *DECODE)): 3,
    ("moe.prefetch.hits", DECODE): 2,
    ("moe.prefetch.placed", DECODE): 2,
    ("moe.prefetch.dropped", with_label("reason", "unused", *DECODE)): 3,
    ("moe.prefetch.wasted", DECODE): 100,
    ("moe.block.calls", DECODE): 1,
    ("moe.expert.read", with_label("source", "demand", *DECODE)): 1000,
    ("moe.expert.evictions", LAYER): 5,
    ("moe.expert.degraded", with_label("mode", "cpu", *DECODE)): 2,
}
"""What one call of each adds to the counters that are not 0 behind them."""

GEN_AI = (
    ("gen_ai.operation.name", "text_completion"),
    ("gen_ai.provider.name", "test"),
    ("gen_ai.request.model", "test"),
)
OBSERVED = {
    ("moe.expert.union", with_label("seq", "1", *DECODE)): 3,
    ("moe.forward.duration", with_label("seq", "1", *DECODE)): 1,
    ("moe.prefetch.duration", with_label("stage", "submit", *DECODE)): 1,
    ("moe.promote.duration", with_label("step", "place", *DECODE)): 1,
    ("moe.prefetch.window", DECODE): 1,
    ("moe.block.duration", with_label("segment", "fetch", *DECODE)): 1,
    ("moe.expert.read.duration", with_label("source", "demand", *DECODE)): 1,
    ("moe.expert.stall.duration", DECODE): 1,
    ("gen_ai.server.time_to_first_token", GEN_AI): 1,
    ("gen_ai.server.time_per_output_token", GEN_AI): 1,
    ("gen_ai.server.request.duration", GEN_AI): 1,
}
"""Observations of one call of each, of the histograms that have any."""


def call(recorder: object, name: str) -> None:
    """One good call of a hook."""
    args, named = CALLS[name]
    getattr(recorder, name)(*args, **named)


def call_all(recorder: object) -> None:
    """One good call of each hook, the pass first."""
    for name in HOOKS:
        call(recorder, name)
