"""What eviction is worth: hit rates of LRU, LFU and the optimum on a trace's routing (policies.py), told.

Not of the actual pool, which may prefetch: its hit rate is the snapshot's.
"""

from __future__ import annotations

from typing import Any

from . import catalog as c
from . import policies, pool_size
from .figures import Snapshot
from .routing_trace import REASONS
from .trace_reader import LayerCalls, RecordedRun

Found = dict[str, Any]
POLICIES = {"lru": "LRU", "lfu": "LFU", "optimum": "optimum"}


def policy_report(recorded: RecordedRun, snapshot: Snapshot | None = None) -> Found:
    """Hit rates of pools with each policy, as plain data. A snapshot of the run tells the pools' capacities.

    Keys:
        `run`: with which the trace begins; `runs` in the file; `ended`: the run has its end there; `layers_seen`: how
        many layers the run had, followed or not, None where it has no end.
        `calls`: in the trace; `left_out`: those behind them that are not, and `why`; `unreadable` lines.
        `capacity`: slots of the smallest pool, None where no snapshot tells.
        `layers`: by layer and phase `lookups`, and `hits` by policy and slots.
        `phases`: for each phase with lookups `lookups`; `hit_rates` by policy and slots; `at`: `slots`, and the hit
        rate of each policy with as many: those that the pools have, each layer's its own, or else those where the
        optimum is most above LRU; `earns`: by how much it is, which is what no eviction policy can surpass; `whole`:
        lookups of the snapshot, where there are more or fewer in it.
    """
    capacities = {} if snapshot is None else pool_size.by_layer(snapshot, c.POOL_CAPACITY.name)
    sizes = pool_size.shown_sizes(max((len(calls.ids) for calls in recorded.layers.values()), default=0))
    own = {layer: capacities.get(str(layer), capacities.get("")) for layer in recorded.layers}
    layers = {
        layer: _layer(calls, sorted({*sizes, *filter(None, [own[layer]])}))
        for layer, calls in sorted(recorded.layers.items())
    }
    end = recorded.end or {}
    phases = {
        phase: _phase([(of[phase], own[layer]) for layer, of in layers.items() if phase in of])
        for phase in c.PHASES
        if any(phase in of for of in layers.values())
    }
    simulated = ((snapshot or {}).get("pool_curve") or {}).get("overall", {})
    for phase, of in phases.items():
        whole = simulated.get(phase, {}).get("lookups")
        of["whole"] = None if whole == of["lookups"] else whole
    return {
        "run": recorded.run,
        "runs": recorded.runs,
        "ended": recorded.end is not None,
        "layers_seen": end.get("layers"),
        "calls": sum(len(calls.ends) for calls in recorded.layers.values()),
        "left_out": int(end.get("left_out", 0)),
        "why": REASONS.get(end.get("why") or ""),
        "unreadable": recorded.unreadable,
        "capacity": min((slots for slots in own.values() if slots), default=None),
        "phases": phases,
        "layers": {str(layer): of for layer, of in layers.items()},
    }


def _layer(calls: LayerCalls, sizes: list[int]) -> Found:
    curves = {"lru": policies.lru(calls), "lfu": policies.lfu(calls), "optimum": policies.optimum(calls)}
    return {
        phase: {
            "lookups": curves["lru"][place].lookups,
            "hits": {policy: {str(slots): of[place].at(slots) for slots in sizes} for policy, of in curves.items()},
        }
        for place, phase in enumerate(c.PHASES)
        if curves["lru"][place].lookups
    }


def _phase(layers: list[tuple[Found, int | None]]) -> Found:
    """The sums of some layers, each with its pool's capacity, as rates."""
    lookups = sum(of["lookups"] for of, _ in layers)
    shared = set.intersection(*(set(of["hits"]["lru"]) for of, _ in layers))
    rates = {
        policy: {
            slots: sum(of["hits"][policy][slots] for of, _ in layers) / lookups for slots in sorted(shared, key=int)
        }
        for policy in POLICIES
    }
    at: Found
    if all(slots for _, slots in layers):
        at = {"slots": min(slots or 0 for _, slots in layers)}
        at |= {policy: sum(of["hits"][policy][str(slots)] for of, slots in layers) / lookups for policy in POLICIES}
    else:
        widest = max(rates["lru"], key=lambda slots: rates["optimum"][slots] - rates["lru"][slots])
        at = {"slots": int(widest), **{policy: rates[policy][widest] for policy in POLICIES}}
    return {"lookups": lookups, "hit_rates": rates, "at": at, "earns": at["optimum"] - at["lru"]}


# -- for people -----------------------------------------------------------------------------------------------------


def heading(found: Found) -> str:
    """Of which run, where no snapshot tells."""
    run = found["run"]
    return f"{run.get('model')} on {run.get('runtime')}, run {run.get('run')}, from its routing trace"


def lines(found: Found) -> list[str]:
    """The same as text, a line each."""
    text = []
    for phase, of in found["phases"].items():
        sizes = of["hit_rates"]["lru"]
        text += [
            f"eviction, {phase}: what pools without prefetch would have hit ({_which(found, of)})",
            "  slots    " + "".join(f"{size:>8}" for size in sizes),
            *(
                f"  {words:<9}" + "".join(f"{100 * rate:>6.1f} %" for rate in of["hit_rates"][policy].values())
                for policy, words in POLICIES.items()
            ),
            f"  {_earns(found, of)}",
        ]
    return text + [f"  {note}" for note in notes(found)]


def remarks(found: Found) -> list[str]:
    """What is told beside the rates."""
    return [*(f"{phase}: {_earns(found, of)}" for phase, of in found["phases"].items()), *notes(found)]


def notes(found: Found) -> list[str]:
    """What the trace lacks."""
    text = []
    if found["runs"] > 1:
        text.append(f"the file has {found['runs']} runs, this is one of them")
    if not found["ended"]:
        text.append("the run has no end in the trace: it goes on, or was killed")
    if found["unreadable"]:
        text.append(f"lines of the trace that could not be read: {found['unreadable']}")
    if found["left_out"]:
        text.append(f"not in the trace: {found['left_out']:,} calls at the end of the run ({found['why']})")
    text += [
        f"{phase}: the trace has {of['lookups']:,} lookups, the snapshot {of['whole']:,}"
        for phase, of in found["phases"].items()
        if of["whole"] is not None
    ]
    return text


def _which(found: Found, of: Found) -> str:
    number, seen = len(found["layers"]), found["layers_seen"]
    share = "" if seen in (None, number) else f" of {seen}"
    return f"{number}{share} layers, {of['lookups']:,} lookups"


def _earns(found: Found, of: Found) -> str:
    at = of["at"]
    rates = ", ".join(f"{words} {100 * at[policy]:.1f} %" for policy, words in POLICIES.items())
    where = f"with {at['slots']} slots" if found["capacity"] else f"widest with {at['slots']} slots"
    return f"{where}: {rates}: no eviction policy earns more than {100 * of['earns']:.1f} points over LRU"
