"""What is built: the wheel and the source archive have what they must, and the commands work from the wheel alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import free_port

from moe_telemetry.version import __version__

pytest.importorskip("hatchling", reason="nothing to build with")

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moe_telemetry"
WITHOUT_SDK = "import sys; sys.modules['grafana_foundation_sdk'] = None; "
PROGRAM = """
import sys
from moe_telemetry import recorder as rec
for _ in range(20):
    rec.forward(1)
    rec.routed(0, {1, 2, 3, 4}, resident={1, 2, 3})
    rec.forward_done(0.05)
    rec.tokens(1)
print("recorded", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, capture_output=True, check=True
    )
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    """The wheel."""
    (path,) = built.glob("*.whl")
    assert f"moe_telemetry-{__version__}-py3-none-any.whl" == path.name
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files, to be put before everything else on the path."""
    folder = tmp_path_factory.mktemp("installed")
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder]
    subprocess.run([*line, *built.glob("*.whl")], check=True, capture_output=True)
    return folder


def started(installed: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Python with the wheel's files, away from the repository."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(installed)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, text=True, **pipes)


def ended(installed: Path, folder: Path, *words: str) -> str:
    """What a command prints that ends well."""
    process = started(installed, folder, *words)
    out, err = process.communicate(timeout=60)
    assert (0, "") == (process.returncode, err)
    return out


def test_the_wheel_holds_the_package_and_what_is_generated_and_no_tests(wheel: zipfile.ZipFile) -> None:
    """Every file of the source, dashboards and rules as committed, the type marker; nothing else."""
    source = {
        f"moe_telemetry/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".pyo")
    }
    generated = {
        f"moe_telemetry/monitoring/generated/{path.relative_to(ROOT / 'dashboards').as_posix()}": path
        for path in (ROOT / "dashboards").rglob("*")
        if path.is_file()
    }
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert source | set(generated) == names
    assert "moe_telemetry/py.typed" in names
    assert [] == [name for name, path in generated.items() if wheel.read(name) != path.read_bytes()]
    assert {"grafana", "prometheus", "alertmanager"} == {name.split("/")[3] for name in generated}


def test_the_source_archive_builds_and_tests(built: Path) -> None:
    """What a distributor needs is inside."""
    with tarfile.open(built / f"moe_telemetry-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "LICENSE", "CHANGELOG.md", "Makefile", "docker-compose.yml", "Dockerfile"):
        assert needed in names
    for folder in ("src/moe_telemetry", "tests", "docs", "examples", "benchmarks", "dashboards/grafana"):
        assert any(name.startswith(f"{folder}/") for name in names)
    assert [] == [name for name in names if name.startswith((".git/", "dist/", "build/")) or name.endswith(".pyc")]


def test_the_wheel_exports_dashboards_without_what_generates_them(installed: Path, tmp_path: Path) -> None:
    """`export` writes the shipped files where the dashboards' SDK is missing, and refuses options."""
    ended(
        installed, tmp_path, "-c", f"{WITHOUT_SDK}from moe_telemetry import cli; sys.exit(cli.main(['export', 'out']))"
    )
    for path in (ROOT / "dashboards").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "out" / path.relative_to(ROOT / "dashboards")).read_bytes()
    refused = f"{WITHOUT_SDK}from moe_telemetry import cli; sys.exit(cli.main(['export', 'other', '--job', 'llm']))"
    process = started(installed, tmp_path, "-c", refused)
    _, err = process.communicate(timeout=60)
    assert (2, 1) == (process.returncode, err.count("\n"))
    assert "pip install 'moe-telemetry[dashboards]'" in err


def test_commands_work_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """run, check, top --once and report, away from the repository."""
    address = f"127.0.0.1:{free_port()}"
    program = started(
        *(installed, tmp_path, "-m", "moe_telemetry", "run", "--snapshot", "run.json", "--port", address[10:]),
        *("--", "python", "-c", PROGRAM),
    )
    assert program.stdout is not None
    assert "recorded\n" == program.stdout.readline()
    checked = ended(installed, tmp_path, "-m", "moe_telemetry", "check", address)
    assert "empty panels of " in checked
    assert "DECODE" in ended(installed, tmp_path, "-m", "moe_telemetry", "top", "--once", "--interval", "0.2", address)
    live = ended(installed, tmp_path, "-m", "moe_telemetry", "report", address)
    program.communicate(timeout=60)
    assert 0 == program.returncode
    written = ended(installed, tmp_path, "-m", "moe_telemetry", "report", "run.json")
    for text in (live, written):
        assert "75.0%" in text
