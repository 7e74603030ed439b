"""The end-of-run report: the figures that people decide by, from a snapshot.

Not called `report`, which is the function that the package exports.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from typing import Any

from . import catalog as c
from . import pool_size, summary
from .figures import PhaseFigures, Snapshot, Totals, acceptance, nearest_rank, phase_figures
from .snapshot import SCHEMA
from .values import MAX_COUNT

Report = dict[str, Any]


DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of data of another form or size."""


class ReportError(ValueError):
    """What was given is no snapshot; the message is one line."""


def report(snapshot: Snapshot) -> Report:
    """The figures of a snapshot (`Telemetry.snapshot()`, `/snapshot`), as plain data; None where nothing tells.

    Keys:
        `run`, and `wall_seconds` from its start to the snapshot.
        `phases`: for prefill and decode apart
            `figures`: those of `figures.PhaseFigures`, tok/s and all-hit share among them;
            `unions`: for each sequence length `seq`, `calls`, `mean`, `p50`, `p99`, `max` (experts; quantiles are
            nearest-rank), `max_layer`, and `layers`: `max`, `mean`, `count` of each layer;
            `lookups`: see `overall`;
            `recall`: share of the routed experts that were predicted; `mean_routed`: experts a layer call;
            `mean_window_ms`; `prefetch`, `promote`: for each segment `seconds`, `count`, `mean_ms`, and
            `wall_share`, its share of the wall time.
        `overall`: lookups of both phases together, which is what a profiling module's own totals are:
            `routed`, and the shares `hit`, `miss` (of the routed), `predicted` (A), `unpredicted` (B, both of the
            misses), `timing`, `evicted` (both of A).
        `requests`: see `summary.requests`; `accepted`: share of the draft tokens.
        `pool_size`: what pools of other sizes would have hit (see `pool_size.pool_size`).
        `pool_floor`: `slots` that the largest decode union needs, and its `seq` and `layer`.

    Raises:
        ReportError: it is no snapshot, or of another schema.
    """
    if not isinstance(snapshot, dict) or not {"schema", "run", "metrics", "unions"} <= snapshot.keys():
        raise ReportError("this is no snapshot of moe_telemetry")
    if snapshot["schema"] != SCHEMA:
        raise ReportError(f"the snapshot's schema is {snapshot['schema']!r}, this version reads {SCHEMA}")
    try:
        return _build(snapshot)
    except DAMAGE as error:
        detail = " ".join(str(error).split())[:200]
        raise ReportError(f"the snapshot is damaged: {type(error).__name__}: {detail}") from error


def _build(snapshot: Snapshot) -> Report:
    totals = Totals(snapshot)
    wall = datetime.fromisoformat(snapshot["time"]).timestamp() - float(snapshot["run"]["start_time"])
    phases = {phase: _phase(snapshot, totals, phase, wall) for phase in c.PHASES}
    if not math.isfinite(wall):
        raise ValueError("the run's start is no time")
    return {
        "run": {**dict.fromkeys(("model", "runtime", "run", "version"), ""), **snapshot["run"]},
        "wall_seconds": wall,
        "phases": phases,
        "overall": _lookups(totals),
        "requests": summary.requests(totals),
        "accepted": acceptance(totals),
        "pool_floor": _pool_floor(phases["decode"]["unions"]),
        "pool_size": pool_size.pool_size(snapshot, totals),
    }


def _phase(snapshot: Snapshot, totals: Totals, phase: str, wall: float) -> Report:
    calls = totals.total(c.LAYER_CALLS, phase=phase)
    routed = totals.total(c.LAYER_EXPERTS, phase=phase) or totals.total(c.LOOKUPS, phase=phase)
    recalled = totals.total(c.PREDICTOR_EXPERTS, phase=phase, outcome="recalled")
    return {
        "figures": asdict(phase_figures(totals, phase)),
        "unions": [
            union
            for seq, found in sorted(snapshot["unions"].get(phase, {}).items(), key=_by_length)
            if (union := _union(seq, found)) is not None
        ],
        "lookups": _lookups(totals, phase=phase),
        "recall": _ratio(recalled, totals.total(c.PREDICTOR_EXPERTS, phase=phase)),
        "mean_routed": _ratio(routed, calls),
        "mean_window_ms": _mean_ms(*totals.observed(c.PREFETCH_WINDOW, phase=phase)),
        "prefetch": {
            stage: _segment(*totals.observed(c.PREFETCH_DURATION, phase=phase, stage=stage), wall) for stage in c.STAGES
        },
        "promote": {
            step: _segment(*totals.observed(c.PROMOTE_DURATION, phase=phase, step=step), wall) for step in c.STEPS
        },
    }


def _by_length(item: tuple[str, Any]) -> int:
    return int(item[0].strip("<=+"))


