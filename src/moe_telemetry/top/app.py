"""The screen of `moe-telemetry top`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Resize
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, Footer, Static

from moe_telemetry.client import ClientError

from . import panes
from .help import HELP
from .poller import Outcome, Poller, attempt
from .pools import Sized
from .scrape import Scrape
from .watched import Watched
from .widgets import EndpointsPage, LayersPage, Lines, PhasePane, PoolPage
from .words import Line, span

LEAST_WIDTH, LEAST_HEIGHT = 80, 24
AGES_SECONDS = 1.0
"""How often ages are told anew where no scrape comes."""

Asking = Callable[[str], Sized]
Polling = Callable[[Callable[[int, Outcome], object]], Poller]


class Scraped(Message):
    """What became of a scrape."""

    def __init__(self, number: int, outcome: Outcome, at: float) -> None:
        super().__init__()
        self.number = number
        self.outcome = outcome
        self.at = at


class SizeTold(Message):
    """What became of the question for a snapshot."""

    def __init__(self, number: int, outcome: Sized | ClientError, at: float) -> None:
        super().__init__()
        self.number = number
        self.outcome = outcome
        self.at = at


class HelpScreen(ModalScreen[None]):
    """Keys and symbols; any key closes it."""

    def compose(self) -> ComposeResult:
        """One block of text."""
        yield Static(HELP, id="help", markup=False)

    def on_key(self) -> None:
        """Any key."""
        self.dismiss()


class TopApp(App[None]):
    """Endpoints on the screen; `poll` makes the poller, and without it scrapes are handed to `take`.

    `ask` reads an endpoint's snapshot, in a thread of its own, while the page of the pool is seen.
    """

    CSS_PATH = "top.tcss"
    TITLE = "moe-telemetry top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "page('overview')", "Overview"),
        Binding("2", "page('layers')", "Layers"),
        Binding("3", "page('endpoints')", "Endpoints"),
        Binding("4,c", "page('pool')", "Pool"),
        Binding("space", "pause", "Pause"),
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", "Sort back", show=False),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("d", "phase", "Phase", show=False),
        Binding("e", "endpoint(1)", "Next endpoint", show=False),
        Binding("E", "endpoint(-1)", "Previous endpoint", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self,
        watched: Sequence[Watched],
        poll: Polling | None = None,
        clock: Callable[[], float] = time.monotonic,
        ask: Asking | None = None,
    ) -> None:
        super().__init__()
        self.watched = list(watched)
        self.selected = 0
        self.paused_at: float | None = None
        self._frozen: list[Watched] = []
        self._clock = clock
        self._ask = ask
        self._poller = None if poll is None else poll(self._scraped)
        self._title = Lines(id="title")
        self._status = Lines(id="status")
        self._phases = [PhasePane(phase) for phase in ("decode", "prefill")]
        self._layers = LayersPage()
        self._endpoints = EndpointsPage()
        self._pool = PoolPage()
        self._pages = ContentSwitcher(initial="overview", id="pages")
        self._memory = Lines(id="memory")
        self._small = Static(id="small")

    def compose(self) -> ComposeResult:
        """Title and state above, a page, memory and keys below."""
        yield self._title
        yield self._status
        with self._pages:
            yield Horizontal(*self._phases, id="overview")
            yield self._layers
            yield self._endpoints
            yield self._pool
        yield self._memory
        yield self._small
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to poll."""
        if self._poller is not None:
            self._poller.start()
            self.set_interval(AGES_SECONDS, self.show_status)
        self.call_after_refresh(self.show)

    def on_unmount(self) -> None:
        """Quitting waits for no endpoint."""
        if self._poller is not None:
            self._poller.stop()

    def on_resize(self, event: Resize) -> None:
        """Say so where the terminal is too small for a page."""
        width, height = event.size
        small = width < LEAST_WIDTH or height < LEAST_HEIGHT
        self.screen_stack[0].set_class(small, "small")
        self._small.update(
            f"{LEAST_WIDTH} columns by {LEAST_HEIGHT} lines are needed; this terminal has {width} by {height}. "
            "Make it larger, or press q and use --once."
        )
        self.call_after_refresh(self.show)

    # -- scrapes ------------------------------------------------------------------------------------------------

    def _scraped(self, number: int, outcome: Outcome) -> None:
        """In a poller's thread."""
        self.post_message(Scraped(number, outcome, self._clock()))

    def on_scraped(self, message: Scraped) -> None:
        """Take the outcome, and show it unless the screen is paused."""
        self.take(message.number, message.outcome, message.at)

    def take(self, number: int, outcome: Outcome, at: float) -> None:
        """The outcome of a scrape of an endpoint at that time."""
        if isinstance(outcome, Scrape):
            self.watched[number].take(outcome)
        else:
            self.watched[number].fail(str(outcome), at)
        self.show()

    def _ask_size(self) -> None:
        """Ask for the selected endpoint's snapshot, where the last one is old."""
        number, now = self.selected, self._clock()
        if self._ask is None or self.paused_at is not None or not self.watched[number].wants_size(now):
            return
        threading.Thread(
            target=self._read_size, args=(number, self.watched[number].url, self._ask), daemon=True
        ).start()

    def _read_size(self, number: int, url: str, ask: Asking) -> None:
        """In a thread of its own."""
        outcome = attempt(partial(ask, url))
        self.post_message(SizeTold(number, outcome, self._clock()))

    def on_size_told(self, message: SizeTold) -> None:
        """Take what the snapshot said."""
        if isinstance(message.outcome, Sized):
            self.watched[message.number].take_size(message.outcome, message.at)
        else:
            self.watched[message.number].size_failure = str(message.outcome)
        self.show()

    # -- what is shown ------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The moment that is shown."""
        return self._clock() if self.paused_at is None else self.paused_at

    @property
    def seen(self) -> list[Watched]:
        """The endpoints as they are shown: while paused, as they were."""
        return self.watched if self.paused_at is None else self._frozen

    def show(self) -> None:
        """Draw the page that is seen."""
        now, watched = self.now, self.seen[self.selected]
        count = f"  [{self.selected + 1} of {len(self.seen)}, e: next]" if len(self.seen) > 1 else ""
        self._title.show_lines([(panes.identity(watched), "strong"), (count, "dim")])
        self.show_status()
        self._memory.show_lines(panes.memory(watched.frame) if watched.frame is not None else [])
        page = self._pages.current
        if page == "overview":
            for pane in self._phases:
                pane.show(watched, now)
        elif page == "layers":
            self._layers.show(watched, now)
        elif page == "pool":
            self._ask_size()
            self._pool.show(watched, now)
        else:
            self._endpoints.show_all(self.seen, self.selected, now)

    def show_status(self) -> None:
        """Draw the state of the endpoint, with its ages."""
        self._status.show_lines([*self._paused(), panes.status(self.seen[self.selected], self.now)])

    def _paused(self) -> Line:
        if self.paused_at is None:
            return []
        return [(f"PAUSED for {span(self._clock() - self.paused_at)}, space goes on; then: ", "warn")]

    # -- keys ---------------------------------------------------------------------------------------------------

    def action_page(self, name: str) -> None:
        """Show another page."""
        self._pages.current = name
        self.query_one({"layers": "#rows", "endpoints": "#endpoints", "pool": "#pool"}.get(name, "#pages")).focus()
        self.call_after_refresh(self.show)

    def action_pause(self) -> None:
        """Hold the screen, or go on; scraping goes on all the while, so that the trends have no gap."""
        if self.paused_at is None:
            self._frozen = [each.copy() for each in self.watched]
            self.paused_at = self._clock()
        else:
            self.paused_at = None
            self._frozen = []
        self.show()

    def action_sort(self, step: int) -> None:
        """Sort the layers by another column."""
        self._layers.sort(step)
        self.show()

    def action_reverse(self) -> None:
        """Turn the order of the layers."""
        self._layers.reverse = not self._layers.reverse
        self.show()

    def action_phase(self) -> None:
        """The layers of the other phase."""
        self._layers.phase = "prefill" if self._layers.phase == "decode" else "decode"
        self.show()

    def action_endpoint(self, step: int) -> None:
        """Select the next endpoint, or the one before."""
        self.selected = (self.selected + step) % len(self.watched)
        self.show()

    def action_help(self) -> None:
        """Keys and symbols."""
        self.push_screen(HelpScreen())
