"""A real Alertmanager with the generated configuration: what silences what."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port
from monitoring import promtool

from moe_telemetry.monitoring import servers
from moe_telemetry.monitoring.config import Config

START_SECONDS = 30


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[str]:
    """Its address; nobody listens at the webhook's."""
    debian = "prometheus-alertmanager"
    program = promtool.tool(debian if shutil.which(debian) else "alertmanager")
    port = free_port()
    (tmp_path / "alertmanager.yml").write_text(servers.alertmanager(Config(webhook_url="http://127.0.0.1:1/")))
    options = [
        f"--config.file={tmp_path / 'alertmanager.yml'}",
        f"--storage.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    log = tmp_path / "alertmanager.log"
    with log.open("w") as output:
        process = subprocess.Popen([program, *options], stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def call(url: str, body: Any = None) -> Any:
    """An answer of the API."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read() or "null")


def test_what_silences_what(alertmanager: str) -> None:
    """Target down silences its instance's others, a drop its low warning; nothing silences a drop but target down."""
    decode = {"phase": "decode"}
    given = [
        ("down", "MoeTargetDown", {"severity": "critical", "expect": "always"}),
        ("down", "MoePredictorRecallDrop", {"severity": "critical", **decode}),
        ("down", "MoeSeriesOverflow", {"severity": "warning"}),
        ("bad", "MoePredictorRecallDrop", {"severity": "critical", **decode}),
        ("bad", "MoePredictorRecallLow", {"severity": "warning", **decode}),
        ("bad", "MoeDecodeHitRateLow", {"severity": "warning", **decode}),
        ("poor", "MoePredictorRecallLow", {"severity": "warning", **decode}),
        ("poor", "MoeDecodeHitRateDrop", {"severity": "critical", **decode}),
        ("poor", "MoeDecodeHitRateLow", {"severity": "warning", **decode}),
    ]
    alerts = [
        {"labels": {"alertname": name, "job": "moe", "instance": instance, **labels}}
        for instance, name, labels in given
    ]

    call(f"{alertmanager}/api/v2/alerts", alerts)
    found = call(f"{alertmanager}/api/v2/alerts")

    silenced = {
        (alert["labels"]["instance"], alert["labels"]["alertname"]) for alert in found if alert["status"]["inhibitedBy"]
    }
    assert len(given) == len(found)
    assert {
        ("down", "MoePredictorRecallDrop"),
        ("down", "MoeSeriesOverflow"),
        ("bad", "MoePredictorRecallLow"),
        ("poor", "MoeDecodeHitRateLow"),
    } == silenced
