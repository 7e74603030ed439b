"""Reports and comparisons as Markdown, for pasting into an issue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import catalog as c
from . import policy_report, pool_size, summary
from .comparison import PARTS, Comparison, alike, amount, change, differing, named, verdict
from .figures import PhaseFigures
from .reports import Report
from .terminal import printable

UNION_KEYS = ("p50", "p99", "max", "max_layer")


def report_lines(found: Report) -> list[str]:
    """A report: the summary of both phases, unions, segments, and the pool's floor."""
    run = found["run"]
    names = " ".join(code(run[key]) for key in ("model", "runtime", "run"))
    text = [f"{names}, {found['wall_seconds']:.1f} s, moe_telemetry {code(run['version'])}", ""]
    phases = [PhaseFigures(**found["phases"][phase]["figures"]) for phase in c.PHASES]
    rows = [(name, [of(figures) for figures in phases]) for name, of in summary.ROWS]
    told = [(name.strip(), *texts) for name, texts in rows if any(text != summary.NONE for text in texts)]
    text += table(("", *c.PHASES), told)
    if found["accepted"] is not None:
        text += ["", f"Draft tokens accepted: {found['accepted']:.1%}"]
    unions = [
        (phase, union["seq"], str(union["calls"]), f"{union['mean']:.2f}", *(str(union[key]) for key in UNION_KEYS))
        for phase in c.PHASES
        for union in found["phases"][phase]["unions"]
    ]
    if unions:
        text += ["", *table(("unions", "seq", "calls", "mean", "p50", "p99", "max", "in layer"), unions)]
    segments = [
        (phase, name, f"{of['seconds']:.3f}", f"{100 * of['wall_share']:.2f} %", f"{of['mean_ms']:.3f}")
        for phase in c.PHASES
        for part in ("prefetch", "promote")
        for name, of in found["phases"][phase][part].items()
        if of["count"] and of["wall_share"] is not None
    ]
    if segments:
        text += ["", *table(("host time", "segment", "seconds", "of the wall time", "mean, ms"), segments)]
    if floor := found["pool_floor"]:
        at = f"decode, seq {floor['seq']}, layer {floor['layer']}"
        text += ["", f"Pool floor: {floor['slots']} slots a layer, the largest union ({at})"]
    if size := found["pool_size"]:
        text += ["", *_pool_size(size)]
    return text


def _pool_size(found: Report) -> list[str]:
    sizes = sorted({slots for of in found["phases"].values() for slots in of["hit_rates"]}, key=int)
    rows: list[tuple[str, ...]] = []
    for phase, of in found["phases"].items():
        rates = [of["hit_rates"].get(slots) for slots in sizes]
        rows.append((phase, *("" if rate is None else f"{100 * rate:.1f} %" for rate in rates)))
    head = ("simulated hit rate by slots (LRU, no prefetch)", *sizes)
    return [*table(head, rows), "", *(f"- {remark}" for remark in pool_size.remarks(found))]


def policy_lines(found: Report) -> list[str]:
    """Hit rates of eviction policies on a trace."""
    run = found["run"]
    text = [f"Routing trace of {' '.join(code(run.get(key)) for key in ('model', 'runtime', 'run'))}"]
    for phase, of in found["phases"].items():
        rates = of["hit_rates"]
        rows = [
            (words, *(f"{100 * rate:.1f} %" for rate in rates[policy].values()))
            for policy, words in policy_report.POLICIES.items()
        ]
        text += ["", *table((f"{phase}, hit rate by slots (no prefetch)", *rates["lru"]), rows)]
    return [*text, "", *(f"- {remark}" for remark in policy_report.remarks(found))]


def comparison_lines(found: Comparison, first: str, second: str) -> list[str]:
    """A comparison; `first` and `second` say what A and B are."""
    text = [f"- A: {code(first)}", f"- B: {code(second)}"]
    if found.setup:
        text += ["", *table(("set up differently", "A", "B"), [tuple(map(cell, row)) for row in found.setup])]
    for part, words in PARTS.items():
        if told := differing(found.parts[part]):
            rows = [
                (
                    named(each.figure),
                    amount(each.figure, each.first),
                    amount(each.figure, each.second),
                    change(each),
                    verdict(each),
                )
                for each in told
            ]
            text += ["", *table((words, "A", "B", "B against A", ""), rows)]
        if same := alike(found.parts[part]):
            text += ["", f"Alike, {words}: {', '.join(each.figure.name for each in same)}."]
    return [*text, *(f"\n{note}." for note in found.notes)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table whose first column is words and whose others are figures."""
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def cell(text: str) -> str:
    """Text of others, such as a model's name, in a table's cell; what is a figure stays as it is."""
    return text if all(char.isalnum() or char in " ,.-" for char in text) else code(text)


def code(text: Any) -> str:
    """Text of others, shown as it is: no line, cell or markup of ours ends in it."""
    shown = printable(str(text))
    return f"`{shown.replace('`', chr(39)).replace('|', '¦') or ' '}`"
