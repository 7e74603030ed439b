"""What the benchmarks share: turns, ratios and their spread, goals, tables in Markdown, the machine's name.

A ratio is of medians, of repeats that took turns in one process. Its spread is the 95 % interval of the ratio when the
repeats are drawn again (bootstrap, whole turns at a time: what slowed one turn slowed all that took part in it).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import TypeVar

Item = TypeVar("Item")
DRAWS = 1000
LIBRARIES = ("opentelemetry-sdk", "opentelemetry-exporter-prometheus", "prometheus-client", "mlx")


def turns(events: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What each event returned, `repeats` times, in an order drawn anew for each turn of all of them."""
    found: dict[str, list[float]] = {name: [] for name in events}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(events), len(events)):
            found[name].append(events[name]())
    return found


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call, by the clock."""
    begin = perf_counter()
    call()
    return perf_counter() - begin


def fastest_tenth(times: Sequence[float]) -> float:
    """Mean of the fastest tenth."""
    return statistics.fmean(sorted(times)[: max(1, len(times) // 10)])


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians, and its 95 % interval."""

    value: float
    low: float
    high: float

    def shown(self, digits: int = 2) -> str:
        """As a cell of a table."""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Median over median of repeats that took turns."""
    pairs = list(zip(ours, theirs, strict=True))
    return interval(
        pairs, lambda drawn: statistics.median([a for a, _ in drawn]) / statistics.median([b for _, b in drawn])
    )


def ratio_apart(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Median over median of figures that are no pairs: each side is drawn again by itself."""
    draw = random.Random(0)
    again = sorted(
        statistics.median(draw.choices(ours, k=len(ours))) / statistics.median(draw.choices(theirs, k=len(theirs)))
        for _ in range(DRAWS)
    )
    return Ratio(statistics.median(ours) / statistics.median(theirs), *_ends(again))


