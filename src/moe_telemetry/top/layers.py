"""The figures of each layer in one phase, and their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_telemetry import catalog as c

from .window import Window


@dataclass(frozen=True)
class LayerRow:
    """One layer in one phase; None where nothing tells. Shares are of 1; `calls` and `evictions` are a second.

    `union` is the mean of the window in experts, `largest` the run's largest union so far.
    """

    layer: str
    calls: float | None
    hit: float | None
    late: float | None
    evicted: float | None
    unpredicted: float | None
    recall: float | None
    all_hit: float | None
    union: float | None
    largest: float | None
    pool: float | None
    evictions: float | None

    @property
    def above_pool(self) -> bool:
        """Whether a union of the run was larger than the pool is now."""
        return self.largest is not None and self.pool is not None and self.largest > self.pool


def layer_rows(window: Window, phase: str) -> tuple[LayerRow, ...]:
    """Layers that are known, in the order of the model; `none` only where it was called."""
    calls = {
        residency: window.by("layer", c.LAYER_CALLS, phase=phase, residency=residency) for residency in c.RESIDENCIES
    }
    lookups = {outcome: window.by("layer", c.LOOKUPS, phase=phase, outcome=outcome) for outcome in c.OUTCOMES}
    recalled = window.by("layer", c.PREDICTOR_EXPERTS, phase=phase, outcome="recalled")
    predictable = window.by("layer", c.PREDICTOR_EXPERTS, phase=phase)
    experts = window.by("layer", c.LAYER_EXPERTS, phase=phase)
    evictions = window.by("layer", c.EVICTIONS, phase=phase)
    largest = _gauges(window, phase)
    pools = {
        dict(labels).get("layer", ""): value for labels, value in window.now.named(c.POOL_CAPACITY).items() if labels
    }

    def row(layer: str) -> LayerRow:
        routed = sum(of.get(layer, 0.0) for of in lookups.values())
        of_layer = {residency: of.get(layer, 0.0) for residency, of in calls.items()}
        count = sum(of_layer.values())
        known = count - of_layer["unknown"]
        return LayerRow(
            layer=layer,
            calls=_ratio(count, window.seconds),
            hit=_ratio(lookups["hit"].get(layer, 0.0), routed),
            late=_ratio(lookups["miss_timing"].get(layer, 0.0), routed),
            evicted=_ratio(lookups["miss_evicted"].get(layer, 0.0), routed),
            unpredicted=_ratio(lookups["miss_unpredicted"].get(layer, 0.0), routed),
            recall=_ratio(recalled.get(layer, 0.0), predictable.get(layer, 0.0)),
            all_hit=_ratio(of_layer["all_hit"] + of_layer["bypassed"], known),
            union=_ratio(experts.get(layer, 0.0), count),
            largest=largest.get(layer),
            pool=pools.get(layer),
            evictions=_ratio(evictions[layer], window.seconds) if layer in evictions else None,
        )

    names = {layer for of in calls.values() for layer in of} | set(pools)
    rows = [row(layer) for layer in sorted(names, key=_place)]
    return tuple(each for each in rows if each.layer.isdecimal() or each.calls)


def _gauges(window: Window, phase: str) -> dict[str, float]:
    found = {}
    for labels, value in window.now.named(c.LAYER_UNION_MAX).items():
        of = dict(labels)
        if of["phase"] == phase and "layer" in of:
            found[of["layer"]] = value
    return found


def _place(layer: str) -> tuple[int, str]:
    return (int(layer), "") if layer.isdecimal() else (1 << 30, layer)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


@dataclass(frozen=True)
class Order:
    """A column that rows are sorted by, its worst end first; `of` gives None where the row has no figure."""

    name: str
    of: Callable[[LayerRow], float | None]
    falling: bool


ORDERS: tuple[Order, ...] = (
    Order("layer", lambda row: float(_place(row.layer)[0]), falling=False),
    Order("calls/s", lambda row: row.calls, falling=True),
    Order("hit", lambda row: row.hit, falling=False),
    Order("late", lambda row: row.late, falling=True),
    Order("evicted", lambda row: row.evicted, falling=True),
    Order("unpred", lambda row: row.unpredicted, falling=True),
    Order("recall", lambda row: row.recall, falling=False),
    Order("all hit", lambda row: row.all_hit, falling=False),
    Order("union", lambda row: row.union, falling=True),
    Order("max", lambda row: row.largest, falling=True),
    Order("evict/s", lambda row: row.evictions, falling=True),
)


def ordered(rows: tuple[LayerRow, ...], order: Order, reverse: bool = False) -> list[LayerRow]:
    """Rows by a column, the worst first, or last with `reverse`; rows without the figure are always last."""
    known = [(value, row) for row in rows if (value := order.of(row)) is not None]
    known.sort(key=lambda each: each[0], reverse=order.falling != reverse)
    found = [row for _, row in known]
    return found + [row for row in rows if order.of(row) is None]
