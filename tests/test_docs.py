"""The documentation says what is true: examples run, generated pages are current, links resolve."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_telemetry.hooks import HOOKS

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(example, id=f"{page.name}-{number}")
    for page in PAGES
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example, monkeypatch, tmp_path):
    """Each Python example of the documentation runs as it stands, on a free port."""
    environment = {"OTEL_EXPORTER_PROMETHEUS_PORT": "0", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", example], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)


def test_generated_files_are_current():
    """Everything that is generated is what the generators write."""
    pytest.importorskip("grafana_foundation_sdk", reason="the dashboards' SDK needs Python 3.11")
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    assert 0 == subprocess.run(command, check=False).returncode


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_left_to_be_filled_in(page):
    """No line is a placeholder in capitals."""
    assert [] == re.findall(r"^[A-Z]+_[A-Z_]+$", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    """Each relative link points at a file of the repository."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [] == [link for link in links if not (page.parent / link).exists()]


def test_every_page_is_linked_from_the_readme():
    """A page that nothing leads to is not read."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {str(page.relative_to(ROOT)) for page in PAGES} - {"README.md"}
    assert [] == sorted(name for name in names if f"({name}" not in readme)


@pytest.mark.parametrize("name", ["bug", "metric"])
def test_issue_forms_are_valid(name):
    """GitHub's published schema takes each form; a form that it does not take is not shown."""
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-issue-forms"]
    done = subprocess.run(
        [*line, ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml"], capture_output=True, check=False
    )
    assert 0 == done.returncode, done.stdout


def test_every_hook_is_documented():
    """The guide's table has each hook."""
    guide = (ROOT / "docs" / "instrumenting.md").read_text(encoding="utf-8")
    assert [] == [hook for hook in HOOKS if f"`{hook}(" not in guide]


def test_readme_commands_are_targets_of_the_makefile():
    """The README's two commands exist."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo\nmake test" in readme
    assert {"demo", "test"} <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
