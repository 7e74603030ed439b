"""Starts and stops by the thousand: no thread, socket or memory is left beyond what the SDK keeps itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from conftest import fetch

import moe_telemetry as mt

CYCLES = int(os.environ.get("CYCLES", "600"))
LEAST = 200
"""Cycles until the process has what it needs once."""
PROGRAM = """
import gc, json, os, sys, threading, tracemalloc, urllib.request
import psutil
import moe_telemetry as mt
from opentelemetry.sdk.metrics import MeterProvider

process = psutil.Process()
recorder = mt.Recorder()

def cycle(number):
    with mt.start(port=0, recorder=recorder, num_layers=2) as telemetry:
        recorder.routed(0, {1, 2}, {1})
        if number % 10 == 0:
            urllib.request.urlopen(telemetry.url + "/metrics", timeout=20).read()

def provider(_):
    MeterProvider(shutdown_on_exit=False).shutdown()

def grown(call, times):
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(times):
        call(number)
    gc.collect()
    now = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (now - before) / times

times, least = int(sys.argv[1]), int(sys.argv[2])
for number in range(least):
    cycle(number)
gc.collect()
resident = process.memory_info().rss
for number in range(times):
    cycle(number)
gc.collect()
resident = (process.memory_info().rss - resident) / times
threads, descriptors = threading.active_count(), process.num_fds()
ours = grown(cycle, least)
found = {"ours": ours, "resident": resident}
found["threads"] = threading.active_count() - threads
found["descriptors"] = process.num_fds() - descriptors
grown(provider, least)
print(json.dumps({**found, "sdk": grown(provider, least)}))
"""
KIB = 1024.0


def test_cycles_leave_nothing() -> None:
    """Each start and stop takes at most 1 KiB for good, beyond what a bare MeterProvider takes; no thread, no file."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(CYCLES), str(LEAST)],
        capture_output=True,
        text=True,
        timeout=60 + CYCLES / 10,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout)
    print(f"{CYCLES} cycles: {json.dumps(found)}")
    assert KIB >= found["ours"] - found["sdk"]
    assert 3 * KIB + 1024 * KIB / CYCLES >= found["resident"]
    assert 0 == found["threads"]
    assert 0 >= found["descriptors"]


def test_scrapes_in_flight_at_every_stop(recorder) -> None:
    """Stopped again and again in the middle of four clients' scrapes: whole replies or none, and each stop is quick."""
    ended = threading.Event()
    ports: list[int] = []
    bad: list[object] = []

    def keep_scraping() -> int:
        whole = 0
        while not ended.is_set():
            if not ports:
                continue
            try:
                status, _, body = fetch(f"http://127.0.0.1:{ports[-1]}/metrics", 20)
            except OSError:
                continue
            except Exception as error:  # http.client: a reply that was cut
                bad.append(error)
                continue
            if status != 200 or not body.endswith(b"\n") or b"moe_run_info" not in body:
                bad.append((status, body[-200:]))
            whole += 1
        return whole

    slowest = 0.0
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(keep_scraping) for _ in range(4)]
        try:
            for _ in range(6):
                telemetry = mt.start(port=0, recorder=recorder, num_layers=12)
                ports.append(telemetry.port)
                time.sleep(0.1)
                begin = time.monotonic()
                telemetry.stop()
                slowest = max(slowest, time.monotonic() - begin)
        finally:
            ended.set()
    assert [] == bad
    assert 6 <= sum(client.result() for client in clients)
    assert 2.5 > slowest
