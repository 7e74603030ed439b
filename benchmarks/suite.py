"""Runs the benchmarks, each in a process of its own, and writes docs/benchmarks.md: `make bench`, under ten minutes.

Exit status 1 where a goal is missed by more than noise; the page has it, too. A benchmark that fails writes nothing.

    python benchmarks/suite.py [--output FILE] [names ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from timeit import repeat

from measuring import HEADER, Section, loaded, machine, summary

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
BENCHMARKS = ("hooks", "layer", "demo", "scrape", "scrape_parts", "start", "memory", "storage")
CALLS = 100_000
INTRODUCTION = """\
# Benchmarks

Written by `make bench`, which runs `benchmarks/` and overwrites this page. `make bench-quick` holds the ratios to
limits twice as loose, in under a minute, and the tests run it.

Both sides of a comparison take turns in one process, or, where that cannot be, in fresh processes one behind the other.
A figure with a range in brackets is a ratio of medians and its 95 % interval: that of the same ratio with the turns
drawn again at random (bootstrap). Hooks and the drop-in are timed in the thread's CPU time, everything else by the
clock.

**Absolute times here come from a shared machine**: other work ran on its processors meanwhile, which lengthens CPU
times, too, and the waits of what two threads or processes do at a time. Read the ratios. What a time is worth is in the
last rows of the table: an empty call takes some 45 ns on such a processor that has nothing else to do.
"""
PROFILES = """\
## The profiles behind these figures

Hooks: methods shadowed on an instance instead of a change of its class, thread-locals instead of one slot, a loop over
experts instead of set operations, and what each cost, are in [Design](design.md#hooks). A scrape: of the points' way
through the SDK, and of rendering, which was three quarters of a scrape's time until the beginnings of lines were kept,
in [Design](design.md#collection).

Where a layer's worth goes, and what was tried to make it less, is in [Design](design.md#a-layers-worth).

The shares of a token are absolute, and other work on the machine is in them; the ratio to empty calls depends on it
less.
"""


def measured(name: str, folder: Path) -> Section:
    """One benchmark's section; SystemExit where it fails by more than a goal."""
    written = folder / f"{name}.json"
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(written)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(f"{name}: {time.perf_counter() - begin:.0f} s", done.stderr, sep="\n", file=sys.stderr)
    if not written.exists():
        raise SystemExit(f"{name} failed")
    return loaded(written)


def empty_call() -> float:
    """Nanoseconds of an empty call, median."""
    times = sorted(repeat("f()", "def f(): pass", number=CALLS, repeat=9))
    return times[len(times) // 2] / CALLS * 1e9


def conditions() -> str:
    """How busy the machine is."""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return f"load {load}, an empty call {empty_call():.0f} ns"


def page(sections: list[Section], before: str, after: str, seconds: float) -> str:
    """The whole page."""
    goals = [goal for section in sections for goal in section.goals]
    named = Section("Machine")
    named.table(
        ("what", "which"),
        [*machine(), ("before", before), ("behind", after), ("the run took", f"{seconds / 60:.1f} minutes")],
    )
    total = Section("Goals")
    total.say("Of several figures of a kind, the one that is nearest to its limit or farthest beyond it.")
    total.table(HEADER, summary(goals))
    return "\n".join((INTRODUCTION, *(f"{each.markdown()}\n" for each in (named, total, *sections)), PROFILES))


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="all of them by default")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    begin, before = time.perf_counter(), conditions()
    with tempfile.TemporaryDirectory() as folder:
        sections = [measured(name, Path(folder)) for name in options.names or BENCHMARKS]
    text = page(sections, before, conditions(), time.perf_counter() - begin)
    options.output.write_text(text, encoding="utf-8")
    missed = [goal for section in sections for goal in section.goals if goal.verdict() == "no"]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
