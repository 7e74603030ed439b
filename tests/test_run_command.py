"""`moe-telemetry run`: a program behaves as it does alone, and is watched while it runs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port, total

from moe_telemetry import cli
from moe_telemetry.programs import model_of

BIN = Path(sys.executable).parent
COMMAND = [str(BIN / "moe-telemetry"), "run"]
QUIET = [*COMMAND, "--quiet", "--port", "0", "--"]
PYTHON = re.search(r"/\S*/python[\d.]*", (BIN / "moe-telemetry").read_text())[0]
"""The interpreter by the name that the command is started with, which messages of the interpreter have."""
TIMEOUT = 120

SHOW = """
'''The program's own words.'''
import os, pickle, sys, threading
class Kind: pass
main = sys.modules["__main__"]
print(sys.argv, sys.path[0], sys.flags.dev_mode, sys.flags.safe_path, sys.stdout.write_through)
print({name: value if name in ("__file__", "__cached__") else str(value).split(" at ")[0]
       for name, value in sorted(vars(main).items()) if name.startswith("__")})
print(pickle.loads(pickle.dumps(Kind())).__class__ is main.Kind, __name__, globals() is vars(main))
print(sys.stdin.read(), threading.current_thread() is threading.main_thread(), __debug__)
print([signal for signal in __import__("signal").pthread_sigmask(0, [])], sys.excepthook is sys.__excepthook__)
"""
SHOW = SHOW.replace("sys.flags.safe_path", "getattr(sys.flags, 'safe_path', None)")
RAISES = """
import sys
def outer():
    try:
        inner()
    except ValueError as error:
        raise KeyError("outer") from error
def inner():
    raise ValueError("inner")
print("before")
outer()
"""
THREADS = """
import atexit, threading, time, sys
gone = threading.Event()
atexit.register(lambda: (print("exit", gone.is_set(), sys.modules["__main__"].__name__), gone.set()))
def later():
    threading.main_thread().join()
    print("thread ends")
threading.Thread(target=later).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("main ends")
"""
SIGWAIT = """
import os, signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
print(signal.sigwait([signal.SIGTERM]))
"""
HANDLER = """
import os, signal, sys, time
print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(10)
"""
HOOK = """
import sys, traceback
def told(kind, error, trace):
    print("hook", kind.__name__, [frame.name for frame in traceback.extract_tb(trace)],
          [frame.name for frame in traceback.extract_tb(error.__traceback__)])
sys.excepthook = told
def deep(): 1 / 0
deep()
"""
SPAWN = """
import multiprocessing, os, sys
def work(number):
    return number * 2, __name__, type(sys.modules.get("moe_telemetry")).__name__, len(sys.argv)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
