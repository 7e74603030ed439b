"""How a run ends: in every order of an interpreter's end, by signals, with a receiver that hangs, and by kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from conftest import free_port
from prometheus import prometheus

import moe_telemetry as mt
from moe_telemetry import reports, snapshot

PRELUDE = """
import atexit, os, signal, sys, threading, time
import moe_telemetry as mt
rec = mt.recorder

def begin(**options):
    return mt.start(port=0, snapshot_file=sys.argv[1], **options)

def say(word):
    print(word, flush=True)

"""
ENDS_WITHIN = 20.0


class Program:
    """A program of its own that runs `body`, with the path of its snapshot file as argument."""

    def __init__(self, folder: Path, body: str, **environment: str) -> None:
        self.file = folder / "totals.json"
        script = folder / "program.py"
        script.write_text(PRELUDE + textwrap.dedent(body))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", script, self.file],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout

    def end(self) -> tuple[int, str]:
        """Exit status and standard error, once it has ended."""
        _, error = self.process.communicate(timeout=ENDS_WITHIN)
        return self.process.returncode, error

    def tokens(self) -> int | None:
        """Decode tokens in the snapshot file, None without one."""
        if not self.file.exists():
            return None
        series = json.loads(self.file.read_text())["metrics"]["moe.tokens"]["series"]
        return next(each["value"] for each in series if each["labels"]["phase"] == "decode")

    def whole(self) -> bool:
        """Whether no half-written file lies beside it."""
        return not [path for path in self.file.parent.iterdir() if path.name.startswith(".totals")]


@pytest.fixture
def program(tmp_path: Path):
    """Starts a program; one that is still there behind the test is killed."""
    started: list[Program] = []

    def run(body: str, **environment: str) -> Program:
        started.append(Program(tmp_path, body, **environment))
        return started[-1]

    yield run
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


# -- the interpreter's end -----------------------------------------------------------------------------------------

ENDS = {
    "nobody stops": (0, 5, "begin(); rec.tokens(5)"),
    "stopped before": (0, 5, "begin().stop(rec.tokens(5) or 0.0)"),
    "status": (3, 5, "begin(); rec.tokens(5); sys.exit(3)"),
    "an exception": (1, 5, "begin(); rec.tokens(5); raise SystemExit('told')"),
    "a handler that was registered before": (
        0,
        5,
        """
        tel = None
        atexit.register(lambda: (rec.tokens(7), tel.stop(), tel.snapshot()))
        tel = begin()
        rec.tokens(5)
        """,
    ),
    "a handler that is registered later": (
        0,
        12,
        """
        tel = begin()
        rec.tokens(5)
        atexit.register(lambda: (rec.tokens(7), tel.stop(), tel.stop()))
        """,
    ),
    "a thread that outlives the main one": (
        0,
        12,
        """
        begin()
        rec.tokens(5)
        threading.Thread(target=lambda: (time.sleep(0.2), rec.tokens(7))).start()
        """,
    ),
    "a thread that records for ever": (
        0,
        None,
        """
        begin()
        def work():
            while True:
                rec.forward(1); rec.routed(0, {1, 2}, {1}); rec.tokens(1); rec.forward_done(0.1)
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.1)
        """,
    ),
    "an object that stops when it is destroyed": (
        0,
        5,
        """
        class Server:
            def __init__(self): self.tel = begin()
            def __del__(self): self.tel.stop(linger=5); rec.tokens(1); self.tel.snapshot()
        sys.modules["keeper"] = Server()
        sys.modules["keeper"].itself = sys.modules["keeper"]
        rec.tokens(5)
        """,
    ),
    "an application's provider that ends first": (
        0,
        5,
        """
        mt.Telemetry  # loaded, and so its exit handler registered, before the provider's
        from opentelemetry.sdk.metrics import MeterProvider
        begin(meter_provider=MeterProvider())
        rec.tokens(5)
        """,
    ),
    "an application's provider that ends last": (
        0,
        5,
        """
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        provider = MeterProvider([InMemoryMetricReader()])
        begin(meter_provider=provider)
        rec.tokens(5)
        """,
    ),
    "clients that stay": (
        0,
        5,
        """
        import socket
        tel = begin()
        silent = [socket.create_connection(("127.0.0.1", tel.port)) for _ in range(3)]
        silent[0].sendall(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
        rec.tokens(5)
        """,
    ),
    "two, the later one without a file": (
        0,
        5,
        """
        begin(recorder=rec)
        rec.tokens(5)
        mt.start(port=0, recorder=mt.Recorder())
        """,
    ),
    "a child that ends as it likes": (
        0,
        5,
        """
        begin()
        rec.tokens(5)
        pid = os.fork()
        if not pid:
            sys.exit(0)
        os.waitpid(pid, 0)
        assert not os.path.exists(sys.argv[1])
        """,
    ),
    "at once": (4, None, "begin(); rec.tokens(5); os._exit(4)"),
}


@pytest.mark.parametrize("way", ENDS)
def test_an_interpreter_ends_with_the_file(way: str, program) -> None:
    """In whatever order an interpreter ends, it ends soon and silently, and the totals are in the file."""
    status, tokens, body = ENDS[way]
    begin = time.monotonic()
    found = program(body)
    code, error = found.end()
    assert (status, "told\n" if way == "an exception" else "") == (code, _without_forks(error))
    assert tokens is None or tokens == found.tokens()
    assert (found.tokens() is None) == (way == "at once")
    assert found.whole()
    assert 10 > time.monotonic() - begin


def _without_forks(error: str) -> str:
    return re.sub(r"moe_telemetry: hooks are off in this forked process.*\n", "", error)


def test_a_receiver_that_hangs_holds_up_no_end(program) -> None:
    """With an OTLP receiver that never answers an interpreter ends within the last export's time, with the file."""
    with socket.socket() as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.listen()
        found = program(
            "begin(otlp=True); rec.tokens(5); say('runs')",
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver.getsockname()[1]}",
            OTEL_METRIC_EXPORT_INTERVAL="300",
        )
        assert "runs\n" == found.said.readline()
        begin = time.monotonic()
        code, _ = found.end()
    assert (0, 5) == (code, found.tokens())
    assert 8 > time.monotonic() - begin


