"""Textual widgets of the pages: lines of styled words, trends, and the overview of a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from moe_telemetry.terminal import printable

from . import panes, pool_lines, tables
from .history import SHARES, TRACKED, bars
from .layers import ORDERS, ordered
from .watched import Watched
from .words import Line, plain

STYLES = {
    "good": "$success",
    "warn": "$warning",
    "bad": "bold $error",
    "dim": "dim",
    "head": "bold dim",
    "strong": "bold",
    "sorted": "bold $accent",
    "hit": "$success",
    "late": "$warning",
    "evicted": "$error",
    "unpredicted": "$accent",
    "heat0": "$success",
    "heat1": "",
    "heat2": "$warning",
    "heat3": "$error",
    "heat4": "bold $error",
}

FIGURE_WIDTH = 17
"""Columns of a tracked figure beside its trend, as in top.tcss."""


def content(lines: Iterable[Line]) -> Content:
    """Lines as Textual shows them."""
    parts: list[str | tuple[str, str]] = []
    for line in lines:
        for words, style in line:
            name = STYLES.get(style, "")
            parts.append((printable(words), name) if name else printable(words))
        parts.append("\n")
    return Content.assemble(*parts[:-1]) if parts else Content("")


class Lines(Static):
    """Lines of styled words in a place whose size does not depend on them."""

    _shown: tuple[Line, ...] | None = None

    def show_lines(self, *lines: Line, layout: bool = False) -> None:
        """Draw these, where they are new; a layout of the whole screen is costly, so it is asked for where needed."""
        if lines != self._shown or layout:
            self._shown = lines
            self.update(content(lines), layout=layout)


class Trend(Widget):
    """A sparkline of the last ten minutes in which a time without a figure is a gap.

    Textual's own knows no gaps, and stretches whatever little a line varies over its whole height.
    """

    def __init__(self, top: float | None) -> None:
        super().__init__()
        self._top = top
        self._columns: Callable[[int], list[float | None]] = lambda width: []
        self._drawn = ""

    def show(self, columns: Callable[[int], list[float | None]]) -> None:
        """Draw these columns, which are asked for by their number."""
        self._columns = columns
        if self._bars() != self._drawn:
            self.refresh()

    def _bars(self) -> str:
        return bars(self._columns(self.size.width), self._top)

    def render(self) -> Content:
        """The bars."""
        self._drawn = self._bars()
        return Content(self._drawn)


class PhasePane(Vertical):
    """The overview of one phase."""

    def __init__(self, phase: str) -> None:
        super().__init__(classes="pane", id=phase)
        self.phase = phase
        self._head = Lines(classes="line")
        self._figures = [Lines(classes="figure") for _ in TRACKED]
        self._trends = [Trend(1.0 if field in SHARES else None) for field in TRACKED]
        self._detail = Lines(classes="rest")

    def compose(self) -> ComposeResult:
        """The head, a line a tracked figure with its trend, and the rest."""
        yield self._head
        for figure, trend in zip(self._figures, self._trends, strict=True):
            yield Horizontal(figure, trend, classes="line tracked")
        yield self._detail

    def show(self, watched: Watched, now: float) -> None:
        """The endpoint's latest figures of the phase."""
        shown = watched.shown.get(self.phase)
        self.set_class(not watched.live or watched.idle(self.phase, now) is not None, "old")
        if shown is None or watched.frame is None:
            self._head.show_lines([(self.phase.upper(), "strong"), ("  - no figures yet", "dim")])
            for lines in (*self._figures, self._detail):  # those of the endpoint that was shown before
                lines.show_lines()
            for trend in self._trends:
                trend.show(lambda width: [])
            return
        of = shown.figures
        activity = panes.activity(of, watched.idle(self.phase, now))
        self._head.show_lines([(f"{self.phase.upper():<9}", "strong"), activity])
        for shown_figure, line in zip(self._figures, panes.tracked(of), strict=True):
            shown_figure.show_lines(line)
            if shown_figure.parent is not None:  # a word why there is no figure takes the place of the trend
                shown_figure.parent.set_class(len(plain(line)) > FIGURE_WIDTH, "worded")
        for trend, field in zip(self._trends, TRACKED, strict=True):
            trend.show(partial(watched.history.columns, self.phase, field, now))
        spare = max(0, self.size.height - 1 - len(TRACKED) - panes.DETAIL_LINES)
        width = max(panes.PANE_WIDTH, self.size.width)
        self._detail.show_lines(*panes.detail(of, watched.frame.pool, width, panes.UNION_ROWS + spare))