"""
NO_STREAMS = """
import os, sys
sys.stderr = None
sys.__stderr__.close()
sys.stdout.flush()
os.close(1)
sys.exit(4)
"""
TOOL = {
    "tool.py": "import sys\nclass deep:\n    def main():\n        print(sys.argv[1:], __name__); return 'said'\n",
    "tool-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n",
    "tool-1.0.dist-info/entry_points.txt": "[console_scripts]\nrun-tool = tool:deep.main\n",
}


@dataclass
class Case:
    """Words of a program, and those that a shell runs where they differ; files by name; `{python}` is filled in."""

    words: list[str]
    files: dict[str, str] = field(default_factory=dict)
    alone: list[str] | None = None
    stdin: str = ""
    status: int = 0


def script(text: str, status: int = 0) -> Case:
    return Case(["python", "script.py"], {"script.py": text}, status=status)


CASES = {
    "script": Case(["python", "script.py", "--port", "5", "--", "x"], {"script.py": SHOW}, stdin="input"),
    "path": Case(["./sub/../link.py"], {"real/script.py": SHOW}, alone=["python", "./sub/../link.py"]),
    "suffixless": Case(
        ["./script", "a"], {"script": "#!/usr/bin/env python3\n" + SHOW}, alone=["python", "./script", "a"]
    ),
    "module": Case(["python3", "-m", "package.part", "-m", "a"], {"package/__init__.py": "", "package/part.py": SHOW}),
    "package": Case(["python", "-mpackage"], {"package/__init__.py": "", "package/__main__.py": SHOW}),
    "no-module": Case(["python", "-m", "nothing.here"], status=1),
    "code": Case(["python", "-c", SHOW, "-c", "a"]),
    "stdin": Case(["python", "-", "a"], stdin="import sys; print(sys.argv, __file__, sys.path[0] == '')"),
    "folder": Case(["python", "folder", "a"], {"folder/__main__.py": SHOW}),
    "options": Case(["python", "-uBO", "-X", "dev", "-Werror", "script.py", "-u"], {"script.py": SHOW}),
    "exit-3": script("import sys; print('out'); sys.exit(3)", 3),
    "exit-text": script("import sys; sys.exit('text')", 1),
    "exit-none": script("raise SystemExit", 0),
    "raises": script(RAISES, 1),
    "raises-in-module": Case(["python", "-m", "part"], {"part.py": RAISES}, status=1),
    "syntax": script("x = 1\ndef f(:\n", 1),
    "no-future": script("def f(x: int): pass\nprint(f.__annotations__)"),
    "interrupt": script("print(1, flush=True)\nraise KeyboardInterrupt", -signal.SIGINT),
    "hook": script(HOOK, 1),
    "terminated": script("import os; print(1, flush=True); os.kill(os.getpid(), 15); print(2)", -signal.SIGTERM),
    "handler": script(HANDLER, 7),
    "sigwait": script(SIGWAIT),
    "threads": script(THREADS),
    "os-exit": script("import os; os._exit(9)", 9),
    "spawn": script(SPAWN),
    "no-streams": script(NO_STREAMS, 4),
    "console-script": Case(["pytest", "--version"], alone=[str(BIN / "pytest"), "--version"]),
    "entry-point": Case(
        ["run-tool", "a"], TOOL, alone=["python", "-c", "import sys, tool; sys.exit(tool.deep.main())", "a"], status=1
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a process that has ended shows."""

    status: int
    out: str
    err: str


