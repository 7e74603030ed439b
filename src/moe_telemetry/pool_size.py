"""How big should the pool be: a snapshot's curve (reuse.py), and what can be read from it."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

from . import catalog as c
from .figures import Snapshot, Totals
from .reuse import Curve, summed

Found = dict[str, Any]
SHOWN_STEPS = 2
"""Larger sizes that are told of."""
ALIKE = 0.01
"""By how much simulated and actual lookups may differ, as of calls whose residency was not told, to be compared."""


def pool_size(snapshot: Snapshot, totals: Totals) -> Found | None:
    """What pools of other sizes would have hit; None where nothing was simulated.

    Keys:
        `followed`, `layers`: how many layers were followed, and how many there are.
        `phases`: for each phase with lookups
            `lookups`; `hit_rates`: by slots a layer, the catalog's sizes up to the experts there are;
            `errors`: one standard error of each as the rate of all layers, by slots; empty where all were followed, or
            only one;
            `knee`: slots up to which a slot adds more than the average one: where the curve is farthest above the
            straight line from no slots to as many as experts;
            `actual`: hit rate of the pool that there is, in the layers that are followed; `simulated`: what an LRU pool
            of its size would have hit; `gain`: the first less the second. None where lookups were not recorded.
        `capacity`: slots of the smallest pool; `expert_bytes`: bytes a read, where reads were recorded, which is an
        expert's where each read is of one.
        `steps`: decode's hit rates at two sizes that follow each other, and the `bytes` that the second takes more.
        `safe`: slots that the largest union of any phase needs, which is the least that loads no layer in waves.
    """
    known = snapshot.get("pool_curve")
    if not known or not known["overall"]:
        return None
    curves = {
        layer: {phase: _curve(of) for phase, of in by_phase.items()} for layer, by_phase in known["layers"].items()
    }
    capacities = by_layer(snapshot, c.POOL_CAPACITY.name)
    reads, _ = totals.observed(c.READ_DURATION)
    nbytes = totals.total(c.READ_BYTES) / reads if reads else None
    number = len([layer for layer in capacities if layer]) or known["seen"]
    phases = {
        phase: _phase(snapshot, phase, curves, known["seen"], capacities)
        for phase in c.PHASES
        if phase in known["overall"]
    }
    if not phases:
        return None
    rates = phases.get("decode", {"hit_rates": {}})["hit_rates"]
    return {
        "followed": sum(1 for by_phase in curves.values() if by_phase),
        "layers": known["seen"],
        "phases": phases,
        "capacity": min(capacities.values(), default=None),
        "expert_bytes": nbytes,
        "steps": steps(rates, number, nbytes),
        "safe": max((size for phase in c.PHASES for size in totals.unions(phase)), default=None),
    }


def steps(rates: dict[str, float], layers: int, nbytes: float | None) -> list[Found]:
    """Hit rates by slots, two sizes at a time that follow each other: see `pool_size`."""
    return [
        {
            "slots": [int(first), int(second)],
            "hit_rates": [rates[first], rates[second]],
            "bytes": None if nbytes is None else (int(second) - int(first)) * layers * nbytes,
        }
        for first, second in pairwise(rates)
    ]


def told_steps(found: Found) -> list[Found]:
    """The next ones behind the size that there is, or without one behind decode's knee."""
    begin = found["capacity"] or found["phases"].get("decode", {}).get("knee") or 0
    return [step for step in found["steps"] if step["slots"][0] >= begin][:SHOWN_STEPS]


def shown_sizes(experts: int) -> list[int]:
    """The catalog's, up to the first one that holds them all."""
    return [*(size for size in c.POOL_SIZES if size < experts), *[size for size in c.POOL_SIZES if size >= experts][:1]]


def _curve(found: Found) -> Curve:
    return Curve(int(found["lookups"]), tuple(map(int, found["distances"])))


def by_layer(snapshot: Snapshot, metric: str, **labels: str) -> dict[str, int]:
    """Sums of a metric's series by layer, "" where the run has no such label."""
    sums: dict[str, int] = {}
    for series in snapshot["metrics"].get(metric, {"series": []})["series"]:
        if labels.items() <= series["labels"].items():
            layer = series["labels"].get("layer", "")
            sums[layer] = sums.get(layer, 0) + int(series["value"])
    return sums


