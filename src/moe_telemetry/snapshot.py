"""Exact totals as plain, JSON-serialisable data: what `/snapshot`, `tel.snapshot()` and reports are made of."""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import series
from .catalog import PHASES, RUN_INFO
from .reuse import Curve, PoolCurves, curve_of, summed
from .series import Distribution, Family
from .store import Store

SCHEMA = 1
"""Raised when a reader of an older snapshot would misread a newer one."""


def build(store: Store, families: list[Family]) -> dict[str, Any]:
    """A snapshot.

    Keys: `schema`; `run` (model, runtime, run, version, start_time in Unix seconds); `time` (ISO 8601, UTC);
    `metrics`: by OpenTelemetry name `kind`, `unit`, `bounds` (histograms) and `series`, each with `labels` and
    `value`, or `count`, `sum` and `buckets` (not cumulative, the last one above the top bound); `unions`: exact,
    by phase and tokens per sequence ("<=64" where many lengths share their cells), `layers` -> layer -> union size
    -> layer calls, and `rest` where a broken caller's sizes outgrew the exact table; `experts`: where routing is
    reduced on the device, by layer the tokens routed to each expert id in the whole run; `pool_curve`: what pools of
    other sizes would have hit (`_pool_curve`), None where it is off.
    """
    identity = store.identity
    return {
        "schema": SCHEMA,
        "time": datetime.now(timezone.utc).isoformat(),
        "run": {
            "model": identity.model,
            "runtime": identity.runtime,
            "run": identity.run,
            "version": identity.version,
            "start_time": identity.start_time,
        },
        "metrics": {family.metric.name: _family(family) for family in [*families, run_info(store)]},
        "unions": {
            phase: {seq: _unions(found) for seq, found in by_seq.items()}
            for phase, by_seq in series.unions(store).items()
        },
        "pool_curve": _pool_curve(store.curves),
        "experts": {layer.label: layer.load.tokens for layer in store.layers.copy().values() if layer.load is not None},
    }


def encoded(snapshot: dict[str, Any]) -> bytes:
    """A snapshot as JSON, made part by part: the encoder would keep the interpreter lock from a decode step."""
    return _encoded(snapshot, depth=3).encode()


def _encoded(value: Any, depth: int) -> str:
    if not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, list) or depth == 0:
        time.sleep(0)
        return json.dumps(value)
    return "{" + ", ".join(f"{json.dumps(key)}: {_encoded(part, depth - 1)}" for key, part in value.items()) + "}"


def write(path: Path, snapshot: dict[str, Any]) -> None:
    """Write a snapshot as JSON: whoever reads the file finds the one before or the whole new one. OSError if it cannot.

    Whole on disk before it has the name, so that a machine that goes down leaves no empty file.
    """
    beside = path.with_name(f".{path.name[:64]}.{secrets.token_hex(4)}")
    try:
        with beside.open("x", encoding="utf-8") as file:  # "x" follows no link that somebody else has left there
            json.dump(snapshot, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def run_info(store: Store) -> Family:
    """The run info as a family: the one that comes from no cell."""
    identity = store.identity
    return Family(RUN_INFO, {(identity.model, identity.run, identity.runtime, identity.version): 1})


def _pool_curve(curves: PoolCurves) -> dict[str, Any] | None:
    """Exact curves of the layers that are followed (see reuse.py).

    Keys: `layers`: by layer and phase `lookups`, and `distances`, of which the first n sum to the hits of a pool of n
    slots; `overall`: by phase their sums; `seen`: how many layers there are, followed or not; `left_out`: calls of a
    layer that had too many experts, or that came behind one with an id that is none; `lost`: calls not simulated;
    `trace`, where there is one: `calls` in it so far, and `left_out`, those that found no room or no disk.
    """
    if curves.mode == "off":
        return None
    curves.collect()
    layers: dict[str, dict[str, Any]] = {}
    of_phases: dict[str, list[Curve]] = {phase: [] for phase in PHASES}
    for index, stack in curves.followed():
        time.sleep(0)
        found = {phase: curve for phase, feed in stack.feeds.items() if (curve := curve_of(feed)).lookups}
        layers[str(index)] = {phase: _curve(curve) for phase, curve in found.items()}
        for phase, curve in found.items():
            of_phases[phase].append(curve)
    return {
        "seen": curves.seen,
        "layers": layers,
        "overall": {phase: _curve(summed(of_phase)) for phase, of_phase in of_phases.items() if of_phase},
        "left_out": {str(index): stack.left_out for index, stack in curves.followed() if stack.left_out},
        "lost": curves.lost,
        **({} if (trace := curves.trace) is None else {"trace": {"calls": trace.calls, "left_out": trace.left_out}}),
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {"lookups": curve.lookups, "distances": list(curve.distances)}


def _family(family: Family) -> dict[str, Any]:
    time.sleep(0)  # as the exposition does: others shall not wait for all of them
    metric = family.metric
    found: dict[str, Any] = {"kind": metric.kind.value, "unit": metric.unit}
    if metric.bounds:
        found["bounds"] = list(metric.bounds)
    found["series"] = [
        {"labels": dict(zip(metric.keys, values, strict=True)), **_value(value)}
        for values, value in family.series.items()
    ]
    return found


def _value(value: series.Value) -> dict[str, Any]:
    if isinstance(value, Distribution):
        return {"count": value.count, "sum": value.sum, "buckets": list(value.counts)}
    return {"value": value}


def _unions(found: series.Unions) -> dict[str, Any]:
    layers = {layer: {str(size): times for size, times in sizes.items()} for layer, sizes in found.layers.items()}
    if not found.rest[0]:
        return {"layers": layers}
    return {"layers": layers, "rest": dict(zip(("count", "sum", "max"), found.rest, strict=True))}
