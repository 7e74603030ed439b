"""What a day costs in a Prometheus: samples a scrape, and bytes a sample, from its own metrics.

A real Prometheus scrapes a real endpoint of 48 layers for some seconds: samples a scrape, and how long it takes. A day
cannot be waited for: its scrapes are made here and handed to a real Prometheus by remote write, in order, and it cuts,
compresses and compacts blocks as it does with scrapes. The values come from the hooks: INTERVALS intervals of 5 s are
recorded pass by pass, with some 12 tokens a second, routing, residency and durations drawn anew for each layer, and the
day is these intervals in an order drawn anew, one behind the other, without a pause. So counters rise as they would
over 5 s of decoding, and what is not true of a real day is that it never idles, which is cheaper, and that nothing
drifts for hours.

    python benchmarks/storage.py [--hours 24]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from layer import Layer, layer, model
from measuring import Section, run
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from scraped import LAYERS, fill

import moe_telemetry as mt

INTERVAL = 5
"""Seconds between scrapes."""
INTERVALS, PASSES = 96, 24
"""Recorded intervals, and different passes in them."""
TOKENS = (54, 66)
"""Of an interval, least and most."""
BATCH = 120
"""Scrapes of a remote write request: a chunk's samples."""
SERIES = 400
"""Series of a request."""
WAIT_SECONDS = 60.0
HOUR = 3600
Matrix = NDArray[np.float64]


class Recorded(NamedTuple):
    """Series by their labels (`__name__` first); what each rose by in each interval, or stood at where it is no
    counter: (intervals, series); which are counters: (series,)."""

    labels: list[list[tuple[str, str]]]
    changes: Matrix
    counts: NDArray[np.bool_]


def recorded() -> Recorded:
    """INTERVALS intervals of decoding, through the hooks."""
    draw = random.Random(0)
    recorder = mt.Recorder()
    registry = CollectorRegistry(auto_describe=False)
    passes = [model(LAYERS, 10, seed) for seed in range(PASSES)]
    states: list[dict[tuple[str, ...], float]] = []
    kinds: dict[tuple[str, ...], bool] = {}
    with mt.start(model="m", runtime="r", port=0, recorder=recorder, num_layers=LAYERS, registry=registry):
        fill(recorder)
        for _ in range(INTERVALS + 1):
            for _ in range(draw.randint(*TOKENS)):
                _decode(recorder, draw.choice(passes), draw)
            state = {}
            for family in registry.collect():
                for sample in family.samples:
                    key = (sample.name, *(text for pair in sorted(sample.labels.items()) for text in pair))
                    state[key] = float(sample.value)
                    kinds[key] = family.type in ("counter", "histogram")
            states.append(state)
    keys = [key for key in states[0] if all(key in state for state in states)]
    levels = np.array([[state[key] for key in keys] for state in states])
    counts = np.array([kinds[key] for key in keys])
    changes = np.where(counts, np.diff(levels, axis=0), levels[1:])
    return Recorded([_pairs(key) for key in keys], changes, counts)


def _pairs(key: tuple[str, ...]) -> list[tuple[str, str]]:
    name, *rest = key
    return [
        ("__name__", name),
        *sorted([*zip(rest[::2], rest[1::2], strict=True), ("instance", "m:1"), ("job", "moe")]),
    ]


def _decode(recorder: mt.Recorder, layers: list[Layer], draw: random.Random) -> None:
    recorder.forward(1)
    for given in layers:
        layer(recorder, given)
        for segment in ("route", "pyremap", "combine"):
            recorder.block(segment, draw.lognormvariate(-9, 1))
        recorder.block_call()
        if draw.random() < 0.3:
            recorder.read("demand", 98_304, draw.lognormvariate(-6, 0.5))
            recorder.stall(draw.lognormvariate(-7, 0.5))
            recorder.evicted(given.number)
        recorder.placed(2)
    recorder.tokens(1)
    recorder.forward_done(draw.gauss(0.08, 0.004))


def requests(found: Recorded, scrapes: int, begin: int) -> Iterator[bytes]:
    """A day's scrapes as remote write requests; `begin` in Unix seconds."""
    draw = np.random.default_rng(0)
    heads = [
        b"".join(_message(0x0A, _message(0x0A, key.encode()) + _message(0x12, value.encode())) for key, value in pairs)
        for pairs in found.labels
    ]
    base = np.zeros(len(heads))
    for first in range(0, scrapes, BATCH):
        number = min(BATCH, scrapes - first)
        changes = found.changes[draw.integers(0, len(found.changes), number)]
        values = np.where(found.counts, base + np.cumsum(changes, axis=0), changes)
        base = values[-1]
        stamps = [(begin + (first + index) * INTERVAL) * 1000 for index in range(number)]
        samples = np.empty((len(heads), number, 18), np.uint8)
        samples[:] = [list(b"\x12\x10\x09" + bytes(8) + b"\x10" + _varint(stamp)) for stamp in stamps]
        samples[:, :, 3:11] = np.ascontiguousarray(values.T).astype("<f8").view(np.uint8).reshape(len(heads), number, 8)
        for start in range(0, len(heads), SERIES):
            yield b"".join(
                _message(0x0A, heads[index] + samples[index].tobytes())
                for index in range(start, min(start + SERIES, len(heads)))
            )


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _message(tag: int, body: bytes) -> bytes:
    return bytes((tag,)) + _varint(len(body)) + body


