"""Fixtures and helpers that several test modules share."""

from __future__ import annotations

import fcntl
import http.client
import os
import random
import re
import signal
import socket
import tempfile
import urllib.request
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import moe_telemetry as mt

PLAIN = "text/plain;version=0.0.4"
PORTS = range(15_000, 32_000)
"""Below those that systems give to outgoing connections and to whoever asks for any port."""
LONGEST = (
    "test_end_to_end",
    "test_rules_scenarios",
    "test_demo_command",
    "test_rules_faults",
    "test_docs_shell",
    "test_demo_engine",
    "test_dashboards_live",
    "test_mlx_lm_server",
    "test_mlx_lm_instrument",
    "test_rules_prometheus",
    "test_checks",
    "test_instrumentor",
    "test_stack",
    "test_ends",
    "test_mlx_lm_families",
    "test_dashboards_counted",
    "test_top_screen",
    "test_processes",
    "test_endpoint",
    "test_floor",
    "test_cycles",
)
"""The files that take longest: given out first, so that in the end no process waits for another."""
LOCK = pytest.StashKey[IO[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """With `-n auto` one more than processors, since tests wait for processes of their own, and at most 4."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files under tests/golden")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files are given out as wholes, since their tests share fixtures, and tests marked `alone` as one more."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "alone" if nodeid.endswith(("[alone]", "-alone]")) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Files(config, log)


def _alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The name of a test marked `alone` says so: it is all that the scheduler, in another process, knows of it."""
    if metafunc.definition.get_closest_marker("alone"):
        metafunc.fixturenames.append("alone")
        metafunc.parametrize("alone", [True], ids=["alone"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several processes the longest files come first, and what runs alone last."""
    if hasattr(config, "workerinput"):
        order = {name: number for number, name in enumerate(LONGEST, -len(LONGEST))}
        items.sort(key=lambda item: (_alone(item), order.get(item.path.stem, 0)))


def pytest_configure(config: pytest.Config) -> None:
    """Opens the lock that the processes of one run have in common."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a script starts what it does not wait for, and the programs that tests interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        path = Path(tempfile.gettempdir()) / f"moe-telemetry-tests-{config.workerinput['testrunuid']}"
        config.stash[LOCK] = path.open("w+")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes it: all processes have opened it by now."""
    if LOCK in config.stash:
        config.stash[LOCK].close()
        Path(config.stash[LOCK].name).unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Among several processes, a test marked `alone` waits until the others' tests have ended, and holds theirs up."""
    lock = item.config.stash.get(LOCK, None)
    if lock is None:
        return (yield)
    fcntl.lockf(lock, fcntl.LOCK_EX if _alone(item) else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        fcntl.lockf(lock, fcntl.LOCK_UN)


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


def stable_repr(value: object) -> str:
    """`repr` without addresses: a parameter's name, which must be the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


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
    """A port that was free a moment ago, and that nobody gets who asks for any."""
    while True:
        with socket.socket() as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = random.SystemRandom().choice(PORTS)
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def keep_alive(telemetry: Any) -> http.client.HTTPConnection:
    """A connection that has made one scrape and stays open, as Prometheus keeps it."""
    connection = http.client.HTTPConnection("127.0.0.1", telemetry.port, timeout=10)
    connection.request("GET", "/metrics")
    assert connection.getresponse().read()
    return connection
