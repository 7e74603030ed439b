"""The lowest allowed versions, and environments that lack a package: same text, or a message that names the remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import golden_run
import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"
UNREACHABLE = re.compile(r"NewConnectionError|ConnectionError|Temporary failure|Network is unreachable|timed out", re.I)

EVERY_HOOK = """
import moe_telemetry as mt
import sys
sys.path.insert(0, {tests!r})
import golden_run
golden_run.record(mt.recorder)
with mt.recorder.timed(mt.recorder.block, "fetch"):
    pass
assert type(mt.recorder) is mt.Recorder
"""


def floors() -> list[str]:
    """`name==lowest` of each dependency that is installed everywhere."""
    text = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r'^  "([\w-]+)>=([\w.]+)",', block, re.MULTILINE)
    return [f"{name}=={_full(version)}" for name, version in found]


def _full(version: str) -> str:
    """1.44 as the first release of that line, 1.44.0."""
    return version if "b" in version or version.count(".") > 1 else f"{version}.0"


@pytest.fixture(scope="module")
def lowest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the lowest allowed versions."""
    folder = tmp_path_factory.mktemp("lowest")
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--retries=1", "--timeout=15", *floors()],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("pip cannot reach a package index to fetch the lowest allowed versions")
    assert 0 == done.returncode, done.stderr
    return python


def run(python: Path | str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
    )


def test_floors_are_read() -> None:
    """The lowest versions come from pyproject.toml, the SDK's among them."""
    names = [floor.partition("==")[0] for floor in floors()]
    assert ["opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-prometheus", "psutil"] == [
        name for name in names if not name.startswith("prometheus")
    ]


def test_lowest_versions_give_the_golden_text(lowest: Path) -> None:
    """With the lowest allowed versions the golden run is scraped as the committed text."""
    done = run(lowest, Path(__file__).parent / "golden_run.py", "text")
    assert 0 == done.returncode, done.stderr
    assert GOLDEN.read_text() == done.stdout


def test_lowest_versions_give_the_same_openmetrics(lowest: Path) -> None:
    """So is OpenMetrics, as with the versions that are installed here."""
    done = run(lowest, Path(__file__).parent / "golden_run.py", "openmetrics")
    assert 0 == done.returncode, done.stderr
    assert golden_run.scraped("openmetrics") == done.stdout


def test_lowest_versions_start_and_stop_on_an_applications_provider(lowest: Path) -> None:
    """Wrapping, adding and taking out readers works with the lowest SDK, and leaves the provider as it was."""
    code = """
import moe_telemetry as mt
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
memory = InMemoryMetricReader()
provider = MeterProvider([memory])
for _ in range(3):
    with mt.start(port=0, meter_provider=provider):
        mt.recorder.tokens(1)
        names = [m.name for r in memory.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics]
        assert "moe.tokens" in names and len(set(names)) == len(names), names
assert "_receive_metrics" not in vars(memory)
assert len(provider._measurement_consumer._reader_storages) == 1
"""
    done = run(lowest, "-c", code)
    assert (0, "") == (done.returncode, done.stderr)


def test_otlp_without_its_exporter_names_the_extra(lowest: Path) -> None:
    """start(otlp=True) without the exporter says what to install, and hooks stay off."""
    code = """
import moe_telemetry as mt
try:
    mt.start(port=0, otlp=True)
except mt.ConfigurationError as error:
    print(error)
assert type(mt.recorder) is mt.Recorder
"""
    done = run(lowest, "-c", code)
    assert "OTLP over http/protobuf needs a package that is not installed: pip install 'moe-telemetry[otlp]'\n" == (
        done.stdout
    ), done.stderr


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment without any package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def test_without_any_package_import_works_and_hooks_are_no_ops(bare: Path) -> None:
    """Neither mlx nor OpenTelemetry nor psutil is needed to import and to call every hook."""
    done = run(bare, "-c", EVERY_HOOK.format(tests=str(Path(__file__).parent)))
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


def test_without_opentelemetry_start_names_what_to_install(bare: Path) -> None:
    """start() without its packages is a ConfigurationError of one line with the command."""
    code = """
import moe_telemetry as mt
try:
    mt.start(port=0)
except mt.ConfigurationError as error:
    print(error)
"""
    done = run(bare, "-c", code)
    assert re.fullmatch(
        r"moe_telemetry\.start needs [\w.]+, which is not installed: pip install moe-telemetry\n", done.stdout
    ), done.stdout + done.stderr


def test_start_does_not_need_mlx(lowest: Path) -> None:
    """Without mlx everything works but MLX's memory, which is absent."""
    code = """
import moe_telemetry as mt, sys
with mt.start(port=0) as telemetry:
    mt.recorder.tokens(1)
    names = telemetry.snapshot()["metrics"]
assert "mlx.memory" not in names and "moe.tokens" in names
assert not [name for name in sys.modules if name.partition(".")[0] == "mlx"]
"""
    done = run(lowest, "-c", code)
    assert (0, "") == (done.returncode, done.stderr)


def test_importing_is_cheap() -> None:
    """Importing the package loads neither mlx, OpenTelemetry, psutil, prometheus_client nor NumPy."""
    code = (
        "import sys, moe_telemetry\n"
        "heavy = {'mlx', 'opentelemetry', 'psutil', 'prometheus_client', 'numpy', 'http', 'ssl'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    assert "[]\n" == run(sys.executable, "-c", code).stdout


def test_every_public_name_is_there() -> None:
    """`__all__` names what can be imported, and an unknown name is an AttributeError."""
    import moe_telemetry as mt

    assert [] == [name for name in mt.__all__ if getattr(mt, name, None) is None]
    with pytest.raises(AttributeError, match="no_such_name"):
        mt.no_such_name  # noqa: B018