def _union(seq: str, found: dict[str, Any]) -> Report | None:
    """One sequence length; several share a row where there are very many ("<=64")."""
    layers = {
        layer: counted
        for layer, by in found["layers"].items()
        if (counted := +Counter({int(size): _count(times) for size, times in by.items()}))
    }
    rest = found.get("rest", {"count": 0, "sum": 0, "max": 0})
    sizes: Counter[int] = Counter()
    for of_layer in layers.values():
        sizes.update(of_layer)
    calls = sizes.total() + _count(rest["count"])
    if not calls:
        return None
    largest = max(*sizes, rest["max"])
    ranked = sizes + Counter({rest["max"]: rest["count"]})
    return {
        "seq": seq,
        "calls": calls,
        "mean": (_sum(sizes) + rest["sum"]) / calls,
        "p50": nearest_rank(ranked, 0.5),
        "p99": nearest_rank(ranked, 0.99),
        "max": largest,
        "max_layer": next((layer for layer, of_layer in layers.items() if max(of_layer) == largest), None),
        "layers": {
            layer: {"max": max(of_layer), "mean": _sum(of_layer) / of_layer.total(), "count": of_layer.total()}
            for layer, of_layer in layers.items()
        },
    }


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError("no count")
    return value


def _sum(sizes: Counter[int]) -> int:
    return sum(size * times for size, times in sizes.items())


def _lookups(totals: Totals, **labels: str) -> Report:
    count = {outcome: _count(int(totals.total(c.LOOKUPS, outcome=outcome, **labels))) for outcome in c.OUTCOMES}
    routed = sum(count.values())
    misses = routed - count["hit"]
    predicted = count["miss_timing"] + count["miss_evicted"]
    return {
        "routed": routed,
        "hit": _ratio(count["hit"], routed),
        "miss": _ratio(misses, routed),
        "predicted": _ratio(predicted, misses),
        "unpredicted": _ratio(count["miss_unpredicted"], misses),
        "timing": _ratio(count["miss_timing"], predicted),
        "evicted": _ratio(count["miss_evicted"], predicted),
    }


def _pool_floor(unions: list[Report]) -> Report | None:
    if not unions:
        return None
    largest = max(unions, key=lambda union: int(union["max"]))
    return {"slots": largest["max"], "seq": largest["seq"], "layer": largest["max_layer"]}


def _segment(count: int, seconds: float, wall: float) -> Report:
    return {
        "seconds": seconds,
        "count": count,
        "mean_ms": _mean_ms(count, seconds),
        "wall_share": _ratio(seconds, wall),
    }


def _mean_ms(count: int, seconds: float) -> float | None:
    return seconds / count * 1e3 if count else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


# -- for people -----------------------------------------------------------------------------------------------


def lines(found: Report) -> list[str]:
    """A report as text, a line each; what nothing was recorded of is left out."""
    run = found["run"]
    text = [f"{run['model']} on {run['runtime']}, run {run['run']}, {found['wall_seconds']:.1f} s"]
    phases = [PhaseFigures(**found["phases"][phase]["figures"]) for phase in c.PHASES]
    if head := summary.told(phases, found["requests"], found["accepted"]):
        text += ["", *head]
    for phase, figures in found["phases"].items():
        told = [
            *_union_lines(figures["unions"]),
            *_lookup_lines(figures["lookups"]),
            *_prediction_lines(figures),
            *_segment_lines({**figures["prefetch"], **{f"  {key}": of for key, of in figures["promote"].items()}}),
        ]
        text += ["", phase, *told] if told else []
    if overall := _lookup_lines(found["overall"]):
        text += ["", "overall (both phases blended, as a profiling module's totals are: judge by the phases)", *overall]
    if floor := found["pool_floor"]:
        at = f"decode, seq {floor['seq']}, layer {floor['layer']}"
        text += ["", f"pool floor  {floor['slots']} slots a layer: the largest union ({at})"]
    if size := pool_size.lines(found["pool_size"]):
        text += ["", *size]
    return text


def _union_lines(unions: list[Report]) -> list[str]:
    if not unions:
        return []
    table = [f"  union  {'seq':>6} {'calls':>9} {'mean':>7} {'p50':>5} {'p99':>5} {'max':>5}  in layer"]
    table += [
        f"         {union['seq']:>6} {union['calls']:>9} {union['mean']:>7.2f} {union['p50']:>5} {union['p99']:>5} "
        f"{union['max']:>5}  {union['max_layer']}"
        for union in unions
    ]
    return table


def _lookup_lines(lookups: Report) -> list[str]:
    if not lookups["routed"]:
        return []
    text = [f"  lookups  {lookups['routed']}: hit {_percent(lookups['hit'])}, miss {_percent(lookups['miss'])}"]
    if lookups["miss"]:
        text.append(
            f"  misses   predicted (A) {_percent(lookups['predicted'])}, "
            f"not predicted (B) {_percent(lookups['unpredicted'])}"
        )
    if lookups["predicted"]:
        text.append(f"  of A     timing {_percent(lookups['timing'])}, evicted {_percent(lookups['evicted'])}")
    return text


def _prediction_lines(figures: Report) -> list[str]:
    text = []
    if figures["recall"] is not None:
        text.append(f"  recall   {_percent(figures['recall'])}")
    if figures["mean_routed"]:
        text.append(f"  routed   {figures['mean_routed']:.2f} experts a layer call")
    if figures["mean_window_ms"] is not None:
        text.append(f"  window   {figures['mean_window_ms']:.3f} ms")
    return text


def _segment_lines(segments: dict[str, Report]) -> list[str]:
    return [
        f"  {name:<9}{of['seconds']:.3f} s, {_percent(of['wall_share'])} of the wall time, mean {of['mean_ms']:.3f} ms"
        for name, of in segments.items()
        if of["count"]
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.2f} %"
