"""What the demo shows in a terminal: decode and prefill apart, the last seconds beside the whole run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console
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


_ROWS: tuple[tuple[str, Callable[[PhaseFigures], str]], ...] = (
    ("tokens", lambda f: _whole(f.tokens)),
    ("tok/s in forward passes", lambda f: _number(f.tokens_per_second)),
    ("hit rate", lambda f: _percent(f.hit_rate)),
    ("  miss A, timing", lambda f: _percent(f.timing)),
    ("  miss A, evicted", lambda f: _percent(f.evicted)),
    ("  miss B, unpredicted", lambda f: _percent(f.unpredicted)),
    ("recall of the predictor", lambda f: _percent(f.recall)),
    ("hits by reuse / by prefetch", lambda f: f"{_percent(f.reuse)} / {_percent(f.by_prefetch)}"),
    ("layer calls with all experts", lambda f: _percent(f.all_hit)),
    ("union p99 / max", lambda f: f"{_whole(f.union_p99)} / {_whole(f.union_max)}"),
    ("stall, ms a token", lambda f: "-" if f.stall is None else f"{1000 * f.stall:.2f}"),
)


def table(now: Snapshot, before: Snapshot | None, title: str, caption: str) -> Table:
    """Figures of the whole run and, with an earlier snapshot, of the time since then."""
    run = Totals(now)
    views = [(f"run {phase}", phase_figures(run, phase)) for phase in ("decode", "prefill")]
    if before is not None:
        recent = Totals(now, before)
        last = f"last {WINDOW_SECONDS:.0f} s "
        views = [(last + phase, phase_figures(recent, phase)) for phase in ("decode", "prefill")] + views
    found = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    found.add_column("")
    for name, _ in views:
        found.add_column(name, justify="right")
    for name, text in _ROWS:
        found.add_row(name, *(text(figures) for _, figures in views))
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
            f"union p99/max {_whole(f.union_p99)}/{_whole(f.union_max)}"
        )
    return f"{'; '.join(parts)}; {footer(now)}"


class View:
    """A live table on a terminal, lines elsewhere; refreshed by `tick` between two steps of the model."""

    def __init__(self, console: Console, snapshot: Callable[[], Snapshot], title: str, caption: str) -> None:
        self._console = console
        self._snapshot = snapshot
        self._title = title
        self._caption = caption
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
            shown = table(current, before, self._title, f"{footer(current)}\n{self._caption}")
            self._live.update(shown, refresh=True)
        else:
            self._console.print(line(current, before), soft_wrap=True)
