"""Resident memory that telemetry takes, seen from a fresh process that has all its modules loaded.

`start()`, then every series of the default catalog touched (prefill, and decode of 1, 3 and 4 tokens), then scrapes
until they add nothing: label dicts and the beginnings of lines are kept. prometheus_client with the same series, and
the scrapes of it, are beside it. Bytes a series are the growth by the series, a histogram counting as one; the second
figure, between 48 and 94 layers, leaves out what a process pays once.

    python benchmarks/memory.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from measuring import Section, run, turns

MODELS = (48, 94)
PROGRAM = """
import gc, json, sys, psutil
sys.path.insert(0, {folder!r})
import moe_telemetry as mt
from moe_telemetry import telemetry
from moe_telemetry.endpoint import Endpoint
from scraped import fetch, fill, replica

def resident():
    gc.collect()
    return psutil.Process().memory_info().rss

first = mt.start(port=0, recorder=mt.Recorder())  # modules that come late; it stays, or its memory would be used again
fetch(first.url, "gzip")
ours = mt.Recorder()
marks = [resident()]
tel = mt.start(model="m", port=0, recorder=ours, num_layers={layers})
marks.append(resident())
fill(ours, {layers})
marks.append(resident())
for _ in range(3):
    body = fetch(tel.url)
marks.append(resident())
text = body.decode()
marks.append(resident())
other = Endpoint(replica(text), tel.snapshot, "127.0.0.1", 0)
other.serve()
for _ in range(3):
    fetch(other.url)
marks.append(resident())
series = sum(len(metric["series"]) for metric in tel.snapshot()["metrics"].values())
print(json.dumps([marks, series, text.count("\\n") - text.count("\\n#")]))
"""


def taken(layers: int) -> list[float]:
    """Bytes of start(), of the series, of scrapes, of prometheus_client with the same; series and samples."""
    program = PROGRAM.format(folder=str(Path(__file__).parent), layers=layers)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    marks, series, samples = json.loads(done.stdout)
    before, started, filled, scraped, again, theirs = marks
    return [started - before, filled - started, scraped - filled, theirs - again, series, samples]


def section(repeats: int) -> Section:
    """Medians of fresh processes that took turns."""
    found = Section("Memory")
    figures: dict[int, list[list[float]]] = {layers: [] for layers in MODELS}

    def one(layers: int) -> float:
        figures[layers].append(taken(layers))
        return 0.0

    turns({f"{layers}": partial(one, layers) for layers in MODELS}, repeats)
    medians = {
        layers: [statistics.median(column) for column in zip(*rows, strict=True)] for layers, rows in figures.items()
    }
    rows = []
    for layers, (start, series, scrapes, theirs, count, samples) in medians.items():
        whole = start + series + scrapes
        spread = [sum(row[:3]) for row in figures[layers]]
        rows.append(
            (
                *(f"{layers}", *(f"{each / 2**20:.2f}" for each in (start, series, scrapes))),
                f"{whole / 2**20:.2f} ({min(spread) / 2**20:.2f} to {max(spread) / 2**20:.2f})",
                f"{theirs / 2**20:.2f}",
                f"{count:,.0f} ({samples:,.0f} samples)",
                f"{whole / count:,.0f}",
            )
        )
    found.say(f"MiB of resident memory, medians of {repeats} fresh processes each, modules loaded before:")
    found.table(
        (
            *("layers", "`start()`", "every series touched", "scraped"),
            *("together (least to most)", "prometheus_client, the same", "series", "bytes a series"),
        ),
        rows,
    )
    small, large = (medians[layers] for layers in MODELS)
    more, grown = large[4] - small[4], sum(large[:3]) - sum(small[:3])
    found.say(
        f"From {MODELS[0]} to {MODELS[1]} layers {more:,.0f} series more take {grown / 2**20:.2f} MiB: "
        f"{grown / more:,.0f} bytes each."
    )
    return found


def main() -> int:
    """Measure and print; that memory does not grow with events is `soak.py`'s."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    return run(parser, lambda options: section(options.repeats))


if __name__ == "__main__":
    sys.exit(main())