def write(url: str, body: bytes) -> None:
    """A remote write; in Snappy's format as one literal, which compresses nothing."""
    packed = _varint(len(body)) + b"\xfc" + struct.pack("<I", len(body) - 1) + body
    headers = {
        "Content-Encoding": "snappy",
        "Content-Type": "application/x-protobuf",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    }
    urllib.request.urlopen(urllib.request.Request(f"{url}/api/v1/write", packed, headers), timeout=60).close()


@contextmanager
def prometheus(folder: Path, target: str | None = None) -> Iterator[str]:
    """A Prometheus with its data under `folder`, which scrapes the target each second, or takes writes; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    jobs = [
        {"job_name": "moe", "scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": [{"targets": [target]}]}
    ]
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": jobs if target else []}))  # JSON is YAML
    program = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    program += [f"--web.listen-address={address}", "--web.enable-remote-write-receiver"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(program, stdout=log, stderr=log)
    try:
        until = time.monotonic() + WAIT_SECONDS
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def own(url: str) -> dict[str, float]:
    """A Prometheus' metrics about itself; those with labels are summed."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def scraped_samples(folder: Path) -> tuple[float, float]:
    """Samples of a scrape, and its seconds, as a Prometheus that scrapes the endpoint has them."""
    recorder = mt.Recorder()
    with mt.start(model="m", port=0, recorder=recorder, num_layers=LAYERS) as telemetry:
        fill(recorder)
        with prometheus(folder, f"127.0.0.1:{telemetry.port}") as url:
            time.sleep(6.0)
            return _asked(url, "scrape_samples_scraped"), _asked(url, "avg_over_time(scrape_duration_seconds[1m])")


def _asked(url: str, query: str) -> float:
    """A query's only value, waited for until there is one above 0."""
    until = time.monotonic() + WAIT_SECONDS
    while True:
        with urllib.request.urlopen(f"{url}/api/v1/query?query={query}", timeout=30) as reply:
            found = json.load(reply)["data"]["result"]
        if found and float(found[0]["value"][1]) > 0:
            return float(found[0]["value"][1])
        if time.monotonic() > until:
            raise TimeoutError(f"{query} has no value")
        time.sleep(0.5)


def stored(folder: Path, hours: float) -> tuple[dict[str, float], int, float]:
    """A Prometheus' own metrics behind a day, the samples in its blocks, and the seconds that it took."""
    found = recorded()
    scrapes = int(hours * HOUR / INTERVAL)
    begin = int(time.time()) - scrapes * INTERVAL - HOUR
    started = time.perf_counter()
    with prometheus(folder) as url:
        for body in requests(found, scrapes, begin):
            write(url, body)
        took = time.perf_counter() - started
        before: dict[str, float] = {}
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            now = own(url)
            if before and all(before[name] == now[name] for name in (COMPACTIONS, BLOCKS)):
                break
            before = now
            time.sleep(4.0)
        blocks = [json.loads(path.read_text()) for path in (folder / "data").glob("*/meta.json")]
    return now, sum(block["stats"]["numSamples"] for block in blocks), took


COMPACTIONS, BLOCKS = "prometheus_tsdb_compactions_total", "prometheus_tsdb_storage_blocks_bytes"


def section(hours: float) -> Section:
    """Both, where a Prometheus is installed."""
    found = Section("In Prometheus")
    if shutil.which("prometheus") is None:
        found.say("Not measured: no Prometheus is installed.")
        return found
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        samples, seconds = scraped_samples(Path(first))
        metrics, in_blocks, took = stored(Path(second), hours)
    a_day = samples * 24 * HOUR / INTERVAL
    chunk = (
        metrics["prometheus_tsdb_compaction_chunk_size_bytes_sum"]
        / metrics["prometheus_tsdb_compaction_chunk_samples_sum"]
    )
    disk = metrics[BLOCKS] / in_blocks
    found.say(INTRODUCTION % (hours, INTERVALS))
    found.table(
        ("what", "figure"),
        [
            (f"samples a scrape, {LAYERS} layers (`scrape_samples_scraped`)", f"{samples:,.0f}"),
            ("a scrape by a Prometheus on the same host (`scrape_duration_seconds`, mean)", f"{seconds * 1000:.0f} ms"),
            ("samples a day at 5 s", f"{a_day / 1e6:.1f} million"),
            ("samples written", f"{metrics['prometheus_tsdb_head_samples_appended_total'] / 1e6:.1f} million"),
            ("of these compacted into blocks (the rest is in the head)", f"{in_blocks / 1e6:.1f} million"),
            ("bytes a sample, chunks alone (`prometheus_tsdb_compaction_chunk_*`)", f"{chunk:.2f}"),
            ("bytes a sample on disk, index included (`prometheus_tsdb_storage_blocks_bytes`)", f"{disk:.2f}"),
            ("a day on disk", f"{a_day * disk / 1e6:.0f} MB"),
            ("writing it took", f"{took:.0f} s"),
        ],
    )
    return found


INTRODUCTION = """\
%g hours of scrapes, made from %d recorded intervals of 5 s in a random order and handed to a real Prometheus by remote
write, since a day cannot be waited for; it cut, compressed and compacted its blocks itself. Decoding never pauses in
them: an idle process costs less."""


def main() -> int:
    """Measure and print: there is no limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    return run(parser, lambda options: section(options.hours))


if __name__ == "__main__":
    sys.exit(main())
