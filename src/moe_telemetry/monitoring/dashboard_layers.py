"""Layers: which of them are worse than the others. One phase at a time."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models.dashboard import FieldColorModeId, Panel

from moe_telemetry import catalog as c

from . import causes
from .config import Config
from .expressions import RANGE, ever, flow, in_order, level
from .kit import About, Bad, Query, bars, history, table
from .layout import Band, Section, chosen, dashboard, layers
from .promql import ratio

UID = "moe-layers"
LAYER = {"layer": "$layer"}
CHOSEN = {"phase": "$phase", **LAYER}
LEGEND = "{{layer}} {{instance}}"
BLUES = FieldColorModeId.CONTINUOUS_BLUES
REDS = FieldColorModeId.CONTINUOUS_YL_RD


def _share(metric: c.Metric, window: str | None = None, **labels: str) -> str:
    """Part of a layer's own events."""
    options = {} if window is None else {"window": window}
    part, whole = flow(metric, "layer", **options, **CHOSEN, **labels), flow(metric, "layer", **options, **CHOSEN)
    return ratio(part, whole)


def hit_rate(config: Config) -> Panel:
    """Hit rate by layer."""
    about = About(
        "Hit rate by layer",
        "Share of a layer's routed experts that were resident. One red row: that layer routes more widely than its "
        "pool holds, give it more slots. All rows red from one moment on: prompt or predictor changed.",
        "percentunit",
        causes.NO_LAYERS,
    )
    query = Query(in_order(_share(c.LOOKUPS, outcome="hit")), LEGEND)
    return history(about, query, [Bad(config.thresholds.hit_rate_low, below=True)])


def outcome() -> Panel:
    """One outcome by layer."""
    about = About(
        "Share of outcome $outcome by layer",
        "Share of a layer's lookups that had the chosen outcome. Late misses in the first layers are usual, as there "
        "is little before them to hide a read in; in the last ones they mean that reads queue up. Without `predicted` "
        "from the runtime miss_timing is 0, without `ready` miss_evicted.",
        "percentunit",
        causes.NO_LAYERS,
    )
    return history(about, Query(in_order(_share(c.LOOKUPS, outcome="$outcome")), LEGEND), scheme=REDS)


def recall(config: Config) -> Panel:
    """Recall by layer."""
    about = About(
        "Predictor recall by layer",
        "Share of a layer's routed experts that were predicted. A layer that is always low needs a predictor of its "
        "own, or none: reads for it are wasted.",
        "percentunit",
        causes.NO_RECALL,
    )
    query = Query(in_order(_share(c.PREDICTOR_EXPERTS, outcome="recalled")), LEGEND)
    return history(about, query, [Bad(config.thresholds.recall_low, below=True)])


def _union_mean() -> str:
    return ratio(flow(c.LAYER_EXPERTS, "layer", **CHOSEN), flow(c.LAYER_CALLS, "layer", **CHOSEN))


def union_mean() -> Panel:
    """Mean union by layer."""
    about = About(
        "Experts per layer call by layer, mean",
        "Mean distinct experts that a call of the layer routes. Decode blends single tokens with verify passes here: "
        "the Overview has them by seq.",
        "suffix: experts",
        causes.NO_LAYERS,
        1,
    )
    return history(about, Query(in_order(_union_mean()), LEGEND), scheme=BLUES)


def union_mean_of_pool() -> Panel:
    """Mean union against capacity."""
    about = About(
        "Mean experts per call, of the layer's pool",
        "The mean against the layer's pool capacity. Near 100 % nothing survives from one call to the next: the pool "
        "works as a buffer, not as a cache.",
        "percentunit",
        causes.NO_POOL,
    )
    query = in_order(f"{_union_mean()} / ({level(c.POOL_CAPACITY, 'layer', of='min', **LAYER)} > 0)")
    return history(about, Query(query, LEGEND), [Bad(1)])


def union_max() -> Panel:
    """Largest union against capacity."""
    about = About(
        "Largest call since the start, of the layer's pool",
        "The run's largest union against the layer's pool capacity; it never falls. Above 100 % some calls did not fit "
        "and loaded in waves: see layer calls above their pool for when.",
        "percentunit",
        causes.NO_POOL,
    )
    largest = level(c.LAYER_UNION_MAX, "layer", **CHOSEN)
    query = in_order(f"{largest} / ({level(c.POOL_CAPACITY, 'layer', of='min', **LAYER)} > 0)")
    return bars(about, Query(query, LEGEND), [Bad(1.0001)])


