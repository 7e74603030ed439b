"""The demo as a person runs it: its own process, real model, real endpoint."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_telemetry import catalog as c
from moe_telemetry.trace_reader import read

mx = pytest.importorskip("mlx.core")

LAYERS, TOP_K = 12, 4
ZERO_IN_PREFILL = {c.SPECULATION_TOKENS.name}
MAY_BE_ZERO = {
    c.LOST,
    c.LAYER_FOLDED,
    c.HOOK_ERRORS,
    c.LAYER_OVERFLOWS,
    c.DEGRADED,
    c.PREFETCH_DROPPED,
    c.FORWARD_ACTIVE,
}
"""Faults, and what depends on how fast this machine is."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The expert weights, written once for all tests of this file."""
    return tmp_path_factory.mktemp("demo-cache")


def _command(cache, *options):
    return [sys.executable, "-m", "moe_telemetry", "demo", "--cache", str(cache), *map(str, options)]


def _run(cache, *options, env=None, timeout=120):
    environment = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.run(
        _command(cache, *options), capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


def _start(cache, *options):
    """A running demo and the address of its endpoint."""
    process = subprocess.Popen(
        _command(cache, "--port", 0, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if found := re.search(r"Metrics: (http://\S+)/metrics", line):
            return process, found[1]
    raise AssertionError(process.stderr.read())


def _get(url):
    return urllib.request.urlopen(url, timeout=30).read().decode()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where it writes its files."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="session")
def finished(cache, folder):
    """A run of 300 tokens: what it printed, and its snapshot."""
    file = folder / "s.json"
    done = _run(cache, "--tokens", 300, "--port", 0, "--snapshot", file, "--trace", folder / "trace")
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout, json.loads(file.read_text())


def _total(snapshot, metric, **labels):
    series = snapshot["metrics"][metric.name]["series"]
    return sum(found["value"] for found in series if labels.items() <= found["labels"].items())


def test_the_trace_has_every_lookup_of_the_run(finished, folder):
    """Of all layers and both phases, and its end."""
    found = read(str(folder / "trace"), finished[1]["run"]["run"])
    assert (12, 0, 12) == (found.end["layers"], found.end["left_out"], len(found.layers))
    for number, phase in enumerate(c.PHASES):
        calls = [experts for layer in found.layers.values() for at, experts in layer.calls() if at == number]
        assert _total(finished[1], c.LOOKUPS, phase=phase) == sum(map(len, calls))


@pytest.mark.parametrize("phase", c.PHASES)
def test_lookups_are_the_routed_experts(finished, phase):
    """Lookups by outcome sum to the routed experts of their phase, and all four outcomes occur in the run."""
    _, snapshot = finished
    outcomes = {outcome: _total(snapshot, c.LOOKUPS, phase=phase, outcome=outcome) for outcome in c.OUTCOMES}
    assert _total(snapshot, c.LAYER_EXPERTS, phase=phase) == sum(outcomes.values()) > 0
    assert all(outcomes.values())


def test_decode_of_one_token_routes_top_k(finished):
    """At seq 1 every layer's every union is top-k."""
    _, snapshot = finished
    layers = snapshot["unions"]["decode"]["1"]["layers"]
    assert {str(layer) for layer in range(LAYERS)} == set(layers)
    assert {(str(TOP_K),)} == {tuple(sizes) for sizes in layers.values()}


def test_exactly_the_tokens_asked_for_are_emitted(finished):
    """--tokens 300 decodes 300 tokens, the last verify pass cut to fit."""
    _, snapshot = finished
    assert 300 == _total(snapshot, c.TOKENS, phase="decode")


def test_healthy_run_is_in_its_bands(finished):
    """Hit rate, recall and acceptance of a healthy run, and nothing dropped on the way."""
    _, snapshot = finished
    lookups = _total(snapshot, c.LOOKUPS, phase="decode")
    assert 0.80 <= _total(snapshot, c.LOOKUPS, phase="decode", outcome="hit") / lookups <= 0.97
    recalled = _total(snapshot, c.PREDICTOR_EXPERTS, phase="decode", outcome="recalled")
    assert 0.5 <= recalled / _total(snapshot, c.PREDICTOR_EXPERTS, phase="decode") <= 0.9
    accepted = _total(snapshot, c.SPECULATION_TOKENS, outcome="accepted")
    assert 0.2 <= accepted / _total(snapshot, c.SPECULATION_TOKENS) <= 0.95
    assert 0 == _total(snapshot, c.LOST)


def test_output_names_the_endpoint_and_both_phases(finished):
    """The address first, decode and prefill apart in the summary."""
    output, _ = finished
    assert re.search(r"Metrics: http://127\.0\.0\.1:\d+/metrics", output)
    for words in (
        "decode",
        "prefill",
        "hit rate",
        "A: late (timing)",
        "A: evicted",
        "B: never",
        "union: p99 / max",
        "pool 16",
    ):
        assert words in output


def test_device_routing_has_the_totals_of_the_plain_run(cache, tmp_path):
    """Without prefetch, where nothing depends on timing: every counter, every union and the output, to the integer."""
    texts, snapshots = [], []
    for options in ((), ("--device-routing",)):
        file = tmp_path / "s.json"
        done = _run(cache, "--tokens", 30, "--no-prefetch", "--port", 0, "--snapshot", file, *options)
        assert (0, "") == (done.returncode, done.stderr)
        texts.append(done.stdout)
        snapshots.append(json.loads(file.read_text()))
    plain, device = snapshots
    for metric in c.counters():
        if metric is not c.PROCESS_CPU:
            found = (snapshot["metrics"].get(metric.name, {"series": []})["series"] for snapshot in snapshots)
            assert len({json.dumps(series) for series in found}) == 1, metric.name
    assert plain["unions"] == device["unions"]
    assert len({re.search(r"output ([0-9a-f]{16})", text)[1] for text in texts}) == 1
    assert _total(device, c.LAYER_CALLS) > 0 == _total(device, c.LOST)


def test_load_by_expert_is_known_with_device_routing_only(finished, cache, tmp_path):
    """Then each layer has the tokens of its passes, top-k times, and a busiest expert; else no such figure."""
    _, plain = finished
    assert ({}, False) == (plain["experts"], c.LOAD_PEAK.name in plain["metrics"])
    file = tmp_path / "s.json"
    done = _run(cache, "--tokens", 20, "--device-routing", "--port", 0, "--snapshot", file)
    assert (0, "") == (done.returncode, done.stderr)
    device = json.loads(file.read_text())
    passes = device["metrics"][c.FORWARD_DURATION.name]["series"]
    computed = sum(int(series["labels"]["seq"]) * series["count"] for series in passes)
    assert {str(layer): TOP_K * computed for layer in range(LAYERS)} == {
        layer: sum(tokens) for layer, tokens in device["experts"].items()
    }
    # Fewer calls than the peak looks back on: it is that of the whole run.
    expected = {layer: max(tokens) * len(tokens) / sum(tokens) for layer, tokens in device["experts"].items()}
    series = device["metrics"][c.LOAD_PEAK.name]["series"]
    assert expected == {found["labels"]["layer"]: found["value"] for found in series}


def test_a_fault_is_told(cache):
    """When a fault will be on, when it is on, and when it is over."""
    process, _ = _start(cache, "--fault", "bad-predictor", "--fault-after", 1, "--fault-for", 1)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "The fault is over." in line:
                break
    finally:
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert (0, "") == (process.returncode, errors)
    told = re.findall(r"^(?:Fault: .*|The fault .*)$", "".join(lines) + output, re.MULTILINE)
    assert [
        "Fault: bad-predictor after 1 s, for 1 s",
        "The fault bad-predictor is on.",
        "The fault is over.",
    ] == told


def test_table_fits_a_small_terminal(cache):
    """On 80 columns no line of the summary is cut or wrapped."""
    done = _run(cache, "--tokens", 20, "--port", 0, env={"COLUMNS": "80"})
    lines = done.stdout.split("Whole run")[1].splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert 20 >= len(lines)
    assert "…" not in done.stdout


def test_telemetry_changes_no_output(cache, finished):
    """The output bytes are the same without recording, and on a disk that costs nothing."""
    done = _run(cache, "--tokens", 300, "--no-telemetry", "--read-mbps", 100_000)
    assert (0, "") == (done.returncode, done.stderr)
    digest = r"output ([0-9a-f]{16})"
    assert re.search(digest, finished[0])[1] == re.search(digest, done.stdout)[1]
    assert "Metrics:" not in done.stdout


def test_scrape_holds_what_the_demo_can_produce(cache):
    """Every catalog metric, nonzero in both phases, within the series budget; Ctrl-C ends it cleanly."""
    process, url = _start(cache, "--device-routing")
    try:
        deadline = time.monotonic() + 90
        while missing := _missing(text := _get(f"{url}/metrics")):
            assert time.monotonic() < deadline, missing
            time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert (0, "") == (process.returncode, errors)
    assert "Whole run" in output
    assert "otel_metric_overflow" not in text
    assert len(text.splitlines()) < 2600


def _missing(text):
    """Name and phase of what the demo has not produced yet."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    missing = []
    for metric in c.CATALOG:
        if metric is c.MLX_MEMORY_LIMIT and not hasattr(mx, "get_memory_limit"):
            continue  # MLX tells it since 0.32.3
        name = metric.prometheus + ("_count" if metric.bounds else "")
        phases = c.PHASES if "phase" in metric.keys else (None,)
        for phase in phases:
            values = [sample.value for sample in samples.get(name, []) if phase in (None, sample.labels.get("phase"))]
            if not values or not (any(values) or metric in MAY_BE_ZERO):
                missing.append((name, phase))
    return missing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "no such folder/text"], "no text file"),
        (["--slots", "8"], "slots"),
        (["--slots", "65"], "slots"),
        (["--read-mbps", "0"], "read_mbps"),
        (["--tokens", "0"], "tokens"),
        (["--snapshot", "no such folder/s.json"], "cannot write the snapshot"),
        (["--host", "no.such.host.invalid"], "no address of this machine"),
        (["--port", "99999"], "port must be"),
        (["--no-telemetry", "--snapshot", "s.json"], "--no-telemetry"),
        (["--no-telemetry", "--trace", "t"], "--trace needs telemetry"),
        (["--trace", "no such folder/t"], "trace cannot be"),
        (["--fault-after", "3"], "need --fault"),
        (["--linger", "-1"], "--linger"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_2(cache, options, words):
    """What cannot work is one clear line on standard error."""
    done = _run(cache, "--tokens", 1, *options)
    assert 2 == done.returncode
    assert words in done.stderr
    assert 1 == len(done.stderr.splitlines())


def test_taken_port_is_one_line_and_exit_2(cache):
    """The line names the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run(cache, "--tokens", 1, "--port", port)
    assert 2 == done.returncode
    assert f"port {port}" in done.stderr
    assert 1 == len(done.stderr.splitlines())


def test_unwritable_cache_is_one_line_and_exit_2(tmp_path):
    """A cache folder that cannot be made is named."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = _run(blocked / "cache", "--tokens", 1, "--port", 0)
    assert 2 == done.returncode
    assert "cache" in done.stderr
    assert 1 == len(done.stderr.splitlines())


def test_disabled_sdk_still_runs_the_model(cache):
    """OTEL_SDK_DISABLED=true: no endpoint, the same model."""
    done = _run(cache, "--tokens", 5, env={"OTEL_SDK_DISABLED": "true"})
    assert (0, "") == (done.returncode, done.stderr)
    assert "Metrics:" not in done.stdout


def test_prometheus_holds_the_totals_of_the_snapshot(cache, tmp_path):
    """After the run has ended its counting, Prometheus' totals are the snapshot's, for every counter."""
    from prometheus import prometheus

    file = tmp_path / "s.json"
    process, url = _start(cache, "--tokens", 150, "--snapshot", file, "--linger", 60)
    address = url.removeprefix("http://")
    with prometheus(tmp_path, targets=[address]) as server:
        process.communicate(timeout=90)
        assert 0 == process.returncode
        snapshot = json.loads(Path(file).read_text())
        wrong = []
        for metric in c.counters():
            if metric is c.PROCESS_CPU:  # goes on counting
                continue
            found = {
                tuple(sample["metric"].get(label.prometheus, "") for label in metric.labels): float(sample["value"][1])
                for sample in server.query(f"last_over_time({metric.prometheus}[5m])")
            }
            expected = {
                tuple(series["labels"][key] for key in metric.keys): float(series["value"])
                for series in snapshot["metrics"].get(metric.name, {"series": []})["series"]
            }
            if found != expected:
                wrong.append(metric.name)
        assert [] == wrong


def test_the_snapshot_is_whole_while_the_endpoint_lingers(cache, tmp_path):
    """Whoever waits for the end of counting may read the file before the process ends."""
    file = tmp_path / "s.json"
    process, _ = _start(cache, "--tokens", 5, "--snapshot", file, "--linger", 60)
    try:
        for line in process.stdout:
            if "tokens decoded" in line:
                break
        deadline = time.monotonic() + 10
        while not file.read_text().endswith("}"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert process.poll() is None
        assert 5 == _total(json.loads(file.read_text()), c.TOKENS, phase="decode")
    finally:
        process.kill()
        process.communicate()