def _ends(again: Sequence[float]) -> tuple[float, float]:
    return again[DRAWS * 25 // 1000], again[DRAWS * 975 // 1000 - 1]


def interval(items: Sequence[Item], figure: Callable[[Sequence[Item]], float]) -> Ratio:
    """A figure of some items, with the interval that it has when as many of them are drawn again."""
    draw = random.Random(0)
    again = sorted(figure(draw.choices(items, k=len(items))) for _ in range(DRAWS))
    return Ratio(figure(items), *_ends(again))


@dataclass(frozen=True)
class Goal:
    """A figure with the most, or the least, that it may be.

    `kind` is what the summary puts together: of several it names the worst. `origin` is what "no cost" would be: a
    ratio that may be 1.01 is twice as loose at 1.02, a share of 1.5 % at 3 %. `low` and `high` are the interval.
    """

    kind: str
    name: str
    value: float
    limit: float
    low: float
    high: float
    least: bool = False
    origin: float = 0.0
    digits: int = 2
    percent: bool = False

    @classmethod
    def of(cls, kind: str, name: str, found: Ratio, limit: float, **more: object) -> Goal:
        """A ratio's goal."""
        return cls(kind, name, found.value, limit, found.low, found.high, **more)  # type: ignore[arg-type]

    @property
    def met(self) -> bool:
        """Whether the figure is within the limit."""
        return self.value >= self.limit if self.least else self.value <= self.limit

    @property
    def loose(self) -> float:
        """A limit twice as loose."""
        if self.least and not self.origin:
            return self.limit / 2
        return self.origin + 2 * (self.limit - self.origin)

    @property
    def broken(self) -> bool:
        """Whether all of the interval is beyond a limit twice as loose: by a regression, then, and not by noise."""
        return self.high < self.loose if self.least else self.low > self.loose

    @property
    def strain(self) -> float:
        """How near to its limit, or how far beyond; 1 is at it."""
        if self.origin:
            return (self.value - self.origin) / (self.limit - self.origin)
        return self.limit / self.value if self.least else self.value / self.limit

    def told(self, loose: bool = False) -> tuple[str, str, str]:
        """Figure, interval and limit as cells of a table."""
        word = "at least" if self.least else "at most"
        interval = f"{self._number(self.low)} to {self._number(self.high)}"
        return (
            self._number(self.value),
            interval if self.low < self.high else "",
            f"{word} {self._number(self.loose if loose else self.limit, limit=True)}",
        )

    def verdict(self) -> str:
        """Met, missed, or missed with an interval that reaches into the limit."""
        if self.met:
            return "yes"
        reaches = self.high >= self.limit if self.least else self.low <= self.limit
        return "no, within noise" if reaches else "no"

    def _number(self, value: float, limit: bool = False) -> str:
        if self.percent:
            return f"{value * 100:.3g} %" if limit else f"{value * 100:.{self.digits}f} %"
        return f"{value:g}" if limit else f"{value:.{self.digits}f}"


@dataclass
class Section:
    """One benchmark's part of the page: tables and sentences in their order, and its goals."""

    title: str
    parts: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        lines = [header, ["---"] * len(header), *rows]
        self.parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self.parts.append(text)

    def markdown(self) -> str:
        """All of it."""
        return "\n\n".join((f"## {self.title}", *self.parts))


def summary(goals: Sequence[Goal], loose: bool = False) -> list[tuple[str, ...]]:
    """A row for each kind of goal, in their order, with the goal of that kind that is nearest to its limit."""
    kinds: dict[str, list[Goal]] = {}
    for goal in goals:
        kinds.setdefault(goal.kind, []).append(goal)
    rows: list[tuple[str, ...]] = []
    for kind, found in kinds.items():
        worst = max(found, key=lambda goal: goal.strain)
        of = f", worst of {len(found)}: {worst.name}" if len(found) > 1 else ""
        missed = [goal for goal in found if (goal.broken if loose else not goal.met)]
        verdict = "yes" if not missed else "no" if loose else max(missed, key=lambda goal: goal.strain).verdict()
        if len(missed) > 1:
            verdict += f" ({len(missed)} of {len(found)})"
        rows.append((kind + of, *worst.told(loose), verdict))
    return rows


HEADER = ("what", "figure", "95 %", "goal", "met")


def machine() -> list[tuple[str, str]]:
    """What the figures were measured on, without its name: processor, cores, system, Python, libraries."""
    rows = [
        ("processor", f"{_processor()}, {os.cpu_count()} cores"),
        ("system", f"{platform.system()} on {platform.machine()}"),
        ("Python", f"{platform.python_implementation()} {platform.python_version()}"),
    ]
    for library in LIBRARIES:
        try:
            rows.append((library, version(library)))
        except PackageNotFoundError:
            rows.append((library, "not installed"))
    return rows


def _processor() -> str:
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                virtual = " (virtual)" if "hypervisor" in Path("/proc/cpuinfo").read_text() else ""
                return line.partition(":")[2].strip() + virtual
    except (OSError, subprocess.SubprocessError):
        pass
    return platform.processor() or "unknown processor"


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Section]) -> int:
    """A benchmark's main: measures, prints Markdown, and gives 1 where a goal is missed."""
    parser.add_argument("--json", type=Path, help="also write the section and its goals to this file")
    options = parser.parse_args()
    section = measure(options)
    print(section.markdown())
    if options.json:
        options.json.write_text(json.dumps(asdict(section)))
    missed = [goal for goal in section.goals if not goal.met]
    for goal in missed:
        found, spread, limit = goal.told()
        print(f"missed: {goal.kind}, {goal.name}: {found} ({spread}), {limit}", file=sys.stderr)
    return 1 if missed else 0


def loaded(path: Path) -> Section:
    """A section that `run` has written."""
    found = json.loads(path.read_text())
    return Section(found["title"], found["parts"], [Goal(**goal) for goal in found["goals"]])
