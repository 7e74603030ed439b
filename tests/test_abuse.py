"""Hostile and many clients at once: bounds hold, a good client is served, hooks count on, and nothing is left.

`python benchmarks/abuse.py` measures each kind apart, with the decode steps beside it; limits here are wider.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import samples, scrape

from moe_telemetry import connections

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CLIENTS = """
import os, sys, threading
sys.path.insert(0, {benchmarks!r})
import clients
os.nice(5)
ended = threading.Event()
for name in {names!r}:
    threading.Thread(target=getattr(clients, name), args=({port}, ended), daemon=True).start()
print("attack", flush=True)
sys.stdin.read()
os._exit(0)
"""
LONGEST = 4.0
"""Seconds of a good scrape on a machine that runs other tests."""


@contextmanager
def clients(port: int, *names: str) -> Iterator[None]:
    """Kinds of `benchmarks/clients.py`, in a process of their own that ends as if it was killed."""
    code = CLIENTS.format(benchmarks=str(BENCHMARKS), names=names, port=port)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert "attack\n" == process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "names",
    [
        ("half_requests", "drips"),
        ("scrapers", "snapshots", "pipelines"),
        ("slow_readers", "large_headers", "vanishing"),
    ],
    ids=["slow to ask", "many", "bad"],
)
def test_good_clients_are_served(names: tuple[str, ...], start, recorder) -> None:
    """Whatever others do, scrapes are whole, threads, sockets and memory bounded, totals exact, and all is reaped."""
    telemetry = start(num_layers=24)
    server = telemetry._endpoint._server
    recorder.routed(3, {1, 2}, {1})
    scrape(telemetry)
    process = psutil.Process()
    before, files, memory = threading.active_count(), process.num_fds(), process.memory_info().rss
    most_threads = most_files = made = 0
    longest = 0.0
    with clients(telemetry.port, *names):
        ends = time.monotonic() + 2.5
        while time.monotonic() < ends:
            for _ in range(100):
                recorder.routed(3, {1, 2}, {1})
                recorder.tokens(1)
            made += 100
            begin = time.monotonic()
            text = scrape(telemetry, timeout=20)
            longest = max(longest, time.monotonic() - begin)
            assert made == samples(text)["moe_tokens_total", (("phase", "decode"),)]
            most_threads = max(most_threads, threading.active_count() - before)
            most_files = max(most_files, process.num_fds() - files)
            time.sleep(0.05)
        grown = process.memory_info().rss - memory
    print(f"{names}: longest {longest:.2f} s, threads {most_threads}, files {most_files}, {grown / 2**20:.1f} MiB")
    assert LONGEST > longest
    assert connections.MAX_CONNECTIONS + connections.MAX_ENDING >= most_threads
    assert connections.MAX_CONNECTIONS + connections.MAX_ENDING + 2 >= most_files  # one is just accepted, one closed
    assert 48 * 2**20 > grown
    deadline = time.monotonic() + 8
    while (server._connections or process.num_fds() > files) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server._connections
    assert files >= process.num_fds()
    assert before >= threading.active_count()