# -- signals -------------------------------------------------------------------------------------------------------

RECORDING = """
tel = begin()
rec.tokens(5)
say(tel.port)
while True:
    rec.forward(1); rec.routed(0, {1, 2}, {1}); rec.forward_done(0.01)
"""
HANDLED = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"


@pytest.mark.parametrize(
    ("number", "handled", "status", "written"),
    [
        (signal.SIGINT, "", -signal.SIGINT, True),
        (signal.SIGTERM, HANDLED, 143, True),
        (signal.SIGTERM, "", -signal.SIGTERM, False),
    ],
    ids=["SIGINT", "SIGTERM handled", "SIGTERM"],
)
def test_signals_end_as_the_program_says(number: int, handled: str, status: int, written: bool, program) -> None:
    """Telemetry changes no handler: what ends the interpreter in order writes the file, and the port is free."""
    found = program(handled + RECORDING)
    port = int(found.said.readline())
    begin = time.monotonic()
    found.process.send_signal(number)
    code, error = found.end()
    assert 5 > time.monotonic() - begin
    assert status == code, error
    assert (5 if written else None) == found.tokens()
    mt.start(port=port, recorder=mt.Recorder()).stop()


def test_a_signal_ends_the_lingering(program) -> None:
    """A program that lingers for a last scrape and is told to end does so at once, with the file it wrote before."""
    found = program(HANDLED + "tel = begin()\nrec.tokens(5)\nsay(tel.port)\ntel.stop(linger=60)")
    found.said.readline()
    deadline = time.monotonic() + 10
    while not found.file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert 5 == found.tokens()
    begin = time.monotonic()
    found.process.send_signal(signal.SIGTERM)
    assert (143, "") == found.end()
    assert 5 > time.monotonic() - begin


