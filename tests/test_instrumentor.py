"""OpenTelemetry's auto-instrumentation: telemetry and mlx_lm's instrumentation, with a host's provider and without."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("opentelemetry.instrumentation.instrumentor")
pytest.importorskip("mlx_lm")
from mlx_lm_tiny import save

from moe_telemetry.integrations.instrumentor import MoeInstrumentor

BIN = Path(sys.executable).parent
TIMEOUT = 120
NO_HOST = {"OTEL_PYTHON_CONFIGURATOR": "none", "OTEL_METRICS_EXPORTER": "none"}
"""No SDK is set up, also where OpenTelemetry's distro is installed."""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is somebody else's."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def _instrumented(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    if not (BIN / "opentelemetry-instrument").exists():
        pytest.skip("opentelemetry-instrument is not installed")
    path = os.pathsep.join((str(BIN), os.environ["PATH"]))  # as in an activated environment
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}  # no test's leavings
    env = {**kept, "PATH": path, "OTEL_TRACES_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none", **environment}
    command = [str(BIN / "opentelemetry-instrument"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, env=env, check=False)


def _script(folder: Path, text: str) -> list[str]:
    (folder / "script.py").write_text(text)
    return [sys.executable, "script.py", "--model", "org/tiny"]


def test_without_a_host_it_serves_and_undoes_both(tmp_path):
    """Nothing is loaded before mlx_lm is imported; then it serves and records; uninstrument restores and stops."""
    done = _instrumented(
        _script(
            tmp_path,
            """
import sys, urllib.request
assert "moe_telemetry.telemetry" not in sys.modules
import mlx_lm
from moe_telemetry import recorder as rec
from moe_telemetry.integrations import mlx_lm as ours
from moe_telemetry.integrations.instrumentor import MoeInstrumentor
from mlx_lm.models.switch_layers import SwitchGLU
instrumentor = MoeInstrumentor()
assert instrumentor.is_instrumented_by_opentelemetry and ours.instrumented()
patched = SwitchGLU.__call__
rec.tokens(3, "decode")
url = instrumentor.telemetry.url
print(urllib.request.urlopen(url + "/metrics").read().decode())
instrumentor.uninstrument()
assert not ours.instrumented() and SwitchGLU.__call__ is not patched
try:
    urllib.request.urlopen(url)
except OSError:
    print("closed", type(rec).__name__)
instrumentor.instrument(port=0, model="second", unknown_to_us=1)
print(instrumentor.telemetry.snapshot()["run"]["model"], ours.instrumented(), SwitchGLU.__call__ is not patched)
""",
        ),
        tmp_path,
        OTEL_EXPORTER_PROMETHEUS_PORT="0",
        **NO_HOST,
    )
    assert 0 == done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert 'moe_tokens_total{phase="decode"} 3.0' in done.stdout
    assert 'moe_run_info{model="tiny",' in done.stdout
    assert 'runtime="mlx_lm"' in done.stdout
    assert ["closed Recorder", "second True True"] == done.stdout.splitlines()[-2:]


def test_a_hosts_exporter_gets_our_points_also_where_our_port_is_taken(tmp_path, taken):
    """The host's provider exports its own instruments and ours; an endpoint is not worth losing that."""
    pytest.importorskip("opentelemetry.distro")
    done = _instrumented(
        _script(
            tmp_path,
            """
from opentelemetry import metrics
metrics.get_meter("host").create_counter("host.events").add(1)
import mlx_lm
from moe_telemetry import recorder as rec
rec.tokens(3, "decode")
""",
        ),
        tmp_path,
        OTEL_METRICS_EXPORTER="console",
        OTEL_EXPORTER_PROMETHEUS_PORT=str(taken),
    )
    assert (0, "") == (done.returncode, done.stderr)
    found = {}
    for text in done.stdout.split('{\n    "resource_metrics"')[1:]:  # what each export has
        (resource,) = json.loads(f'{{"resource_metrics"{text}')["resource_metrics"]
        found.update({metric["name"]: metric for scope in resource["scope_metrics"] for metric in scope["metrics"]})
    assert {"host.events", "moe.tokens", "moe.run.info"} <= set(found)
    decoded = [each for each in found["moe.tokens"]["data"]["data_points"] if each["attributes"]["phase"] == "decode"]
    assert [3] == [each["value"] for each in decoded]


def test_nothing_stops_the_program(tmp_path, taken):
    """A taken port without a host: the output is whole, and one line says why."""
    done = _instrumented(
        _script(tmp_path, "import mlx_lm, sys; print('whole'); sys.exit(5)"),
        tmp_path,
        OTEL_EXPORTER_PROMETHEUS_PORT=str(taken),
        **NO_HOST,
    )
    assert (5, "whole\n") == (done.returncode, done.stdout)
    told = [line for line in done.stderr.splitlines() if "moe_telemetry" in line]
    assert [True] == [line.startswith("the program runs without moe_telemetry: cannot serve metrics") for line in told]


def test_mlx_lm_generate_is_recorded(tmp_path):
    """The command itself, with a tiny model: the same output as alone, and its tokens in the totals of the run."""
    model = save(tmp_path / "tiny-moe")
    words = ["mlx_lm.generate", "--model", str(model), "--prompt", "w5 w9", "--max-tokens", "9", "--verbose", "False"]
    environment = {"OTEL_EXPORTER_PROMETHEUS_PORT": "0", "MOE_TELEMETRY_SNAPSHOT_FILE": str(tmp_path / "run.json")}
    watched = _instrumented(words, tmp_path, **environment, **NO_HOST)
    alone = subprocess.run(
        [shutil.which(words[0]) or BIN / words[0], *words[1:]], capture_output=True, text=True, check=True
    )
    assert (0, alone.stdout) == (watched.returncode, watched.stdout), watched.stderr
    snapshot = json.loads((tmp_path / "run.json").read_text())
    assert ("tiny-moe", "mlx_lm") == (snapshot["run"]["model"], snapshot["run"]["runtime"])
    tokens = {each["labels"]["phase"]: each["value"] for each in snapshot["metrics"]["moe.tokens"]["series"]}
    assert 9 == tokens["decode"]
    assert {"0", "1", "2"} == set(snapshot["unions"]["decode"]["1"]["layers"])


def test_its_dependencies_are_those_of_the_extras():
    """What the instrumentor says, what auto-instrumentation reads, and what is installed for it are one range."""
    named = [Requirement(text) for text in requires("moe-telemetry") or ()]
    (said,) = MoeInstrumentor().instrumentation_dependencies()
    for extra in ("instruments", "mlx-lm"):
        asked = [each for each in named if each.name == "mlx-lm" and each.marker.evaluate({"extra": extra})]
        assert [Requirement(said).specifier] == [each.specifier for each in asked]
