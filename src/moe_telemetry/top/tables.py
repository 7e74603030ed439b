"""The pages that are tables, as lines: layers with their heat, and endpoints side by side."""

from __future__ import annotations

from collections.abc import Sequence

from .layers import ORDERS, LayerRow, Order
from .panes import status
from .watched import Watched
from .words import Line, Span, figure, known, number, percent, span

HEAT = " ░▒▓█"
"""More ink is more misses: none, to 5 %, to 15 %, to 30 %, above."""
HEAT_STEPS = (0.0, 0.05, 0.15, 0.30)
WIDTHS = {
    "layer": 6,
    "calls/s": 8,
    "hit": 8,
    "late": 6,
    "evicted": 8,
    "unpred": 7,
    "recall": 7,
    "all hit": 8,
    "union": 6,
    "max": 5,
    "evict/s": 8,
}
assert [order.name for order in ORDERS] == list(WIDTHS)


def heat(misses: float | None) -> int:
    """How hot a share of misses is: 0 to 4; 0 where it is not known."""
    return 0 if misses is None else sum(misses > step for step in HEAT_STEPS)


def layer_head(order: Order, reverse: bool) -> Line:
    """The columns' names; the one that rows are sorted by is marked."""
    mark = "▼" if order.falling != reverse else "▲"
    return [
        (f"{name + mark if name == order.name else name:>{width}}", "sorted" if name == order.name else "head")
        for name, width in WIDTHS.items()
    ]


def layer_line(row: LayerRow) -> Line:
    """A layer: shares in percent, a symbol of the same heat beside the hit rate, `!` behind a union above the pool."""
    misses = None if row.hit is None else 1 - row.hit
    level = heat(misses)
    cell = f"heat{level}" if misses is not None else "dim"
    over = row.above_pool
    return [
        (f"{row.layer:>6}", ""),
        (f"{number(row.calls):>8}", ""),
        (f"{percent(row.hit):>6} ", cell),
        (HEAT[level], cell),
        *((f"{percent(value):>{width}}", _hot(value)) for value, width in ((row.late, 6), (row.evicted, 8))),
        (f"{percent(row.unpredicted):>7}", _hot(row.unpredicted)),
        (f"{percent(row.recall):>7}", "dim" if row.recall is None else _hot(1 - row.recall, 0.5)),
        (f"{percent(row.all_hit):>8}", "" if row.all_hit is not None else "dim"),
        (f"{number(row.union):>6}", ""),
        (f"{'-' if row.largest is None else f'{row.largest:.0f}':>4}", "bad" if over else ""),
        ("!" if over else " ", "bad"),
        (f"{number(row.evictions):>8}", ""),
    ]


def _hot(share: float | None, cold: float = 0.0) -> str:
    """The style of a share of misses; up to `cold` it is none."""
    if share is None:
        return "dim"
    return f"heat{heat(share)}" if share > cold else ""


ENDPOINT_HEAD: Line = [
    (f"  {'endpoint':<22}{'state':<14}", "head"),
    (f"{'decode tok/s':>13}{'hit':>7}{'prefill tok/s':>14}{'hit':>7}", "head"),
]


def endpoint_line(watched: Watched, selected: bool, now: float) -> Line:
    """An endpoint among the others: its state in a word, and both phases; old figures stand in dim."""
    name = watched.name if len(watched.name) <= 21 else f"{watched.name[:10]}…{watched.name[-10:]}"
    line: Line = [(f"{'>' if selected else ' '} {name:<22}", "sorted" if selected else ""), _state(watched, now)]
    for phase, width in (("decode", 13), ("prefill", 14)):
        shown = watched.shown.get(phase)
        old = "" if watched.live and watched.idle(phase, now) is None else "dim"
        speed, hit = (None, None) if shown is None else (known(shown.figures.speed), known(shown.figures.hit))
        line += [(f"{number(speed):>{width}}", old), (f"{percent(hit):>6}{'%' if hit is not None else ' '}", old)]
    return line


def _state(watched: Watched, now: float) -> Span:
    if watched.live:
        return f"{'● live':<14}", "good"
    if watched.failure is None:
        return f"{'… waiting':<14}", "dim"
    if watched.failed_since is None or watched.last is None:
        return f"{'✗ unreachable':<14}", "bad"
    return f"{f'✗ gone {span(now - watched.failed_since)}':<14}", "bad"


def endpoint_detail(watched: Watched, now: float) -> list[Line]:
    """The selected endpoint: what runs there, and how its scrapes go."""
    words, style = status(watched, now)
    lines: list[Line] = [[(watched.url, "strong")], [(words, style)]]
    if watched.frame is None or watched.last is None:
        return lines
    run, age = watched.frame.run, watched.frame.age
    started = "" if age is None else f", started {span(max(0.0, age))} before"
    return [
        *lines,
        [(f"model {run.get('model', '')}, runtime {run.get('runtime', '')}", "")],
        [(f"run {run.get('run', '')}{started}, moe_telemetry {run.get('version', '')}", "")],
        [(f"scrape of {watched.last.size / 1000:.0f} kB in {watched.last.took * 1e3:.0f} ms", "")],
        [(f"runs that followed the first one while watched: {watched.restarts}", "")],
        [("draft tokens accepted ", ""), figure(watched.frame.accepted, f"{percent(known(watched.frame.accepted))}%")],
    ]


def endpoint_lines(all_: Sequence[Watched], selected: int, now: float) -> list[Line]:
    """The endpoints' page: all of them, then the selected one."""
    rows = [endpoint_line(each, number_ == selected, now) for number_, each in enumerate(all_)]
    return [ENDPOINT_HEAD, *rows, [], *endpoint_detail(all_[selected], now)]
