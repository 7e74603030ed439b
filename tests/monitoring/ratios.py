"""The alerts on a figure of decode, each through the same cases: real drop, lost scrapes, flapping, restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from monitoring import expected as e
from monitoring.expected import Firing
from monitoring.host import Host, minutes
from monitoring.promtool import Scenario

WINDOW = 5.0
KEEP = 5.0
LOST, SEEN = 15 / 60, 105 / 60


@dataclass(frozen=True)
class Case:
    """An alert: the state it judges as bad, and when. `crossing` is the share of the window that must be bad."""

    name: str
    bad: dict[str, object]
    crossing: float
    wait: float
    firing: Callable[..., Firing]
    base: dict[str, object] = field(default_factory=dict)
    against_usual: bool = False
    """It needs a baseline, which a new run does not have."""

    @property
    def begin(self) -> float:
        """Minute at which the bad state begins: behind the baseline, or the settling."""
        return 28 if self.against_usual else 8

    @property
    def fires(self) -> float:
        """Minute at which it fires."""
        return self.begin + WINDOW * self.crossing + self.wait


CASES = (
    Case("MoePredictorRecallLow", {"recall": 0.45}, 0.286, 10, lambda **k: e.recall_low("45%", **k), {"recall": 0.52}),
    Case("MoePredictorRecallDrop", {"recall": 0.55}, 0.64, 5, e.recall_drop, against_usual=True),
    Case("MoeDecodeHitRateLow", {"hit": 0.66}, 0.333, 10, lambda **k: e.hit_low("66%", **k), {"hit": 0.72}),
    Case("MoeDecodeHitRateDrop", {"hit": 0.75}, 0.6, 10, e.hit_drop, against_usual=True),
    Case("MoePrefetchLate", {"timing": 0.12, "hit": 0.84}, 0.556, 5, e.late),
    Case("MoeEvictionThrash", {"evicted": 0.04}, 0.459, 10, e.thrash),
    Case("MoeDecodeSlow", {"decode": 3, "speed": 4}, 0.769, 10, e.slow, against_usual=True),
    Case("MoeDecodeStalled", {"stall": 0.7}, 0.6, 5, e.stalled),
    Case("MoeReadLatencyHigh", {"slow_reads": 0.05}, 0.2, 10, e.reads),
)


def _real(case: Case) -> Scenario:
    """Silent until the bad state has lasted, exact at its height, gone when it has been good for long enough."""
    lasts = case.wait + 8
    end = case.begin + lasts
    gone = end + WINDOW * (1 - case.crossing) + KEEP
    host = Host([minutes(case.begin, **case.base), minutes(lasts, **case.base | case.bad), minutes(16, **case.base)])
    firing = case.firing()
    checks = {case.fires - 1: (), case.fires + 1: (firing.bare,), end: (firing,), gone - 1: (firing.bare,)}
    return Scenario(f"{case.name}: real drop", [host], checks | {gone + 1: ()})


def _lossy(case: Case) -> Scenario:
    """A scrape in eight is lost, which is no reason to begin anew."""
    bad = case.base | case.bad
    cycles = round((case.wait + 8) / 2)
    segments = [minutes(case.begin, **case.base)]
    for _ in range(cycles):
        segments += [minutes(SEEN, **bad), minutes(LOST, **bad, scraped=False)]
    firing = case.firing()
    checks = {case.fires - 1: (), case.fires + 1: (firing.bare,), case.begin + 2 * cycles - 1: (firing,)}
    return Scenario(f"{case.name}: lost scrapes", [Host(segments)], checks, step=5)


def _flapping(case: Case) -> Scenario:
    """Good for less than the alert is kept: one alert, not two."""
    bad = case.base | case.bad
    first = case.wait + 7
    good = round((7.25 - 7.5 * case.crossing) * 4) / 4
    second = WINDOW + 2
    end = case.begin + first
    gap = good + 10 * case.crossing - WINDOW
    middle = end + WINDOW * (1 - case.crossing) + gap / 2
    host = Host(
        [
            minutes(case.begin, **case.base),
            minutes(first, **bad),
            minutes(good, **case.base),
            minutes(second, **bad),
        ]
    )
    firing = case.firing()
    at = (end, middle, end + good + WINDOW * case.crossing + 0.5)
    checks = {round(minute * 4) / 4: (firing.bare,) for minute in at} | {end + good + second: (firing,)}
    return Scenario(f"{case.name}: flapping", [host], checks)


def _restart(case: Case) -> Scenario:
    """The old run's alert ends; the new run is judged by itself, once it has filled the window."""
    bad = case.base | case.bad
    before = round(WINDOW * case.crossing + case.wait + 2)
    at = case.begin + before
    after = WINDOW + case.wait + 2
    host = Host([minutes(case.begin, **case.base), minutes(before, **bad), minutes(after, **bad, run="r2")])
    firing = case.firing()
    again = () if case.against_usual else (case.firing(run="r2"),)
    checks = {at - 0.5: (firing.bare,), at + KEEP + 1: (), at + WINDOW + case.wait - 1: (), at + after: again}
    return Scenario(f"{case.name}: restart", [host], checks)


def scenarios() -> Iterator[Scenario]:
    """Every case of every alert."""
    for case in CASES:
        for scenario in (_real, _lossy, _flapping, _restart):
            yield scenario(case)
