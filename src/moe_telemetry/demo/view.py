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

from moe_telemetry.figures import Totals, acceptance, phase_figures, smallest_pool
from moe_telemetry.summary import ROWS, number, pair, percent, whole

WINDOW_SECONDS = 10.0
REFRESH_SECONDS = 0.5
LINE_SECONDS = 5.0
"""Seconds between lines where the output is no terminal."""

Snapshot = dict[str, Any]


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
    for name, text in ROWS:
        found.add_row(name, *(text(figures) for figures in views))
    return found


def footer(now: Snapshot) -> str:
    """The figures that belong to no phase."""
    run = Totals(now)
    return f"pool {whole(smallest_pool(run))} slots a layer, draft tokens accepted {percent(acceptance(run))}"


def line(now: Snapshot, before: Snapshot | None) -> str:
    """One line for logs: the phases since the earlier snapshot."""
    totals = Totals(now, before)
    parts = []
    for phase in ("decode", "prefill"):
        f = phase_figures(totals, phase)
        parts.append(
            f"{phase}: {number(f.tokens_per_second)} tok/s, hit {percent(f.hit_rate)}, recall {percent(f.recall)}, "
            f"A timing {percent(f.timing)}, A evicted {percent(f.evicted)}, B {percent(f.unpredicted)}, "
            f"reuse/prefetch {pair(f.reuse, f.by_prefetch)}, "
            f"union p99/max {whole(f.union_p99)}/{whole(f.union_max)}"
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
