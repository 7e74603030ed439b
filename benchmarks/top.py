"""What being watched costs: decode steps of the demo while `moe-telemetry top` watches it, against none.

`top` runs as a person runs it, in a terminal (a pseudo-terminal) at its default interval, on the same host. Blocks with
and without it follow each other in pairs, the order turned each time; without it, its process is stopped. Beside that,
a client that only scrapes at the same interval: what an endpoint pays where `top` runs on another host. Exit status 1
when a target is missed.

Wall times of a shared machine differ by far more than what is to be seen here, so the processor time of the demo's
process is compared as well, which answering a scrape is part of, and an answer's own is told by itself.

    python benchmarks/top.py [--pairs 8] [--block 12]
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
        self.blocks: list[tuple[str, list[float], list[float]]] = []
        self._until = self._used = 0.0
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
            self.blocks.append((wanted, [], []))
            self._until = now + self._seconds
            self._used = time.process_time()
        used = time.process_time()
        if phase == "decode":
            self.blocks[-1][1].append(seconds)
            self.blocks[-1][2].append(used - self._used)
        self._used = used

    def ratios(self, name: str, processor: bool) -> list[float]:
        """Mean step of each block with a watcher over that of its neighbour without, by the wall or the processor."""
        pairs = [self.blocks[at : at + 2] for at in range(0, len(self.blocks) - 1, 2)]
        found = []
        for pair in pairs:
            means = {key: statistics.fmean(used if processor else wall) for key, wall, used in pair if wall}
            if set(means) == {name, ""}:
                found.append(means[name] / means[""])
        return found


def answered(url: str, times: int = 50) -> float:
    """Processor seconds of this process, where the endpoint is, for one answer; the client is another process."""
    client = "import sys, urllib.request\nfor _ in range(int(sys.argv[2])): urllib.request.urlopen(sys.argv[1]).read()"
    begin = time.process_time()
    subprocess.run([sys.executable, "-c", client, f"{url}/metrics", str(times)], check=True, timeout=120)
    return (time.process_time() - begin) / times


def main() -> int:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--block", type=float, default=12.0, help="seconds")
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
        answer = answered(url)
    print(f"| decode step of the demo, scraped every {INTERVAL_SECONDS:g} s / not | ratio | of pairs | at most |")
    print("|---|---|---|---|")
    met = alive
    for name, words in (("top", "top on the same host"), ("scrape", "only scrapes")):
        for processor, kind in ((False, "wall"), (True, "processor time")):
            ratios = blocks.ratios(name, processor)
            low, high = statistics.quantiles(ratios, n=4)[::2]
            ratio = statistics.median(ratios)
            met &= ratio <= MOST
            print(f"| {words}, {kind} | {ratio:.4f} | {len(ratios)}, quartiles {low:.3f} to {high:.3f} | {MOST} |")
    watched = sum(1 for name, *_ in blocks.blocks if name == "top") * options.block
    share = answer / INTERVAL_SECONDS
    met &= share <= MOST - 1
    print(
        f"| processor time of an answer ({1000 * answer:.1f} ms) / the interval | {share:.4f} | 50 | {MOST - 1:.2f} |"
    )
    print(f"\ntop itself used {used / watched:.1%} of a core")
    if not alive:
        print("a watcher ended before the measurement did", file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