def _ended(words: list[str], folder: Path, stdin: str = "", **environment: str) -> Outcome:
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(
        words, cwd=folder, input=stdin, capture_output=True, text=True, timeout=TIMEOUT, env=env, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def _written(folder: Path, files: dict[str, str]) -> Path:
    (folder / "sub").mkdir(parents=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "link.py").symlink_to("real/script.py")
    return folder


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """By name of a case, how it ends alone and how it ends under the command; run side by side."""

    def pair(name: str) -> tuple[Outcome, Outcome]:
        case = CASES[name]
        folder = _written(tmp_path_factory.mktemp("program"), case.files)
        alone = [PYTHON if word in ("python", "python3") else word for word in case.alone or case.words]
        return _ended(alone, folder, case.stdin), _ended([*QUIET, *case.words], folder, case.stdin)

    with ThreadPoolExecutor(4) as pool:
        yield {name: pool.submit(pair, name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_program_behaves_as_alone(name, outcomes):
    """Exit status or signal, output and error output are those of the program started by python itself."""
    alone, watched = outcomes[name].result(TIMEOUT)
    assert CASES[name].status == alone.status, alone.err
    assert alone == watched


def test_the_address_comes_first_and_the_summary_last(tmp_path):
    """A scrape in the middle of a run, model and run by name, a summary by phase, exact totals in a file."""
    text = """
import sys
from moe_telemetry import recorder as rec
rec.forward(5, "prefill"); rec.routed(0, {1, 2, 3}); rec.tokens(5, "prefill"); rec.forward_done(0.5)
print("recorded", flush=True)
sys.stdin.readline()
rec.forward(1); rec.routed(0, {1, 2}); rec.tokens(1); rec.forward_done(0.25)
sys.exit(6)
"""
    (tmp_path / "script.py").write_text(text)
    words = ["--port", "0", "--run", "night", "--snapshot", "run.json", "--trace", "run.trace"]
    words += ["script.py", "--model", "org/tiny-moe/"]
    with subprocess.Popen(
        [*COMMAND, *words],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        address = re.fullmatch(r"moe-telemetry: metrics at (http://127.0.0.1:\d+/metrics)\n", process.stderr.readline())
        assert "recorded\n" == process.stdout.readline()
        scraped = urllib.request.urlopen(address[1], timeout=20).read().decode()
        _, errors = process.communicate("\n", timeout=TIMEOUT)
    assert 6 == process.returncode
    assert 5 == total(scraped, "moe_tokens_total")
    assert re.search(r'moe_run_info{model="tiny-moe",run="night [^"]*",runtime="[^"]+"', scraped)
    heading, *table = errors.splitlines()
    assert re.fullmatch(r"moe-telemetry: whole run of tiny-moe, \d+\.\d s", heading)
    assert ["prefill", "decode"] == table[0].split()
    assert {"tokens": ["5", "1"], "tok/s in forward passes": ["10.0", "4.0"], "union: p99 / max": ["3", "2"]} == {
        line[:26].strip(): line[26:].replace("/ 3", "").replace("/ 2", "").split() for line in table[1:]
    }
    assert "tiny-moe" == json.loads((tmp_path / "run.json").read_text())["run"]["model"]
    begin, end = map(json.loads, (tmp_path / "run.trace").read_text().splitlines())
    assert ("tiny-moe", {"calls": 0, "left_out": 0, "why": None, "layers": 1}) == (begin["model"], end["end"])


def test_it_lingers_until_one_more_scrape(tmp_path):
    """The final totals can be read behind the program's end, which a scrape then ends at once."""
    (tmp_path / "script.py").write_text(
        "from moe_telemetry import recorder as rec; rec.tokens(3, 'decode'); print('ended', flush=True)"
    )
    words = ["--port", "0", "--linger", "60", "script.py"]
    with subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        address = process.stderr.readline().rpartition(" ")[2].strip()
        assert process.stderr.readline().startswith("moe-telemetry: whole run of unknown")
        assert 3 == total(urllib.request.urlopen(address, timeout=20).read().decode(), "moe_tokens_total")
        with suppress(OSError):  # that one may have come before it began to wait
            urllib.request.urlopen(address, timeout=20).read()
        process.communicate(timeout=20)
    assert 0 == process.returncode


def _without_telemetry(why: str) -> str:
    return f"moe-telemetry: the program runs without telemetry: {why}"


def test_the_program_runs_where_telemetry_cannot_start(tmp_path):
    """A taken port, a bad variable, a package that is broken: one line says why, and all else is the program's."""
    (tmp_path / "script.py").write_text("import sys; print('whole'); print('error', file=sys.stderr); sys.exit(5)")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "prometheus_client.py").write_text("1 / 0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for why, options, environment in (
            (f"cannot serve metrics on 127.0.0.1 port {port}: ", ["--port", str(port)], {}),
            ("snapshot_file cannot be 'no folder/run.json'", ["--snapshot", "no folder/run.json"], {}),
            ("trace cannot be 'no folder/run.trace'", ["--trace", "no folder/run.trace"], {}),
            ("MOE_TELEMETRY_LAYERS must be ", [], {"MOE_TELEMETRY_LAYERS": "some"}),
            ("ZeroDivisionError: division by zero", [], {"PYTHONPATH": str(tmp_path / "broken")}),
        ):
            found = _ended([*COMMAND, *options, "--", "python", "script.py"], tmp_path, **environment)
            line, *rest = found.err.splitlines()
            assert line.startswith(_without_telemetry(why)), found.err
            assert (5, "whole\n", ["error"]) == (found.status, found.out, rest)
    off = _ended([*COMMAND, "--", "python", "script.py"], tmp_path, OTEL_SDK_DISABLED="true")
    assert Outcome(5, "whole\n", "moe-telemetry: telemetry is off: OTEL_SDK_DISABLED is set\nerror\n") == off


def test_the_program_runs_where_mlx_lm_cannot_be_instrumented(tmp_path):
    """An error there is one line at the time of the import, which succeeds."""
    _written(tmp_path, {"mlx_lm/__init__.py": "VALUE = 8", "script.py": "import mlx_lm; print(mlx_lm.VALUE)"})
    (tmp_path / "script.py").write_text(
        "import sys; sys.modules['moe_telemetry.integrations.mlx_lm'] = None\n"
        "import mlx_lm; print(mlx_lm.VALUE, *(type(it.loader).__name__ for it in (mlx_lm.__spec__,)))"
    )
    found = _ended([*QUIET, "python", "script.py"], tmp_path)
    assert (0, "8 SourceFileLoader\n") == (found.status, found.out)
    assert found.err.startswith("moe-telemetry: mlx_lm runs without being recorded: ")
    assert 1 == len(found.err.splitlines())


def test_a_program_with_telemetry_of_its_own_has_its_port(tmp_path):
    """Its start succeeds on the port it would have had alone, and ours says that it has ended."""
    port = str(free_port())
    (tmp_path / "script.py").write_text(
        "import os, sys, moe_telemetry as mt\n"
        "tel = mt.start(model='own'); mt.recorder.tokens(2, 'decode')\n"
        "print(tel.port == int(sys.argv[1]), tel.snapshot()['metrics']['moe.tokens']['series'][1]['value'])\n"
    )
    found = _ended([*COMMAND, "--", "python", "script.py", port], tmp_path, OTEL_EXPORTER_PROMETHEUS_PORT=port)
    assert (0, "True 2\n") == (found.status, found.out), found.err
    assert "moe-telemetry: stopped: the program has telemetry of its own" == found.err.splitlines()[-1]


def test_a_forked_child_tells_nothing_of_its_own(tmp_path):
    """A child that ends as the program does prints no summary; the parent's is there once."""
    text = "import os, sys\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('ends')\n"
    (tmp_path / "script.py").write_text(text)
    found = _ended([*COMMAND, "--port", "0", "python", "-Wignore", "script.py"], tmp_path)
    assert (0, "ends\nends\n", 1) == (found.status, found.out, found.err.count("whole run"))
    assert "hooks are off in this forked process" in found.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "run needs a program"),
        (["--"], "run needs a program"),
        (["--linger", "-1", "--", "script.py"], "--linger must be 0 seconds or more, not -1"),
        (["no-such-command"], "there is no command no-such-command"),
        (["/bin/ls"], "/bin/ls is no Python program"),
        (["sleep", "1"], "is no Python program"),
        (["python"], "python alone is a session"),
        (["python", "-i"], "the interpreter's option -i cannot be had here"),
        (["python", "-m"], "the interpreter's option -m needs a value"),
        (["python", "missing.py"], "there is no file missing.py"),
        (["missing.py"], "there is no file missing.py"),
        (["python2", "script.py"], "python2 is another interpreter than the one here"),
        (["python3.1", "script.py"], "python3.1 is another interpreter"),
        (["python", "-u", "-c", "1"], "options of the interpreter (-u) need the command line"),
    ],
)
def test_misuse_is_one_line_and_exit_2(words, line, capsys, tmp_path, monkeypatch):
    """What names no program that can run here is told in one line, before anything starts."""
    monkeypatch.chdir(tmp_path)
    assert 2 == cli.main(["run", *words])
    errors = capsys.readouterr().err
    assert line in errors
    assert 1 == len(errors.splitlines())


def test_a_script_of_another_environment_is_not_run_in_this_one(capsys, tmp_path):
    """Its packages are not here: the line names its interpreter, also where a long path hides behind sh."""
    for number, head in enumerate(("#!/other/bin/python3\n", "#!/bin/sh\n'''exec' /other/bin/python3 \"$0\" \"$@\"\n")):
        path = tmp_path / f"tool-{number}"
        path.write_text(head)
        assert 2 == cli.main(["run", str(path)])
        assert "belongs to another interpreter than the one here, /other/bin/python3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["--model"], None),
        (["--model", "org/Qwen3-30B"], "Qwen3-30B"),
        (["x", "--model=/models/tiny/"], "tiny"),
        (["--models", "a"], None),
        (["--model", ""], None),
    ],
)
def test_the_model_is_read_from_the_programs_arguments(arguments, expected):
    """The last part of its --model, in both spellings."""
    assert expected == model_of(arguments)
