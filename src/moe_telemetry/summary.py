"""The figures of a run as a few lines of text, decode and prefill apart; also what the demo's table is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import catalog as c
from .figures import PhaseFigures, Totals, acceptance, phase_figures

Snapshot = dict[str, Any]
NONE = "-"


def percent(value: float | None) -> str:
    """A share."""
    return NONE if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """A figure with one decimal."""
    return NONE if value is None else f"{value:,.1f}"


def whole(value: int | None) -> str:
    """A count."""
    return NONE if value is None else f"{value:,}"


def pair(first: float | None, second: float | None) -> str:
    """Two shares of one whole."""
    return NONE if first is None or second is None else f"{100 * first:.0f} / {100 * second:.0f}%"


ROWS: tuple[tuple[str, Callable[[PhaseFigures], str]], ...] = (
    ("tokens", lambda f: whole(f.tokens)),
    ("tok/s in forward passes", lambda f: number(f.tokens_per_second)),
    ("hit rate of lookups", lambda f: percent(f.hit_rate)),
    (" A: late (timing)", lambda f: percent(f.timing)),
    (" A: evicted again", lambda f: percent(f.evicted)),
    (" B: never predicted", lambda f: percent(f.unpredicted)),
    ("recall of the predictor", lambda f: percent(f.recall)),
    ("hits: reuse / prefetch", lambda f: pair(f.reuse, f.by_prefetch)),
    ("layer calls that all hit", lambda f: percent(f.all_hit)),
    ("union: p99 / max", lambda f: NONE if f.union_max is None else f"{f.union_p99} / {f.union_max}"),
    ("stall, ms a token", lambda f: NONE if f.stall is None else f"{1000 * f.stall:.2f}"),
)
"""What is told of a phase: words, and the figure as text."""


def lines(snapshot: Snapshot) -> list[str]:
    """A snapshot's figures, a line each; what nothing was recorded of is left out, so there may be none."""
    totals = Totals(snapshot)
    return told([phase_figures(totals, phase) for phase in c.PHASES], requests(totals), acceptance(totals))


def told(phases: list[PhaseFigures], requested: dict[str, float | None], accepted: float | None) -> list[str]:
    """The same of figures that are known: of the phases in the catalog's order, see `requests`, and of drafts."""
    rows = [(name, [of(figures) for figures in phases]) for name, of in ROWS]
    table = [
        f"{name:<26}{''.join(f'{text:>14}' for text in texts)}"
        for name, texts in rows
        if any(text not in (NONE, "0", "0.00") for text in texts)
    ]
    heading = f"{'':<26}{''.join(f'{phase:>14}' for phase in c.PHASES)}"
    return [*([heading, *table] if table else []), *_requests(requested), *_speculation(accepted)]


def requests(totals: Totals) -> dict[str, float | None]:
    """`count`, and the means in seconds: `duration`, `first_token`, `output_token`; None where nothing was observed."""
    found: dict[str, float | None] = {"count": totals.observed(c.REQUEST_DURATION)[0]}
    means = (("duration", c.REQUEST_DURATION), ("first_token", c.TTFT), ("output_token", c.TPOT))
    for name, metric in means:
        count, seconds = totals.observed(metric)
        found[name] = seconds / count if count else None
    return found


def _requests(found: dict[str, float | None]) -> list[str]:
    if not found["count"]:
        return []
    number = int(found["count"])
    words = [f"{whole(number)} request{'s' * (number > 1)} of {found['duration'] or 0.0:.2f} s"]
    for key, of in (("first_token", "to the first token"), ("output_token", "an output token")):
        if (mean := found[key]) is not None:
            words.append(f"{1000 * mean:,.1f} ms {of}")
    return [f"{', '.join(words)}{' (means)' * (number > 1)}"]


def _speculation(accepted: float | None) -> list[str]:
    return [] if accepted is None else [f"draft tokens accepted {percent(accepted)}"]