def _phase(
    snapshot: Snapshot, phase: str, curves: dict[str, dict[str, Curve]], seen: int, capacities: dict[str, int]
) -> Found:
    of = {layer: by_phase[phase] for layer, by_phase in curves.items() if phase in by_phase}
    whole = summed(of.values())
    experts = len(whole.distances)
    sizes = shown_sizes(experts)
    hits = list(accumulate(whole.distances))
    actual = _actual(snapshot, phase, of)
    simulated = None
    if capacities and whole.lookups:
        slots = {layer: capacities.get(layer, capacities.get("")) for layer in of}
        if all(slots.values()):
            simulated = sum(curve.at(slots[layer] or 0) for layer, curve in of.items()) / whole.lookups
    return {
        "lookups": whole.lookups,
        "hit_rates": {str(size): whole.at(size) / whole.lookups for size in sizes},
        "errors": {str(size): error for size in sizes if (error := _error(of, size, seen)) is not None},
        "knee": max(
            range(1, experts + 1), key=lambda slots: hits[slots - 1] - hits[-1] * slots / experts, default=None
        ),
        "actual": actual,
        "simulated": None if actual is None else simulated,
        "gain": None if actual is None or simulated is None else actual - simulated,
    }


def _actual(snapshot: Snapshot, phase: str, of: dict[str, Curve]) -> float | None:
    """Hit rate in the layers that are followed, of all where the run has no label `layer`."""
    lookups = by_layer(snapshot, c.LOOKUPS.name, phase=phase)
    hits = by_layer(snapshot, c.LOOKUPS.name, phase=phase, outcome="hit")
    if "" in lookups:
        return hits.get("", 0) / lookups[""] if lookups[""] else None
    number = sum(lookups.get(layer, 0) for layer in of)
    simulated = sum(curve.lookups for curve in of.values())
    if not number or abs(number - simulated) > ALIKE * simulated:
        return None
    return sum(hits.get(layer, 0) for layer in of) / number


def _error(of: dict[str, Curve], slots: int, seen: int) -> float | None:
    """Of the mean of some layers, for that of all, were they drawn by chance."""
    rates = [curve.at(slots) / curve.lookups for curve in of.values()]
    number = len(rates)
    if number < 2 or number >= seen:
        return None
    mean = sum(rates) / number
    spread = sum((rate - mean) ** 2 for rate in rates) / (number - 1)
    return math.sqrt(spread / number * (1 - number / seen))


# -- for people -----------------------------------------------------------------------------------------------------


def lines(found: Found | None) -> list[str]:
    """The same as text, a line each."""
    if found is None:
        return []
    text = []
    for phase, of in found["phases"].items():
        which = "" if found["followed"] == found["layers"] else f" ({found['followed']} of {found['layers']} layers)"
        text += [
            f"pool size, {phase}: what an LRU pool without prefetch would have hit{which}",
            "  slots    " + "".join(f"{size:>8}" for size in of["hit_rates"]),
            "  hit rate " + "".join(f"{100 * rate:>6.1f} %" for rate in of["hit_rates"].values()),
            *_errors(of),
            *_told(found, of),
        ]
    text += _steps(found)
    if found["safe"]:
        text.append(f"  safe     {found['safe']} slots at least: the largest union of any pass")
    return text


def remarks(found: Found) -> list[str]:
    """What is told beside the curves."""
    of_phases = [
        f"{phase}: {' '.join(line.split())}" for phase, of in found["phases"].items() for line in _told(found, of)
    ]
    return [*of_phases, *(line.strip() for line in _steps(found))]


def _errors(of: Found) -> list[str]:
    if not of["errors"]:
        return []
    errors = [of["errors"].get(size) for size in of["hit_rates"]]
    return ["  +-       " + "".join(f"{100 * (error or 0):>6.1f} %" for error in errors) + "  (one standard error)"]


def _told(found: Found, of: Found) -> list[str]:
    text = []
    if of["gain"] is not None:
        text.append(
            f"  actual   {100 * of['actual']:.1f} % with {found['capacity']} slots, an LRU pool of them "
            f"{100 * of['simulated']:.1f} %: policy and prefetch earn {100 * of['gain']:+.1f} points"
        )
    if of["knee"] is not None:
        text.append(f"  knee     {of['knee']} slots: up to there a slot adds more than the average one")
    return text


def _steps(found: Found) -> list[str]:
    text = []
    for step in told_steps(found):
        (first, second), (before, behind) = step["slots"], step["hit_rates"]
        cost = "" if step["bytes"] is None else f", about {amount(step['bytes'])} more"
        text.append(f"  {first} -> {second} slots: decode hit rate {before:.2f} -> {behind:.2f}{cost}")
    return text


def amount(nbytes: float) -> str:
    """Bytes of memory, in powers of two: 1.4 GiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
