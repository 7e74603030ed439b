"""What importing and starting cost: fresh interpreters that take turns, each timing one thing.

`import moe_telemetry` is held against `import opentelemetry.sdk.metrics`, whatever either loads; it must not load mlx.
`start()` is timed where the SDK, its exporter and prometheus_client are imported already, as in a server that uses
OpenTelemetry, and as a program's very first call, which imports them.

    python benchmarks/start.py [--repeats 9]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from measuring import Goal, Section, interval, run, turns

IMPORT_MOST, START_MOST = 0.03, 0.1
"""Seconds."""
NEEDED = ("sdk", "package", "start")
"""For the goals."""
LOADED = "import opentelemetry.sdk.metrics, opentelemetry.exporter.prometheus, psutil, http.server; "
STARTING = "mt.start(model='m', runtime='r', port=0, num_layers=%d)"
PROGRAMS = {
    "sdk": ("", "import opentelemetry.sdk.metrics"),
    "package": ("", "import moe_telemetry"),
    "start": (LOADED + "import moe_telemetry as mt; from moe_telemetry import telemetry", STARTING % 48),
    "start 94": (LOADED + "import moe_telemetry as mt; from moe_telemetry import telemetry", STARTING % 94),
    "first start": ("import moe_telemetry as mt", STARTING % 48),
    "exporter": ("", "import opentelemetry.sdk.metrics, opentelemetry.exporter.prometheus"),
}
"""What is not timed, and what is."""
TIMED = """
{before}
from time import perf_counter
begin = perf_counter()
{call}
took = perf_counter() - begin
import sys
print(took, any(name == "mlx" or name.startswith("mlx.") for name in sys.modules))
"""


def seconds(name: str) -> float:
    """What a fresh interpreter takes; RuntimeError where it has mlx loaded."""
    before, call = PROGRAMS[name]
    program = TIMED.format(before=before, call=call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    took, has_mlx = done.stdout.split()
    if has_mlx != "False":
        raise RuntimeError(f"{call} loads mlx")
    return float(took)


def section(repeats: int, names: Sequence[str] = tuple(PROGRAMS)) -> Section:
    """All of it, or those that the goals need; a turn is one interpreter of each kind."""
    found = Section("Import and start")
    for name in names:  # byte code, and the disk's cache
        seconds(name)
    times = turns({name: partial(seconds, name) for name in names}, repeats)
    pairs = list(zip(times["package"], times["sdk"], strict=True))
    over = interval(
        pairs, lambda drawn: statistics.median([a for a, _ in drawn]) - statistics.median([b for _, b in drawn])
    )
    started = interval(times["start"], statistics.median)
    kind = "import moe_telemetry, seconds beyond import opentelemetry.sdk.metrics"
    found.goals = [
        Goal.of(kind, "", over, IMPORT_MOST, digits=3),
        Goal.of("start(), 48 layers, seconds", "", started, START_MOST, digits=3),
    ]
    found.say(f"Milliseconds in fresh interpreters that took turns, {repeats} each; none of ours had loaded mlx.")
    found.table(
        ("what", "ms, median", "fastest to slowest"),
        [
            (words, f"{statistics.median(times[name]) * 1000:.1f}", _range(times[name]))
            for name, words in (
                ("sdk", "`import opentelemetry.sdk.metrics`"),
                ("exporter", "the same and `opentelemetry.exporter.prometheus`"),
                ("package", "`import moe_telemetry`"),
                ("start", "`start()`, 48 layers, libraries imported"),
                ("start 94", "`start()`, 94 layers, libraries imported"),
                ("first start", "`start()`, 48 layers, as the first that needs the libraries"),
            )
            if name in times
        ],
    )
    return found


def _range(times: list[float]) -> str:
    return f"{min(times) * 1000:.1f} to {max(times) * 1000:.1f}"


def main() -> int:
    """Measure, print, and fail on a missed goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    return run(parser, lambda options: section(options.repeats))


if __name__ == "__main__":
    sys.exit(main())
