"""The benchmarks in under a minute, with limits twice as loose as the goals: what the tests run.

A check fails where all of the 95 % interval is beyond its limit: by a regression of a kind (a hook that calls the SDK,
a scrape that renders everything twice), and not by what else runs on the machine. Ratios only, so no share of a token
in ms. Exit status 1 where one fails.

    python benchmarks/quick.py [hooks layer decode scrape start]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import demo
import hooks
import layer
import scrape
import start
from measuring import HEADER, Goal, Section, summary

from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.demo.settings import DemoSettings


def decode() -> Section:
    """A small model of the demo's kind, whose weights are built anew."""
    with tempfile.TemporaryDirectory() as folder:
        return demo.section(8.0, 0.0, DemoSettings(cache_dir=Path(folder)), ModelConfig(layers=4, experts=32))


CHECKS: dict[str, Callable[[], Section]] = {
    "hooks": lambda: hooks.section(11, 200, ("on", "off", "stopped", "sdk"), stand_ins=False),
    "layer": lambda: layer.section(30, 0, absolute=False),
    "decode": decode,
    "scrape": lambda: scrape.section(8, 6.0, 0, (48,)),
    "start": lambda: start.section(3, start.NEEDED),
}


def goals(names: Sequence[str] = ()) -> list[Goal]:
    """Those of the checks named, or of all."""
    return [goal for name in names or CHECKS for goal in CHECKS[name]().goals]


def failed(found: Sequence[Goal]) -> list[str]:
    """What is beyond a limit twice as loose, in a line each."""
    return [
        f"{goal.kind}, {goal.name}: {figure} ({spread}), {limit}"
        for goal in found
        if goal.broken
        for figure, spread, limit in [goal.told(loose=True)]
    ]


def main() -> int:
    """Measure, print, and fail on a regression."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CHECKS, []], help="all of them by default")
    options = parser.parse_args()
    begin = time.perf_counter()
    found = goals(options.names)
    shown = Section("Quick benchmarks")
    shown.table(HEADER, summary(found, loose=True))
    shown.say(f"in {time.perf_counter() - begin:.0f} s")
    print(shown.markdown())
    wrong = failed(found)
    for line in wrong:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
