"""What being watched costs: decode steps of the demo while `moe-telemetry top` watches it, against none.

`top` runs as a person runs it, in a terminal (a pseudo-terminal) at its default interval, on the same host. Blocks with
and without it follow each other in pairs, the order turned each time; without it, its process is stopped. Beside that,
a client that only scrapes at the same interval: what an endpoint pays where `top` runs on another host. Exit status 1
when a target is missed.

    python benchmarks/top.py [--pairs 12] [--block 6]
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

import moe_telemetry as mt
from moe_telemetry.demo.engine import Engine
from moe_telemetry.demo.settings import DemoSettings
from moe_telemetry.top.command import INTERVAL_SECONDS

MOST = 1.01
SCRAPER = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1] + "/metrics", timeout=10).read()
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def watcher(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a terminal of 80 by 24, whose output is read and thrown away."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
    os.close(theirs)

    def drain() -> None:
        try:
            while os.read(ours, 65_536):
                pass
        except OSError:  # the process has ended
            pass

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        thread.join(5)
        os.close(ours)


class Blocks:
    """Collects decode steps by variant while the demo runs, and switches the watchers between blocks."""

    def __init__(self, seconds: float, pairs: int, watchers: dict[str, subprocess.Popen[bytes]]) -> None:
        self._seconds = seconds
        self._watchers = watchers
        names = list(watchers)
        self._plan = [
            name for pair in range(pairs) for each in names for name in ((each, "") if pair % 2 else ("", each))
        ]
        self.blocks: list[tuple[str, list[float]]] = []
        self._until = 0.0
        self.done = threading.Event()

    def step(self, phase: str, seconds: float) -> None:
        """Behind each pass of the demo."""
        now = time.perf_counter()
        if now >= self._until:
            if len(self.blocks) == len(self._plan):
                self.done.set()
                return
            wanted = self._plan[len(self.blocks)]
            for name, process in self._watchers.items():
                process.send_signal(signal.SIGCONT if name == wanted else signal.SIGSTOP)
            self.blocks.append((wanted, []))
            self._until = now + self._seconds
        if phase == "decode":
            self.blocks[-1][1].append(seconds)

    def ratios(self, name: str) -> list[float]:
        """Mean step of each block with a watcher over that of its neighbour without."""
        pairs = [self.blocks[at : at + 2] for at in range(0, len(self.blocks) - 1, 2)]
        found = []
        for pair in pairs:
            means = {key: statistics.fmean(steps) for key, steps in pair if steps}
            if set(means) == {name, ""}:
                found.append(means[name] / means[""])
        return found


def timed(url: str) -> float:
    """Seconds of one scrape."""
    begin = time.perf_counter()
    urllib.request.urlopen(f"{url}/metrics", timeout=10).read()
    return time.perf_counter() - begin


def main() -> int:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block", type=float, default=6.0, help="seconds")
    options = parser.parse_args()
    with mt.start(model="demo-moe", runtime="benchmark", port=0) as telemetry, Engine(DemoSettings()) as engine:
        engine.prepare()
        url = str(telemetry.url)
        top = (sys.executable, "-m", "moe_telemetry", "top", url)
        scraper = (sys.executable, "-c", SCRAPER, url, str(INTERVAL_SECONDS))
        with watcher(*top) as watching, watcher(*scraper) as scraping:
            time.sleep(5.0)  # both have started
            started = sum(psutil.Process(watching.pid).cpu_times()[:2])
            blocks = Blocks(options.block, options.pairs, {"top": watching, "scrape": scraping})
            engine.run(blocks.done, lambda step: blocks.step(step.phase, step.seconds))
            alive = watching.poll() is None and scraping.poll() is None
            used = sum(psutil.Process(watching.pid).cpu_times()[:2]) - started
        answer = statistics.median(timed(url) for _ in range(20))
    print(f"| mean decode step of the demo, every {INTERVAL_SECONDS:g} s / none | ratio | of pairs | at most |")
    print("|---|---|---|---|")
    met = alive
    for name, words in (("top", "top on the same host"), ("scrape", "a scrape")):
        ratios = blocks.ratios(name)
        low, high = statistics.quantiles(ratios, n=4)[::2]
        ratio = statistics.median(ratios)
        met &= ratio <= MOST
        print(f"| {words} | {ratio:.4f} | {len(ratios)}, quartiles {low:.3f} to {high:.3f} | {MOST} |")
    watched = sum(1 for name, _ in blocks.blocks if name == "top") * options.block
    print(f"\ntop used {used / watched:.1%} of a core; an answer takes {answer / INTERVAL_SECONDS:.2%} of the interval")
    if not alive:
        print("a watcher ended before the measurement did", file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
