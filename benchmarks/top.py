"""What being watched costs: decode steps of the demo right behind a scrape, against those half an interval later.

Scrapes come once a second from `moe-telemetry top`, which runs as a person runs it, in a terminal (a pseudo-terminal)
on the same host, and then from a client that only scrapes: what an endpoint pays where `top` runs on another host. Each
scrape is compared with the time half a second behind it, when nothing of it is left, so that load that comes and goes
is in both (the mean of the ratios is geometric, for noise that is as often below 1 as above); what that makes of the
mean step at the default interval follows. Exit status 1 when a target is missed.

    python benchmarks/top.py [--seconds 120]
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import pty
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

import moe_telemetry as mt
from moe_telemetry.demo.engine import Engine
from moe_telemetry.demo.settings import DemoSettings
from moe_telemetry.top.command import INTERVAL_SECONDS

MOST = 1.01
EVERY = 1.0
BEHIND = 0.3
"""Seconds in which all that a scrape causes is over: the answer, and what `top` makes of it."""
SCRAPER = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1] + "/metrics", timeout=10).read()
    time.sleep(float(sys.argv[2]))
"""
ANSWERS = 50
Step = tuple[float, float]
"""Begin and end."""


class Noted(CollectorRegistry):
    """A registry that notes when it was scraped."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def collect(self) -> Iterator[Metric]:
        """As ever."""
        self.times.append(time.perf_counter())
        return iter(super().collect())


@contextmanager
def watcher(*command: str) -> Iterator[psutil.Popen]:
    """A process in a terminal of 80 by 24, whose output is read and thrown away."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = psutil.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)

    def drain() -> None:
        with suppress(OSError):  # the process has ended
            while os.read(ours, 65_536):
                pass

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        thread.join(5)
        os.close(ours)


def decode(engine: Engine, seconds: float) -> list[Step]:
    """Decode steps of the demo for so long."""
    steps: list[Step] = []
    done = threading.Event()
    until = time.perf_counter() + seconds

    def take(phase: str, took: float) -> None:
        now = time.perf_counter()
        if phase == "decode":
            steps.append((now - took, now))
        if now > until:
            done.set()

    engine.run(done, lambda step: take(step.phase, step.seconds))
    return steps


def mean_from(steps: list[Step], begin: float) -> float | None:
    """Mean duration of the steps that overlap the time from `begin` on; None without any."""
    found = [end - start for start, end in steps if start < begin + BEHIND and end > begin]
    return statistics.fmean(found) if found else None


def slowed(steps: list[Step], scrapes: list[float]) -> list[float]:
    """For each scrape the steps behind it over those half an interval later."""
    pairs = [(mean_from(steps, at), mean_from(steps, at + EVERY / 2)) for at in scrapes]
    return [real / later for real, later in pairs if real is not None and later is not None]


def answered(url: str) -> float:
    """Processor seconds of this process, where the endpoint is, for one answer; the client is another process."""
    client = "import sys, urllib.request\nfor _ in range(int(sys.argv[2])): urllib.request.urlopen(sys.argv[1]).read()"
    begin = time.process_time()
    subprocess.run([sys.executable, "-c", client, f"{url}/metrics", str(ANSWERS)], check=True, timeout=120)
    return (time.process_time() - begin) / ANSWERS


def main() -> int:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="of decode for each kind of watching")
    options = parser.parse_args()
    registry = Noted()
    found: dict[str, list[float]] = {}
    alive = True
    telemetry = mt.start(model="demo-moe", runtime="benchmark", port=0, registry=registry)
    with telemetry, Engine(DemoSettings()) as engine:
        engine.prepare()
        url = str(telemetry.url)
        for words, command in (
            ("top on the same host", ("-m", "moe_telemetry", "top", "--interval", str(EVERY), url)),
            ("only scrapes", ("-c", SCRAPER, url, str(EVERY))),
        ):
            with watcher(sys.executable, *command) as process:
                time.sleep(3.0)  # it has started
                registry.times.clear()
                began = process.cpu_times()
                steps = decode(engine, options.seconds)
                alive &= process.poll() is None
                ended = process.cpu_times()
                found[words] = slowed(steps, registry.times)
                used = (ended.user + ended.system - began.user - began.system) / max(1, len(registry.times))
            if words.startswith("top"):
                refresh = used
        answer = answered(url)
    print(f"| the demo, scraped every {INTERVAL_SECONDS:g} s | behind a scrape / later | mean step | at most |")
    print("|---|---|---|---|")
    met = alive
    for words, ratios in found.items():
        logs = [math.log(each) for each in ratios]
        ratio = math.exp(statistics.fmean(logs))
        error = ratio * statistics.stdev(logs) / len(logs) ** 0.5
        share = BEHIND / INTERVAL_SECONDS
        mean = 1 + (ratio - 1) * share
        met &= mean <= MOST
        print(f"| {words} | {ratio:.3f} ± {error:.3f} ({len(ratios)}) | {mean:.4f} ± {error * share:.4f} | {MOST} |")
    print(f"\nProcessor time of an answer {1000 * answer:.1f} ms, {answer / INTERVAL_SECONDS:.2%} of the interval;")
    print(f"of top for a refresh {1000 * refresh:.0f} ms, {refresh / INTERVAL_SECONDS:.2%}")
    if not alive:
        print("a watcher ended before the measurement did", file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
