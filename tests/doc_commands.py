"""The documentation's commands as the tests run them: what would never end is ended, and nothing is installed.

`python doc_commands.py COMMAND ARGUMENTS`; functions of test_docs_shell.py's shell call it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENDPOINT = f"127.0.0.1:{os.environ.get('DOC_PORT', '9464')}"
PATIENCE = 90.0


def pip(words: list[str]) -> int:
    """Nothing is installed: what is asked for must be this package, with extras that it has."""
    wanted = [word for word in words[1:] if not word.startswith("-")]
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    known = set(re.findall(r"^([\w-]+) = \[", declared.partition("[project.scripts]")[0], re.MULTILINE))
    for word in wanted:
        if word in ("build", "opentelemetry-exporter-otlp-proto-grpc") or word.endswith(".whl"):
            continue
        found = re.fullmatch(r"(?:\.|moe-telemetry)(?:\[([\w,-]+)\])?", word)
        if found is None or not set(filter(None, (found[1] or "").split(","))) <= known:
            print(f"pip could not install {word}", file=sys.stderr)
            return 1
    return 0 if wanted and words[0] == "install" else 1


def telemetry(words: list[str]) -> int:
    """`moe-telemetry` itself, made to end."""
    command, rest = words[0], words[1:]
    if command == "demo":
        return _run("demo", "--tokens", "8", "--cache", os.environ["DOC_CACHE"], *rest)
    if command == "top":
        named = [word for word in rest if "127.0.0.1" in word]
        return _run("top", "--once", *([] if named else [ENDPOINT]), *rest, "--interval", "0.2")
    if command == "stack":
        return _ended("Scraping", signal.SIGTERM, "stack", *rest)
    if command == "run" and "mlx_lm.server" in rest:
        with_port = [*rest, "--port", os.environ["DOC_SERVER_PORT"]]
        return _ended("Starting httpd", signal.SIGINT, "run", *with_port)
    if command in ("check", "report") and not rest:
        rest = [ENDPOINT]
    return _run(command, *rest)


def _run(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", "moe_telemetry", *words], check=False).returncode


def _ended(sign: str, number: signal.Signals, *words: str) -> int:
    """Run until it prints `sign`, then end it as its user would; its exit status."""
    line = [sys.executable, "-m", "moe_telemetry", *words]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watch = threading.Timer(PATIENCE, process.kill)
    watch.start()
    seen = False
    assert process.stdout is not None
    for text in process.stdout:
        print(text, end="")
        if sign in text and not seen:
            seen = True
            time.sleep(0.3)
            process.send_signal(number)
    watch.cancel()
    status = process.wait()
    return 1 if not seen else 0 if status in (0, 130) else status


def curl(words: list[str]) -> int:
    """A GET, so that the tests need no curl."""
    with urllib.request.urlopen(words[-1], timeout=10) as reply:
        print(reply.read().decode()[:200])
    return 0


COMMANDS = {"pip": pip, "moe-telemetry": telemetry, "curl": curl}


if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
