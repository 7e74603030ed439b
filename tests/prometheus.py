"""A real Prometheus for a test: scrapes given targets every second, and answers queries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port

START_SECONDS = 30


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus; `url` ends without a slash."""

    url: str

    def api(self, path: str, **parameters: str) -> Any:
        """`data` of an HTTP API call."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as reply:
            answer = json.load(reply)
        assert "success" == answer["status"], answer
        return answer["data"]

    def query(self, promql: str) -> list[dict[str, Any]]:
        """An instant query's result: a list of `{"metric": labels, "value": [time, text]}`."""
        return self.api("query", query=promql)["result"]

    def value(self, promql: str) -> float:
        """The value of a query that has exactly one series."""
        (series,) = self.query(promql)
        return float(series["value"][1])

    def wait(self, promql: str, seconds: float = 20) -> list[dict[str, Any]]:
        """The result of a query once it has one."""
        deadline = time.monotonic() + seconds
        while not (found := self.query(promql)):
            assert time.monotonic() < deadline, f"{promql} has had no result for {seconds} s"
            time.sleep(0.1)
        return found


def binary() -> str:
    """The prometheus binary; skips the test without one, or fails it where CI=true promises one."""
    found = shutil.which("prometheus")
    if found is None:
        reason = "the prometheus binary is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@contextmanager
def prometheus(
    folder: Path, targets: Sequence[str], rules: Sequence[Path] = (), interval: str = "1s", job: str = "moe"
) -> Iterator[Prometheus]:
    """Runs Prometheus with its data under `folder`, on a free port, until the with-block ends.

    `targets` are "host:port"; `rules` are rule files.
    """
    program = binary()
    port = free_port()
    configuration = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
    log = folder / "prometheus.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        _wait_until_ready(process, port, log)
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
