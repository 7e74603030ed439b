"""Fixtures and helpers that several test modules share."""

from __future__ import annotations

import http.client
import os
import socket
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import moe_telemetry as mt

PLAIN = "text/plain;version=0.0.4"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files under tests/golden")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests start without the variables that telemetry reads."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "MOE_TELEMETRY_")) and name != "MOE_TELEMETRY_PARENT":
            monkeypatch.delenv(name)


@pytest.fixture
def recorder() -> mt.Recorder:
    """A recorder of the test's own."""
    return mt.Recorder()


@pytest.fixture
def start(recorder: mt.Recorder) -> Iterator[Callable[..., Any]]:
    """`start()` on a free port, for `recorder` unless told otherwise; stopped behind the test."""
    started: list[Any] = []

    def begin(**options: Any) -> Any:
        if not {"port", "meter_provider"} & set(options):
            options["port"] = 0
        telemetry = mt.start(**{"model": "test-moe", "runtime": "test", "recorder": recorder, **options})
        started.append(telemetry)
        return telemetry

    yield begin
    for telemetry in reversed(started):
        telemetry.stop()


def fetch(url: str, timeout: float = 10, **headers: str) -> tuple[int, Any, bytes]:
    """Status, headers and body of a GET; keyword names are header names with `_` for `-`."""
    asked = urllib.request.Request(url, headers={key.replace("_", "-"): value for key, value in headers.items()})
    try:
        with urllib.request.urlopen(asked, timeout=timeout) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def scrape(telemetry: Any, timeout: float = 10) -> str:
    """The text of a scrape."""
    status, _, body = fetch(f"{telemetry.url}/metrics", timeout, Accept=PLAIN)
    assert status == 200
    return body.decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """`{(name, sorted labels): value}` of an exposition; fails on a series that stands twice."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} stands twice"
            found[key] = sample.value
    return found


def total(text: str, name: str, **labels: str) -> float:
    """Sum of the samples of that name that have these labels."""
    wanted = set(labels.items())
    return sum(value for (found, pairs), value in samples(text).items() if found == name and wanted <= set(pairs))


def snapshot_samples(snapshot: dict[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scrape must show of a snapshot's counters and histograms (count and sum)."""
    from moe_telemetry.catalog import BY_NAME

    found = {}
    for name, metric in snapshot["metrics"].items():
        entry = BY_NAME[name]
        if metric["kind"] == "gauge":
            continue
        for series in metric["series"]:
            labels = tuple(sorted((key.replace(".", "_"), value) for key, value in series["labels"].items()))
            if metric["kind"] == "counter":
                found[entry.prometheus, labels] = series["value"]
            else:
                found[f"{entry.prometheus}_count", labels] = series["count"]
                found[f"{entry.prometheus}_sum", labels] = series["sum"]
    return found


def raw(port: int, request: bytes, host: str = "127.0.0.1", timeout: float = 10) -> bytes:
    """What the server answers to these bytes, until it closes."""
    with socket.create_connection((host, port), timeout) as connection:
        connection.sendall(request)
        parts = []
        try:
            while part := connection.recv(65_536):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def keep_alive(telemetry: Any) -> http.client.HTTPConnection:
    """A connection that has made one scrape and stays open, as Prometheus keeps it."""
    connection = http.client.HTTPConnection("127.0.0.1", telemetry.port, timeout=10)
    connection.request("GET", "/metrics")
    assert connection.getresponse().read()
    return connection