def overflows() -> Panel:
    """Calls that did not fit."""
    about = About(
        "Layer calls above their pool",
        "Calls per second whose union was larger than the layer's pool at that moment; 0 is right. Else: more slots "
        "for these layers, shorter prefill chunks, or fewer drafts (MoeUnionExceedsPool, for decode).",
        "suffix: calls/s",
        causes.NO_POOL,
    )
    # A layer without a pool has none to exceed.
    pools = f"({level(c.POOL_CAPACITY, 'layer', of='min', **LAYER)} > 0)"
    query = f"{flow(c.LAYER_OVERFLOWS, 'layer', **CHOSEN)} and on (instance, layer) {pools}"
    return history(about, Query(in_order(query), LEGEND), [Bad(1e-9)])


def load_peak() -> Panel:
    """Is the routing lopsided?"""
    about = About(
        "Busiest expert's load by layer",
        "Tokens of a layer's busiest expert as a multiple of an even share, over its last 256 calls or so of both "
        "phases. High: a few experts do most of the work, so pin them in the pool.",
        "suffix: x even",
        causes.NO_TOKEN_COUNTS,
        1,
    )
    return history(about, Query(in_order(level(c.LOAD_PEAK, "layer", **LAYER)), LEGEND), scheme=REDS)


def evictions() -> Panel:
    """Evictions by layer."""
    about = About(
        "Evictions by layer",
        "Experts evicted per second. A layer that evicts far more than the others has too small a pool for its "
        "routing.",
        "suffix: experts/s",
        causes.NO_EVICTIONS,
    )
    query = ever(flow(c.EVICTIONS, "layer", **CHOSEN), c.EVICTIONS)
    return history(about, Query(in_order(query), LEGEND), scheme=REDS)


def pool_fill() -> Panel:
    """How full the pools are."""
    about = About(
        "Pool fill by layer",
        "Resident experts of each layer's slots, now. Not full after some minutes: memory is reserved that this "
        "layer does not use; give its slots to the worst layers.",
        "percentunit",
        causes.NO_POOL,
    )
    resident, capacity = (level(metric, "layer", **LAYER) for metric in (c.POOL_RESIDENT, c.POOL_CAPACITY))
    return bars(about, Query(in_order(ratio(resident, capacity)), LEGEND))


def worst_five() -> Panel:
    """Where to begin."""
    about = About(
        "Worst five layers by hit rate",
        "The five layers of each instance with the lowest hit rate over the whole time range. Begin here: compare "
        "their union with their pool, and their recall with the others'.",
        "percentunit",
        causes.NO_LAYERS,
        1,
    )
    # An instant query: as a range query it would be the five worst of each moment, more than five in all.
    query = f"bottomk by (instance) (5, {_share(c.LOOKUPS, RANGE, outcome='hit')})"
    return table(about, Query(query, "{{layer}}"), ("Time",), {"Value": "hit rate"}, "hit rate")


def layered(config: Config) -> dict[str, Any]:
    """The dashboard."""
    variables = [
        layers(),
        chosen("phase", "Phase", c.PHASES, "decode"),
        chosen("outcome", "Outcome", c.OUTCOMES, "miss_timing"),
    ]
    head = (
        Band(10, ((hit_rate(config), 16), (worst_five(), 8))),
        Band(10, ((outcome(), 12), (recall(config), 12))),
    )
    unions = (
        Band(10, ((union_mean(), 12), (union_mean_of_pool(), 12))),
        Band(10, ((union_max(), 8), (overflows(), 16))),
    )
    pools = (Band(10, ((pool_fill(), 8), (evictions(), 8), (load_peak(), 8))),)
    return dashboard(
        config,
        UID,
        "Layers",
        "Which layers are worse than the others, over time; one phase at a time.",
        [
            Section("Lookups and prediction ($phase)", head),
            Section("Experts per call against the pool ($phase)", unions),
            Section("Pools and load", pools),
        ],
        variables,
    )
