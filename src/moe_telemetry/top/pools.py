"""How big should the pool be: an endpoint's figures, as `report` has them from a snapshot, or what a scrape tells."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from moe_telemetry import catalog as c
from moe_telemetry.client import TIMEOUT_SECONDS, ClientError, get
from moe_telemetry.figures import Totals
from moe_telemetry.pool_size import ALIKE, Found, pool_size, steps
from moe_telemetry.reports import DAMAGE

from .scrape import Scrape
from .window import Window

SIZE_SECONDS = 30.0
"""Between two snapshots while their page is seen: one takes the watched process twice the time of a scrape, or less."""


@dataclass(frozen=True)
class Sized:
    """What a snapshot says of the run of that name (`pool_size`, None where nothing was simulated)."""

    found: Found | None
    run: str


def ask(base: str, seconds: float = TIMEOUT_SECONDS) -> Sized:
    """Read an endpoint's snapshot; ClientError says in a few words why there is none."""
    body = get(f"{base}/snapshot", "application/json", seconds)
    try:
        snapshot = json.loads(body)
        return Sized(pool_size(snapshot, Totals(snapshot)), str(snapshot["run"]["run"]))
    except DAMAGE:
        raise ClientError("its snapshot makes no sense") from None


def scraped(scrape: Scrape) -> Found | None:
    """The same of the run so far from a scrape, which has the catalog's sizes only, and no layers.

    `followed` and `knee` are None, and `errors` empty. `actual` is of all layers, `simulated` and `gain` only known
    where these are followed, with pools of one size of the catalog's.

    Raises:
        ArithmeticError, ValueError: its figures make no sense.
    """
    run = Window(scrape)
    capacities = scrape.values(c.POOL_CAPACITY)
    phases = {phase: of for phase in c.PHASES if (of := _phase(run, phase, set(capacities))) is not None}
    if not phases:
        return None
    reads, _ = run.observed(c.READ_DURATION)
    layers = sum(any(key == "layer" for key, _ in labels) for labels in scrape.named(c.POOL_CAPACITY))
    nbytes = run.total(c.READ_BYTES) / reads if reads else None
    largest = scrape.values(c.UNION_MAX)
    return {
        "followed": None,
        "layers": layers or None,
        "phases": phases,
        "capacity": int(min(capacities)) if capacities else None,
        "expert_bytes": nbytes,
        "steps": steps(phases.get("decode", {"hit_rates": {}})["hit_rates"], layers, nbytes if layers else None),
        "safe": int(max(largest)) if largest else None,
    }


def _phase(run: Window, phase: str, capacities: set[float]) -> Found | None:
    number = run.total(c.SIMULATED_LOOKUPS, phase=phase)
    if not number:
        return None
    hits = {slots: run.total(c.SIMULATED_HITS, phase=phase, slots=str(slots)) for slots in c.POOL_SIZES}
    if not all(map(math.isfinite, hits.values())):
        raise ValueError("no number of hits")
    first_best = min(slots for slots, found in hits.items() if found == max(hits.values()))
    rates = {str(slots): found / number for slots, found in hits.items() if slots <= first_best}
    lookups = run.total(c.LOOKUPS, phase=phase)
    actual = run.total(c.LOOKUPS, phase=phase, outcome="hit") / lookups if lookups else None
    simulated = None
    if actual is not None and len(capacities) == 1 and abs(lookups - number) <= ALIKE * number:
        (slots,) = capacities
        simulated = hits[int(slots)] / number if slots in hits else None
    return {
        "lookups": int(number),
        "hit_rates": rates,
        "errors": {},
        "knee": None,
        "actual": actual,
        "simulated": simulated,
        "gain": None if actual is None or simulated is None else actual - simulated,
    }
