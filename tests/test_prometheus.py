"""A real Prometheus scrapes a telemetry: what it stored in the end is the snapshot, series by series."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

from conftest import snapshot_samples
from prometheus import prometheus

SCRAPES = 3
SECONDS = 4.0


def record(recorder, done: threading.Event) -> None:
    """Passes of both phases, as a runtime makes them."""
    number = 0
    while not done.is_set():
        number += 1
        tokens = 64 if number % 20 == 0 else 1 + number % 3
        recorder.forward(tokens)
        for layer in range(4):
            routed = {number % 7, number % 11 + 20, layer + 40}
            recorder.routed(layer, routed, resident={number % 7, 41}, predicted={41, 42, number % 5}, ready={41})
            recorder.prefetch("promote", 0.0001 * (number % 5))
            recorder.block("fetch", 0.002)
        recorder.read("demand", 4096 * number, 0.001 * (number % 9))
        recorder.tokens(tokens)
        recorder.forward_done(0.03 + 0.01 * (number % 4))
        if number % 10 == 0:
            recorder.request(0.2, 1.5, 12)
        time.sleep(0.002)


def test_what_prometheus_stored_is_the_snapshot(tmp_path: Path, start, recorder) -> None:
    """After recording has stopped every counter, and every histogram's count and sum, equals the snapshot's."""
    telemetry = start(num_layers=4, runtime="a b\\c", model='m"q"')
    with prometheus(tmp_path, targets=[f"127.0.0.1:{telemetry.port}"]) as server:
        done = threading.Event()
        workload = threading.Thread(target=record, args=(recorder, done))
        workload.start()
        server.wait("moe_run_info")
        time.sleep(SECONDS)
        done.set()
        workload.join()
        end = time.time()
        # A scrape that began behind the last event.
        server.wait(f'timestamp(up{{job="moe"}}) > {end + 0.1}')
        wanted = snapshot_samples(telemetry.snapshot())
        stored = {
            (
                series["metric"].pop("__name__"),
                tuple(sorted((k, v) for k, v in series["metric"].items() if k not in ("job", "instance"))),
            ): float(series["value"][1])
            for series in server.query('{job="moe"}')
        }
        assert SCRAPES <= server.value("count_over_time(up[1m])")
        assert 1 == server.value("min_over_time(up[1m])")
        rate = server.value('sum(rate(moe_expert_lookups_total{phase="decode"}[4s]))')
        info = {series["metric"]["model"] for series in server.query("moe_run_info")}
    wanted = {key: value for key, value in wanted.items() if not key[0].startswith("process_")}
    assert 100 < len(wanted)
    assert 50 < sum(value > 0 for value in wanted.values())
    assert wanted == {key: stored.get(key) for key in wanted}
    known = re.compile(r"_(count|sum|total)$")
    unexpected = {
        key for key in stored if key[0].startswith(("moe_", "gen_ai_")) and known.search(key[0]) and key not in wanted
    }
    assert set() == unexpected
    assert 0 < rate
    assert {'m"q"'} == info


def test_a_restart_on_the_same_port_is_found_again(tmp_path: Path, start, recorder) -> None:
    """Prometheus, which keeps its connection, sees the next telemetry on the port, and not the stopped one."""
    first = start(run="first")
    port = first.port
    with prometheus(tmp_path, targets=[f"127.0.0.1:{port}"]) as server:
        server.wait('moe_run_info{run=~"first .*"}')
        first.stop()
        start(port=port, run="second")
        recorder.tokens(5)
        server.wait('moe_run_info{run=~"second .*"}')
        server.wait('moe_tokens_total{phase="decode"} == 5')
        assert 1 == len(server.query("moe_run_info"))