class LayersPage(Vertical):
    """The layers of one phase."""

    def __init__(self) -> None:
        super().__init__(id="layers")
        self.phase = "decode"
        self.order = ORDERS[0]
        self.reverse = False
        self._title = Lines(classes="line")
        self._head = Lines(classes="line")
        self._rows = Lines()
        self._count = 0

    def compose(self) -> ComposeResult:
        """Title and head stay, rows scroll."""
        yield self._title
        yield self._head
        yield VerticalScroll(self._rows, id="rows")

    def sort(self, step: int) -> None:
        """By the next column, or the one before."""
        self.order = ORDERS[(ORDERS.index(self.order) + step) % len(ORDERS)]

    def show(self, watched: Watched, now: float) -> None:
        """The endpoint's layers."""
        shown = watched.shown.get(self.phase)
        rows = shown.figures.layers if shown is not None else ()
        idle = watched.idle(self.phase, now)
        self.set_class(not watched.live or idle is not None, "old")
        title: Line = [(f"{self.phase.upper()}, {len(rows)} layers, by {self._sorting()}", "strong")]
        if shown is not None:
            title += [("  ", ""), panes.activity(shown.figures, idle)]
        self._title.show_lines(title)
        self._head.show_lines(tables.layer_head(self.order, self.reverse))
        if rows:
            lines = [tables.layer_line(row) for row in ordered(rows, self.order, self.reverse)]
        elif watched.frame is not None and watched.frame.layers_off:
            lines = [[('- the endpoint\'s series have no layers: start(layers="off"), or none was called yet', "dim")]]
        else:
            lines = [[("- no layers yet", "dim")]]
        self._rows.show_lines(*lines, layout=len(lines) != self._count)
        self._count = len(lines)

    def _sorting(self) -> str:
        if self.order is ORDERS[0]:
            return "layer, last first" if self.reverse else "layer"
        return f"{self.order.name}, {'best' if self.reverse else 'worst'} first"


class PoolPage(VerticalScroll):
    """What pools of other sizes would have hit."""

    def __init__(self) -> None:
        super().__init__(id="pool")
        self._lines = Lines()
        self._count = 0

    def compose(self) -> ComposeResult:
        """One block of lines."""
        yield self._lines

    def show(self, watched: Watched, now: float) -> None:
        """The endpoint's curve."""
        self.set_class(not watched.live, "old")
        width = max(panes.PANE_WIDTH, (self.size.width - 4) // 2)
        lines = pool_lines.lines(watched, now, width) or [[("- no figures yet", "dim")]]
        self._lines.show_lines(*lines, layout=len(lines) != self._count)
        self._count = len(lines)


class EndpointsPage(VerticalScroll):
    """All endpoints, and the selected one."""

    def __init__(self) -> None:
        super().__init__(id="endpoints")
        self._lines = Lines()
        self._count = 0

    def compose(self) -> ComposeResult:
        """One block of lines."""
        yield self._lines

    def show_all(self, watched: list[Watched], selected: int, now: float) -> None:
        """Every endpoint."""
        lines = tables.endpoint_lines(watched, selected, now)
        self._lines.show_lines(*lines, layout=len(lines) != self._count)
        self._count = len(lines)
