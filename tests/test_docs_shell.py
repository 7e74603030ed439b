"""Every shell and configuration block of README and guides is run, or is one that is listed here with its reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from conftest import free_port

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(
    r"(?:<!-- not run(?: in the tests)?: (?P<reason>[^>]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)```", re.DOTALL
)
TINY = "TINY_MODEL"
ADAPTED = (
    (r"\.venv/bin/", ""),
    (r"mlx-community/Qwen3-30B-A3B-4bit|\bPATH\b(?!=)", TINY),
    (r"(127\.0\.0\.1|gpu-1):946[45]\b", "127.0.0.1:$DOC_PORT"),
    (r"https://gpu-2\.example", "http://127.0.0.1:$DOC_PORT"),
    (r"--port 9500", "--port 0"),
    (r"--tokens 300", "--tokens 12"),
)
"""What a block names that is not here, and what stands for it."""
SHELL = """
set -euo pipefail
for name in pip moe-telemetry curl; do
  eval "$name() { '$DOC_PYTHON' '$DOC_COMMANDS' $name \\"\\$@\\"; }"
done
python() { "$DOC_PYTHON" "$@"; }
make() { command make --dry-run --directory "$DOC_ROOT" "$@"; }
"""
NOT_RUN = {
    "Docker": 2,
    "Homebrew, on a Mac": 1,
    "changes the system": 1,
    "a second host": 1,
    "Prometheus 3; run by hand with 3.13.5": 1,
    "builds; tests/test_package.py looks at what is built": 1,
    "certificates of your own": 1,
    "VictoriaMetrics; run by hand with 1.130.0": 2,
}
"""Reasons of the blocks that are not run, and how many have each."""


@dataclass(frozen=True)
class Block:
    """A block of a page: `kind` is what stands behind its fence."""

    name: str
    kind: str
    text: str
    reason: str | None


BLOCKS = [
    Block(f"{page.name}-{number}", found["kind"], found["text"], found["reason"])
    for page in PAGES
    for number, found in enumerate(MARK.finditer(page.read_text(encoding="utf-8")))
]
SHELL_BLOCKS = [block for block in BLOCKS if block.kind == "sh" and block.reason is None]
YAML_BLOCKS = [block for block in BLOCKS if block.kind == "yaml"]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[int]:
    """The port of a streaming runtime that is at work."""
    port = free_port()
    line = [sys.executable, ROOT / "examples" / "streaming_runtime.py", "--tokens", "1000000", "--port", str(port)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("metrics at ")
    yield port
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository, with a script of one's own; what is written stays in it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "docs", "benchmarks", "dashboards", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    script = "from moe_telemetry import recorder as rec\nrec.forward(1)\nrec.union(0, 4)\nrec.tokens(1)\n"
    (folder / "serve.py").write_text(script)
    return folder


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: block.name)
def test_a_shell_block_runs(block: Block, place: Path, endpoint: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its lines, one after the other, with what ADAPTED and doc_commands.py say."""
    text = block.text
    for pattern, words in ADAPTED:
        text = re.sub(pattern, words, text)
    if TINY in text:
        pytest.importorskip("mlx_lm")
        from mlx_lm_tiny import save

        model = place / "tiny"
        if not model.exists():
            save(model)
        text = text.replace(TINY, str(model))
    if "promtool" in text and shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "MOE_"))},
        "OTEL_EXPORTER_PROMETHEUS_PORT": "0",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_METRICS_EXPORTER": "none",
        "DOC_PYTHON": sys.executable,
        "DOC_ROOT": str(ROOT),
        "DOC_COMMANDS": str(ROOT / "tests" / "doc_commands.py"),
        "DOC_PORT": str(endpoint),
        "DOC_SERVER_PORT": str(free_port()),
        "DOC_CACHE": str(tmp_path_factory.getbasetemp() / "doc-cache"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", SHELL + text],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=lambda block: block.name)
def test_a_configuration_is_read(block: Block, tmp_path: Path) -> None:
    """YAML that is valid; promtool takes a Prometheus configuration."""
    parsed = yaml.safe_load(block.text)
    assert parsed
    if isinstance(parsed, dict) and "scrape_configs" in parsed:
        if shutil.which("promtool") is None:
            pytest.skip("promtool is not installed")
        (tmp_path / "prometheus.yml").write_text(block.text)
        line = ["promtool", "check", "config", "--syntax-only", tmp_path / "prometheus.yml"]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "promql"], ids=lambda block: block.name)
def test_a_query_parses(block: Block) -> None:
    """A query that somebody copies is one."""
    promql = pytest.importorskip("promql_parser")
    assert promql.parse(block.text)


def test_what_is_not_run_is_listed() -> None:
    """A block is left out for a reason that stands in NOT_RUN, and text blocks hide no commands."""
    reasons = [block.reason for block in BLOCKS if block.reason is not None]
    assert {reason: reasons.count(reason) for reason in reasons} == NOT_RUN
    assert {"sh", "yaml", "python", "promql", "text", "", "mermaid"} >= {block.kind for block in BLOCKS}


def test_every_fence_is_seen() -> None:
    """The pattern above finds as many blocks as there are fences."""
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS)


def test_the_readmes_figures_of_cost_are_those_of_the_design() -> None:
    """A row of its table is the design's row of that hook."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ,]+) \| (\d+) \| (\d+) times \| ([\d.]+) times \| ([\d.]+) \|$", readme, re.MULTILINE)
    assert 6 == len(rows)
    for name, cost, sdk, client, off in rows:
        assert re.search(rf"^\| {name} \| {cost} \| [^|]* \| {sdk} \| {client} \| {off} \|", design, re.MULTILINE), name
