"""One endpoint as it is watched: its last figures, what became of it, and its history."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from moe_telemetry import catalog as c
from moe_telemetry.pool_size import Found

from .frame import Frame, PhaseFrame, frame
from .history import History
from .pools import SIZE_SECONDS, Sized, scraped
from .scrape import Scrape
from .window import Window


@dataclass(frozen=True)
class Shown:
    """The latest figures of a phase that was at work, and when they were scraped (monotonic seconds)."""

    figures: PhaseFrame
    at: float


class Watched:
    """Fed by `take` and `fail`; `url` is the endpoint's base address.

    `failure` and `failed_since` are of the outage in progress, `restarts` counts the runs that replaced another.
    `sized` is what the run's snapshot said of the pool at `sized_at`, `size_failure` why the last one did not come.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = url.partition("://")[2]
        self.last: Scrape | None = None
        self.frame: Frame | None = None
        self.shown: dict[str, Shown] = {}
        self.history = History()
        self.failure: str | None = None
        self.failed_since: float | None = None
        self.restarts = 0
        self.sized: Sized | None = None
        self.sized_at = 0.0
        self.size_failure: str | None = None
        self.size_asked: float | None = None

    def take(self, scrape: Scrape) -> None:
        """A scrape that came: figures are what it adds to the last one, or the run so far."""
        try:
            found = frame(Window(scrape, self.last), whole_run=self.last is None)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            self.fail(f"its figures make no sense: {type(error).__name__}", scrape.at)
            return
        if self.last is not None:
            self.history.add(scrape.at, found)
        if found.restarted:
            self.restarts += 1
            self.shown.clear()
            self.sized = self.size_failure = self.size_asked = None
        for phase in c.PHASES:
            if found.phases[phase].active or phase not in self.shown:
                self.shown[phase] = Shown(found.phases[phase], scrape.at)
        self.last, self.frame = scrape, found
        self.failure = self.failed_since = None

    def fail(self, reason: str, at: float) -> None:
        """A scrape that did not come."""
        if self.failed_since is None:
            self.failed_since = at
        self.failure = reason

    def wants_size(self, now: float) -> bool:
        """Whether it is time to ask for a snapshot; who is told so asks."""
        if not self.live or (self.size_asked is not None and now < self.size_asked + SIZE_SECONDS):
            return False
        self.size_asked = now
        return True

    def take_size(self, sized: Sized, at: float) -> None:
        """What a snapshot said, unless another run has begun since."""
        if self.frame is not None and sized.run == self.frame.run.get("run"):
            self.sized, self.sized_at, self.size_failure = sized, at, None

    def pool_size(self) -> tuple[Found | None, bool]:
        """The pool's figures, and whether they are a snapshot's: otherwise the last scrape's."""
        if self.sized is not None:
            return self.sized.found, True
        try:
            return None if self.last is None else scraped(self.last), False
        except (ArithmeticError, ValueError):
            return None, False

    def copy(self) -> Watched:
        """As it is now, whatever comes later."""
        found = copy(self)
        found.shown = dict(self.shown)
        found.history = self.history.copy()
        return found

    @property
    def live(self) -> bool:
        """Whether the last scrape came."""
        return self.last is not None and self.failure is None

    def age(self, now: float) -> float | None:
        """Seconds since the last scrape that came; None when none did."""
        return None if self.last is None else max(0.0, now - self.last.at)

    def idle(self, phase: str, now: float) -> float | None:
        """Seconds since the shown figures of a phase, where they are older than the last scrape; None where not."""
        shown = self.shown.get(phase)
        if shown is None or self.last is None or shown.at == self.last.at or not shown.figures.active:
            return None
        return max(0.0, now - shown.at)
