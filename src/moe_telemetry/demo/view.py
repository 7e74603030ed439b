"""What the demo shows in a terminal: decode and prefill apart, the last seconds beside the whole run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from moe_telemetry.figures import PhaseFigures, Totals, acceptance, phase_figures, smallest_pool

WINDOW_SECONDS = 10.0
REFRESH_SECONDS = 0.5
LINE_SECONDS = 5.0
"""Seconds between lines where the output is no terminal."""

Snapshot = dict[str, Any]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _pair(first: float | None, second: float | None) -> str:
    return "-" if first is None or second is None else f"{100 * first:.0f} / {100 * second:.0f}%"


_ROWS: tuple[tuple[str, Callable[[PhaseFigures], str]], ...] = (
    ("tokens", lambda f: _whole(f.tokens)),
    ("tok/s in forward passes", lambda f: _number(f.tokens_per_second)),
    ("hit rate of lookups", lambda f: _percent(f.hit_rate)),
    (" A: late (timing)", lambda f: _percent(f.timing)),
    (" A: evicted again", lambda f: _percent(f.evicted)),
    (" B: never predicted", lambda f: _percent(f.unpredicted)),
    ("recall of the predictor", lambda f: _percent(f.recall)),
    ("hits: reuse / prefetch", lambda f: _pair(f.reuse, f.by_prefetch)),
    ("layer calls that all hit", lambda f: _percent(f.all_hit)),
    ("union: p99 / max", lambda f: "-" if f.union_max is None else f"{f.union_p99} / {f.union_max}"),
    ("stall, ms a token", lambda f: "-" if f.stall is None else f"{1000 * f.stall:.2f}"),
)


def table(now: Snapshot, before: Snapshot | None, title: str) -> Table:
    """Figures of the whole run and, with an earlier snapshot, of the time since then; 79 columns, 18 lines."""
    run = Totals(now)
    recent = Totals(now, before) if before is not None else None
    found = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 1))
    found.add_column("", no_wrap=True)
    views = []
    for phase in ("decode", "prefill"):
        for words, totals in ((f"last {WINDOW_SECONDS:.0f} s", recent), ("run", run)):
            if totals is not None:
                found.add_column(f"{phase}\n{words}", justify="right", no_wrap=True)
                views.append(phase_figures(totals, phase))
    for name, text in _ROWS:
        found.add_row(name, *(text(figures) for figures in views))
    return found


def footer(now: Snapshot) -> str:
    """The figures that belong to no phase."""
    run = Totals(now)
    return f"pool {_whole(smallest_pool(run))} slots a layer, draft tokens accepted {_percent(acceptance(run))}"


def line(now: Snapshot, before: Snapshot | None) -> str:
    """One line for logs: the phases since the earlier snapshot."""
    totals = Totals(now, before)
    parts = []
    for phase in ("decode", "prefill"):
        f = phase_figures(totals, phase)
        parts.append(
            f"{phase}: {_number(f.tokens_per_second)} tok/s, hit {_percent(f.hit_rate)}, recall {_percent(f.recall)}, "
            f"A timing {_percent(f.timing)}, A evicted {_percent(f.evicted)}, B {_percent(f.unpredicted)}, "
            f"reuse/prefetch {_pair(f.reuse, f.by_prefetch)}, "
            f"union p99/max {_whole(f.union_p99)}/{_whole(f.union_max)}"
        )
    return f"{'; '.join(parts)}; {footer(now)}"


class View:
    """A live table on a terminal, lines elsewhere; refreshed by `tick` between two steps of the model.

    `notice` is asked at each refresh for what is going on besides ("" for nothing), and a change of it is told.
    """

    def __init__(
        self, console: Console, snapshot: Callable[[], Snapshot], title: str, notice: Callable[[], str]
    ) -> None:
        self._console = console
        self._snapshot = snapshot
        self._title = title
        self._notice = notice
        self._noticed = ""
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._every = REFRESH_SECONDS if self._live else LINE_SECONDS
        self._next = time.monotonic() + self._every
        self._taken: deque[tuple[float, Snapshot]] = deque()

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        """Refresh when it is time."""
        self._tell_changes()
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        current = self._snapshot()
        while self._taken and self._taken[0][0] < now - WINDOW_SECONDS:
            self._taken.popleft()
        before = self._taken[0][1] if self._taken else None
        self._taken.append((now, current))
        if self._live:
            heading = "\n".join(filter(None, (self._title, self._noticed)))
            self._live.update(Group(table(current, before, heading), footer(current)), refresh=True)
        else:
            self._console.print(line(current, before), soft_wrap=True)

    def _tell_changes(self) -> None:
        notice = self._notice()
        if notice != self._noticed:
            self._noticed = notice
            self._console.print(notice or "The fault is over.", soft_wrap=True)
