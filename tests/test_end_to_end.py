"""From a fault in a real model to a webhook, and back: demo, Prometheus with the rules, Alertmanager, receiver.

Windows and waits are scaled down by 60, so that the hour of a baseline is a minute. One fault is in the suite;
`python tests/test_end_to_end.py` goes through all of them (12 minutes).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import free_port

pytest.importorskip("mlx.core")
pytest.importorskip("grafana_foundation_sdk")
from moe_telemetry.monitoring import export, stack
from moe_telemetry.monitoring.config import Config

FACTOR = 60.0


@dataclass
class Received:
    """Alerts as a webhook got them: (status, name) in order of arrival, each once."""

    seen: list[tuple[str, str]] = field(default_factory=list)

    def names(self, status: str) -> set[str]:
        """Names of the alerts that arrived with that status."""
        return {name for found, name in self.seen if found == status}


@contextmanager
def webhook() -> Iterator[tuple[str, Received]]:
    """A receiver on loopback: its address, and what it got."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in body["alerts"]:
                entry = (alert["status"], alert["labels"]["alertname"])
                if entry not in received.seen:
                    received.seen.append(entry)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", received
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Site:
    """A running Prometheus and Alertmanager over one demo."""

    url: str
    received: Received
    demo: subprocess.Popen[str]

    def firing(self) -> set[str]:
        """Alerts that fire now."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=5) as reply:
            alerts = json.load(reply)["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def watch(self, seconds: float) -> set[str]:
        """Every alert that fired within so many seconds."""
        seen: set[str] = set()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            seen |= self.firing()
            time.sleep(0.5)
        return seen

    def wait_for(self, status: str, name: str, seconds: float) -> bool:
        """Whether the webhook gets an alert of that status in time."""
        deadline = time.monotonic() + seconds
        while (status, name) not in self.received.seen:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True


@contextmanager
def site(folder: Path, cache: Path, *options: object, expect: bool = False) -> Iterator[Site]:
    """A demo with these options, scraped and judged; `expect` marks its target as one that must be there."""
    programs = {program: program.find() for program in (stack.ALERTMANAGER, stack.PROMETHEUS)}
    missing = [program.name for program, path in programs.items() if path is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    with ExitStack() as resources:
        address, received = resources.enter_context(webhook())
        command = [sys.executable, "-m", "moe_telemetry", "demo", "--port", "0", "--cache", str(cache)]
        demo = subprocess.Popen([*command, *map(str, options)], stdout=subprocess.PIPE, text=True)
        resources.callback(_end, demo)
        url = next(line for line in demo.stdout or [] if line.startswith("Metrics: ")).split("/metrics")[0]
        threading.Thread(target=(demo.stdout or []).__class__.read, args=(demo.stdout,), daemon=True).start()
        target = url.rpartition("/")[2]
        ports = {program: free_port() for program in stack.PROGRAMS}
        config = replace(
            Config().scaled(FACTOR),
            targets=(target,),
            names=(),
            alertmanager=f"127.0.0.1:{ports[stack.ALERTMANAGER]}",
            webhook_url=address,
        )
        files = folder / "dashboards"
        export.write(config, files)
        if expect:
            entry = f'- {{targets: ["{target}"], labels: {{expect: always}}}}\n'
            (files / "prometheus" / "targets" / "hosts.yml").write_text(entry)
        for program, path in programs.items():
            process = stack._start(program, str(path), files, folder, ports)
            resources.callback(stack._end, process)
            stack._wait(program, process, ports[program], folder, threading.Event())
        yield Site(f"http://127.0.0.1:{ports[stack.PROMETHEUS]}", received, demo)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The expert weights."""
    return tmp_path_factory.mktemp("demo-cache")


def test_a_bad_predictor_reaches_the_webhook_and_a_killed_run_is_down(tmp_path: Path, cache: Path) -> None:
    """A healthy run fires nothing; the fault's drop arrives and resolves; a killed run on a marked target is down."""
    options = ("--fault", "bad-predictor", "--fault-after", 70, "--fault-for", 25)
    with site(tmp_path, cache, *options, expect=True) as running:
        assert set() == running.watch(60)
        assert running.wait_for("firing", "MoePredictorRecallDrop", 40)
        assert running.wait_for("resolved", "MoePredictorRecallDrop", 60)
        deadline = time.monotonic() + 60
        while running.firing():
            assert time.monotonic() < deadline
            time.sleep(0.5)
        running.demo.send_signal(signal.SIGKILL)
        assert {"MoeTargetDown"} == running.watch(15)
        assert ("firing", "MoeTargetDown") in running.received.seen


def test_a_run_that_ends_by_itself_fires_nothing(tmp_path: Path, cache: Path) -> None:
    """On an unmarked target the end of a run is no outage."""
    with site(tmp_path, cache, "--tokens", 300) as running:
        running.demo.wait(60)
        assert set() == running.watch(15)
    assert [] == running.received.seen


FAULTS = {
    "slow-disk": "MoePrefetchLate",
    "small-pool": "MoeUnionExceedsPool",
    "bad-predictor": "MoePredictorRecallDrop",
}


def main() -> int:
    """Every fault in turn: what fired before it, during it, and whether it resolved."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for fault, alert in FAULTS.items():
            place = Path(folder) / fault
            place.mkdir()
            options = ("--fault", fault, "--fault-after", 70, "--fault-for", 30)
            with site(place, Path(folder) / "cache", *options) as running:
                healthy = running.watch(60)
                fired = running.wait_for("firing", alert, 60)
                resolved = running.wait_for("resolved", alert, 90)
                names = ", ".join(sorted(running.received.names("firing")))
                print(f"| {fault} | {', '.join(healthy) or 'nothing'} | {names} | {resolved} |", flush=True)
                failed |= bool(healthy) or not fired or not resolved
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