# -- the file ------------------------------------------------------------------------------------------------------


def test_the_file_is_the_snapshot(start, recorder, tmp_path: Path) -> None:
    """It holds the totals at the stop, in the form of /snapshot, and a report can be made of it."""
    file = tmp_path / "totals.json"
    telemetry = start(snapshot_file=file)
    recorder.forward(1)
    recorder.routed(0, {1, 2, 3}, {1})
    recorder.tokens(5)
    assert not file.exists()
    telemetry.stop()
    found = json.loads(file.read_text())
    assert telemetry.snapshot()["metrics"]["moe.tokens"] == found["metrics"]["moe.tokens"]
    assert reports.report(found)["phases"]["decode"]["lookups"]["hit"] == pytest.approx(1 / 3)
    assert 0o600 == file.stat().st_mode & 0o600


def test_readers_find_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """While a file is replaced again and again, whoever reads it reads a whole one."""
    file = tmp_path / "totals.json"
    ended = threading.Event()
    snapshot.write(file, {"number": 0, "filling": "x" * 200_000})

    def replace() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            snapshot.write(file, {"number": number, "filling": "x" * 200_000})

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        numbers = [json.loads(file.read_text())["number"] for _ in range(200)]
    finally:
        ended.set()
        writer.join()
    assert sorted(numbers) == numbers
    assert [file] == list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_logged(start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that went away meanwhile keeps nothing from stopping, and leaves nothing behind."""
    folder = tmp_path / "gone"
    folder.mkdir()
    telemetry = start(snapshot_file=folder / "totals.json")
    folder.rmdir()
    telemetry.stop()
    assert "telemetry did not stop cleanly" in caplog.text
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", telemetry.port))


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    """A value that is no JSON ends the write half-way: the file is as before, and alone."""
    file = tmp_path / "totals.json"
    snapshot.write(file, {"whole": True})
    with pytest.raises(TypeError):
        snapshot.write(file, {"filling": "x" * 100_000, "bad": object()})
    assert {"whole": True} == json.loads(file.read_text())
    assert [file] == list(tmp_path.iterdir())


# -- kill -9 -------------------------------------------------------------------------------------------------------


def test_increase_over_a_kill_is_right(tmp_path: Path) -> None:
    """Killed and started again on its port, the increase is what was scraped before and all that came since."""
    port = free_port()
    body = f"""
        tel = mt.start(port={port})
        say("runs")
        for line in sys.stdin:
            rec.tokens(int(line))
            say("done")
        """

    def run() -> subprocess.Popen[str]:
        script = tmp_path / "killed.py"
        script.write_text(PRELUDE + textwrap.dedent(body))
        found = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert "runs\n" == found.stdout.readline()
        return found

    def count(process: subprocess.Popen[str], tokens: int) -> None:
        process.stdin.write(f"{tokens}\n")
        assert "done\n" == process.stdout.readline()

    name = 'moe_tokens_total{phase="decode"}'
    with prometheus(tmp_path, targets=[f"127.0.0.1:{port}"], interval="250ms") as server:
        process = run()
        try:
            server.wait(f"{name} == 0")
            count(process, 500)
            server.wait(f"{name} == 500")
            count(process, 30)  # scraped or not
            process.kill()
            process.wait(10)
            lost_at_most = 30
            (before,) = server.query(f"max_over_time({name}[1m])")
            scraped = float(before["value"][1])
            process = run()
            server.wait(f"{name} == 0")
            count(process, 200)
            server.wait(f"{name} == 200")
            # At the last sample's own time nothing is extrapolated: the series began with a sample of 0.
            (last,) = server.query(f"timestamp({name})")
            (found,) = server.api("query", query=f"increase({name}[1m])", time=last["value"][1])["result"]
            assert 530 - lost_at_most <= scraped <= 530
            assert pytest.approx(scraped + 200, abs=0.01) == float(found["value"][1])
        finally:
            process.kill()
            process.communicate()
