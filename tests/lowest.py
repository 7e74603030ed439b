"""The tests of what a process under telemetry runs, in an environment of their own, with the lowest versions that
pyproject.toml allows of what it needs, or with the newest.

    python tests/lowest.py lowest|newest ENVIRONMENT [arguments for pytest]

ENVIRONMENT is a folder, made anew. `make test-lowest` and `make test-newest` run this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("mlx", "demo", "otlp")
"""What the library and its demo need at run time."""
TOOLS = ("pytest", "hypothesis")
MODULES = (
    *("abuse", "catalog", "cycles", "demo_blobs", "demo_command", "demo_engine", "demo_parts", "demo_settings"),
    *("endpoint", "ends", "exposition", "exposition_parity", "figures", "fuzz_hooks", "lifecycle", "lost", "off"),
    *("otlp", "processes", "profiling", "profiling_block", "profiling_curve", "profiling_property", "prometheus"),
    *("pool_size", "readers", "recorder", "rendering", "report", "reuse", "rounds", "routing", "routing_threads"),
    *("security", "series", "settings", "threads", "values"),
)
"""Of tests/test_*.py."""


def lowest() -> list[str]:
    """pip's constraints: the lowest version of each run-time dependency, those of EXTRAS included."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    for extra in EXTRAS:
        (found,) = re.findall(rf"^{extra} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        block += found
    pairs = re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\w.]+)', block)
    return [f"{name}=={version}" for name, version in dict.fromkeys(pairs)]


def main() -> int:
    """Make the environment, say what is in it, and run the tests; their exit status."""
    which, folder, *arguments = sys.argv[1:]
    venv.create(folder, clear=True, with_pip=True)
    python = Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(lowest() if which == "lowest" else []))
        constraints.flush()
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        wanted = ["-e", f"{ROOT}[{','.join(EXTRAS)}]", *TOOLS, "-c", constraints.name]
        subprocess.run([*pip, "install", "--quiet", "--upgrade", "--upgrade-strategy=eager", *wanted], check=True)
        subprocess.run([*pip, "list"], check=True)
    tests = [str(ROOT / "tests" / f"test_{name}.py") for name in MODULES]
    return subprocess.run([python, "-m", "pytest", *tests, *arguments], check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
