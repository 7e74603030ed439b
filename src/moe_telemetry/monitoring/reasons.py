"""Why an endpoint lacks a metric: what its runtime does not do, or does not have."""

from __future__ import annotations

from moe_telemetry import catalog as c

_ROUTING = "neither routed(), routed_array() nor union() is called"
_LOOKUPS = "the runtime declares no pool (recorder.pool) and gives routed() or routed_array() no `resident`"
_PREDICTOR = "the runtime declares no pool and gives routed() no `predicted`; recall() is not called either"
_CURVE = (
    "no ids came by routed() or routed_array() of a layer that is followed (one of four, not the first), or pool_curve "
    "is off"
)
_REQUEST = "recorder.request is not called"
WHY: dict[str, str] = {
    c.LOOKUPS.name: _LOOKUPS,
    c.PREFETCH_HITS.name: "routed() got no `ready`, or no prefetch made a hit",
    c.PREDICTOR_EXPERTS.name: _PREDICTOR,
    c.PREDICTOR_CANDIDATES.name: _PREDICTOR,
    c.LAYER_CALLS.name: f"no layer is known: {_ROUTING}; start(num_layers=...) is not given",
    c.LAYER_EXPERTS.name: _ROUTING,
    c.LAYER_UNION_MAX.name: _ROUTING,
    c.UNION.name: _ROUTING,
    c.UNION_MAX.name: _ROUTING,
    c.LAYER_OVERFLOWS.name: "no union was above its pool, or no pool is declared",
    c.POOL_CAPACITY.name: "recorder.pool was given no capacity",
    c.POOL_RESIDENT.name: "recorder.pool was given no resident count",
    c.SIMULATED_LOOKUPS.name: _CURVE,
    c.SIMULATED_HITS.name: _CURVE,
    c.PREFETCH_DURATION.name: "recorder.prefetch is not called (drop-in: is PREFETCH_TPROF=1 set?)",
    c.PROMOTE_DURATION.name: "recorder.promote is not called (drop-in: is PREFETCH_TPROF=1 set?)",
    c.PREFETCH_WINDOW.name: 'recorder.window is not called (drop-in: is WINDOW_PROF["sum_s"] raised?)',
    c.PREFETCH_PLACED.name: "recorder.placed is not called",
    c.PREFETCH_DROPPED.name: "recorder.prefetch_dropped is not called, or nothing was dropped",
    c.PREFETCH_WASTED.name: "recorder.prefetch_dropped got no `nbytes`, or nothing was read for nothing",
    c.BLOCK_DURATION.name: "recorder.block is not called (drop-in: is STREAM_PROF=1 set?)",
    c.BLOCK_CALLS.name: "recorder.block_call is not called",
    c.READ_BYTES.name: "recorder.read is not called",
    c.READ_DURATION.name: "recorder.read is not called",
    c.STALL_DURATION.name: "recorder.stall is not called",
    c.EVICTIONS.name: "recorder.evicted is not called, or nothing was evicted",
    c.DEGRADED.name: "recorder.degraded is not called: every expert was served by its weights",
    c.FORWARD_DURATION.name: "recorder.forward_done is not called",
    c.FORWARD_ACTIVE.name: "recorder.forward_done is not called",
    c.TOKENS.name: "recorder.tokens is not called",
    c.SPECULATION_TOKENS.name: "recorder.speculation is not called: no speculative decoding",
    c.LOAD_PEAK.name: "routed() is not told how many tokens chose an expert: routed_array() and mlx_lm's routing are",
    c.TTFT.name: _REQUEST,
    c.TPOT.name: _REQUEST,
    c.REQUEST_DURATION.name: _REQUEST,
    c.MLX_MEMORY.name: "the process has not loaded MLX",
    c.MLX_MEMORY_PEAK.name: "the process has not loaded MLX",
    c.MLX_MEMORY_LIMIT.name: "the process has not loaded MLX, or its version has no memory limit",
    c.PROCESS_MEMORY.name: "the application's own provider reports its process",
    c.PROCESS_CPU.name: "the application's own provider reports its process",
    c.RUN_INFO.name: "this is not an endpoint of moe_telemetry",
    c.RUN_START_TIME.name: "this is not an endpoint of moe_telemetry",
}

_RESIDENT = "mlx_lm has all experts in memory: no pool, no prediction and no reads; and it does not time its MoE blocks"
_NO_EXPERTS = "no MoE model has run so far, or its experts are in modules of another kind (docs/mlx_lm.md)"
_IDLE = "mlx_lm has generated nothing so far"
_NO_CURVE = "the model has one MoE layer (one of four is followed, not the first), or pool_curve is off"
_OF_STREAMING = (
    *(c.LOOKUPS, c.PREDICTOR_EXPERTS, c.PREDICTOR_CANDIDATES, c.POOL_CAPACITY, c.POOL_RESIDENT),
    *(c.PREFETCH_DURATION, c.PREFETCH_WINDOW, c.PREFETCH_PLACED, c.PREFETCH_HITS, c.PREFETCH_DROPPED),
    *(c.PREFETCH_WASTED, c.PROMOTE_DURATION, c.BLOCK_DURATION, c.BLOCK_CALLS),
    *(c.READ_BYTES, c.READ_DURATION, c.STALL_DURATION, c.EVICTIONS),
)
_OF_ROUTING = (c.LAYER_CALLS, c.LAYER_EXPERTS, c.LAYER_UNION_MAX, c.UNION, c.UNION_MAX, c.LOAD_PEAK)
_OF_GENERATION = (c.FORWARD_DURATION, c.FORWARD_ACTIVE, c.TOKENS, c.TTFT, c.REQUEST_DURATION)
MLX_LM: dict[str, str] = {
    **{metric.name: _RESIDENT for metric in _OF_STREAMING},
    **{metric.name: _NO_EXPERTS for metric in _OF_ROUTING},
    **{metric.name: _IDLE for metric in _OF_GENERATION},
    **{metric.name: _NO_CURVE for metric in (c.SIMULATED_LOOKUPS, c.SIMULATED_HITS)},
    c.TPOT.name: "mlx_lm has given no answer of two tokens so far",
    c.SPECULATION_TOKENS.name: "mlx_lm has generated nothing with a draft model so far",
}
"""The same for plain mlx_lm, whose hooks are ours."""


def reasons(runtimes: set[str], streams: bool) -> dict[str, str]:
    """Reasons by metric's name for an endpoint of these runtimes; `streams`: they look experts up in a pool."""
    return WHY | MLX_LM if runtimes == {"mlx_lm"} and not streams else WHY
