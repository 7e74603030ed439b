"""`top` against real endpoints: a demo, runs that are killed and started again, and endpoints that do not answer."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from conftest import fetch, free_port
from top_screen import drive, press, screen

from moe_telemetry import catalog as c
from moe_telemetry import cli
from moe_telemetry.figures import Totals, phase_figures
from moe_telemetry.top.app import TopApp
from moe_telemetry.top.frame import frame
from moe_telemetry.top.once import watch_once
from moe_telemetry.top.poller import Poller
from moe_telemetry.top.scrape import Reader
from moe_telemetry.top.watched import Watched
from moe_telemetry.top.window import Window
from moe_telemetry.top.words import percent

PATIENCE = 60.0

RUNTIME = """
import sys, time
import moe_telemetry as mt
from moe_telemetry import recorder as rec
with mt.start(model=sys.argv[2], port=int(sys.argv[1]), num_layers=2):
    rec.pool(0, capacity=8)
    print("ready", flush=True)
    while True:
        rec.forward(1)
        for layer in (0, 1):
            rec.routed(layer, {1, 2, 3, 4}, resident={1, 2, 3}, predicted={1, 2}, ready={1})
        time.sleep(0.01)
        rec.tokens(1)
        rec.forward_done(0.01)
"""


@contextmanager
def runtime(port: int, model: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own, which has begun to serve."""
    process = subprocess.Popen([sys.executable, "-c", RUNTIME, str(port), model], stdout=subprocess.PIPE, text=True)
    try:
        assert "ready\n" == process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def app_of(*ports: int, interval: float = 0.2) -> TopApp:
    bases = [f"http://127.0.0.1:{port}" for port in ports]
    return TopApp([Watched(base) for base in bases], partial(Poller, bases, interval))


async def until(pilot: Any, words: str, patience: float = PATIENCE) -> str:
    """Wait for words (a regular expression) on the screen."""
    deadline = time.monotonic() + patience
    while not re.search(words, shown := screen(pilot.app), re.MULTILINE):
        assert time.monotonic() < deadline, shown
        await pilot.pause(0.1)
    return shown


def test_a_killed_endpoint_that_is_started_again() -> None:
    """It goes, its figures stay with their age, it comes back as another run, and no rate was negative."""
    port = free_port()
    with runtime(port, "first") as process:
        app = app_of(port)

        async def script(pilot: Any) -> None:
            assert "hit rate   75.0%" in await until(pilot, r"● live, over 0\.\d s(.|\n)*hit rate")
            tokens = app.watched[0].last.values(c.TOKENS, phase="decode")[0]
            process.kill()
            gone = await until(pilot, r"✗ gone for .*refused\); figures are")
            assert "hit rate   75.0%" in gone
            assert "first on" in gone
            with runtime(port, "second"):
                back = await until(pilot, "● live, a new run, over")
                assert "second on" in back
                window = Window(app.watched[0].last)
                assert 0 < window.total(c.TOKENS, phase="decode") < tokens + 1000
                assert 1 == app.watched[0].restarts
                await until(pilot, r"● live, a new run, over 0\.\d s")
                points = [value for _, point in app.watched[0].history._points for value in point.values()]
                assert 0 <= min(points)

        drive(app, script)


def test_a_silent_endpoint_holds_up_nothing() -> None:
    """One that takes the connection and never answers: keys work, the other one is read on, and q ends at once."""
    port = free_port()
    with socket.socket() as silent, runtime(port, "other"):
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        app = app_of(silent.getsockname()[1], port)

        async def script(pilot: Any) -> None:
            begin = time.monotonic()
            assert "94" not in await press(pilot, "2")
            await press(pilot, "e")
            shown = await until(pilot, "DECODE, 2 layers")
            assert "other on" in shown
            assert time.monotonic() - begin < 4.0, "within the time-out of the silent one"
            first = app.watched[1].last
            await pilot.pause(0.6)
            assert first is not app.watched[1].last

        drive(app, script)
        assert app.watched[0].last is None
    with socket.create_server(("127.0.0.1", 0)) as slow:
        begin = time.monotonic()
        (watched,) = watch_once([f"http://127.0.0.1:{slow.getsockname()[1]}"], 0.2, partial(Reader, seconds=0.3))
        assert "no answer in 0.3 s" == watched.failure
        assert time.monotonic() - begin < 3.0


def test_q_in_a_real_terminal_waits_for_nobody() -> None:
    """`moe-telemetry top` as a person starts it: drawn, and gone with q while an answer is still waited for."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "moe_telemetry", "top", f"127.0.0.1:{silent.getsockname()[1]}"]
        environment = {**os.environ, "TERM": "xterm-256color"}
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        connection, _ = silent.accept()  # within its five seconds from here on
        shown = b""
        while b"no answer yet" not in shown:
            shown += os.read(ours, 65_536)
        begin = time.monotonic()
        os.write(ours, b"q")
        threading.Thread(target=_drained, args=(ours,), daemon=True).start()
        assert 0 == process.wait(timeout=30)
        assert time.monotonic() - begin < 3.5
        connection.close()


def _drained(terminal: int) -> None:
    with suppress(OSError):  # the end of the process
        while os.read(terminal, 65_536):
            pass


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str, Any]]:
    """A demo at work: its process, address and the file that its snapshot will be in."""
    pytest.importorskip("mlx.core")
    folder = tmp_path_factory.mktemp("top-demo")
    options = ("--tokens", 120, "--port", 0, "--snapshot", folder / "s.json", "--linger", 60, "--cache", folder)
    command = [sys.executable, "-m", "moe_telemetry", "demo", *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = next(found[1] for line in process.stdout if (found := re.search(r"Metrics: (http://\S+)/metrics", line)))
        yield process, url, folder / "s.json"
    finally:
        process.kill()
        process.communicate()


def test_the_demos_counters_lie_between_its_snapshots(demo: Any) -> None:
    """While it decodes: what two scrapes differ by is between what the snapshots around them differ by."""
    _, url, _ = demo
    snapshot = lambda: json.loads(fetch(f"{url}/snapshot")[2])  # noqa: E731
    read = Reader(url)
    while not Window(read()).total(c.TOKENS, phase="decode"):
        time.sleep(0.2)
    before, first, after = snapshot(), read(), snapshot()
    time.sleep(1.0)
    later, second, last = snapshot(), read(), snapshot()
    window, least, most = Window(second, first), Totals(later, after), Totals(last, before)
    for metric in c.counters():
        assert least.total(metric) <= window.total(metric) <= most.total(metric), metric.name
    assert 0 < window.total(c.LOOKUPS, phase="decode")
    assert 0 < frame(window).phases["decode"].speed


def test_the_demo_to_its_end(demo: Any) -> None:
    """The screen follows the demo; its last scrape has the figures of the snapshot that the demo left behind."""
    process, url, file = demo
    app = app_of(int(url.rpartition(":")[2]), interval=0.5)

    async def script(pilot: Any) -> None:
        shown = await until(pilot, r"● live, over \d\.\d s")
        assert "demo-moe on moe-telemetry-demo" in shown
        assert "DECODE, 12 layers" in await press(pilot, "2")
        await press(pilot, "1")
        process.stdout.read()
        shown = await until(pilot, "✗ gone for")
        totals = Totals(json.loads(file.read_text()))
        window = Window(app.watched[0].last)
        for phase in c.PHASES:
            assert phase_figures(totals, phase) == phase_figures(window, phase)
        hits = [percent(app.watched[0].shown[phase].figures.hit) for phase in ("decode", "prefill")]
        assert hits == re.findall(r"hit rate +([\d.]+)%", shown)

    drive(app, script)


# -- once -----------------------------------------------------------------------------------------------------


def test_once_prints_the_figures_between_two_scrapes(capsys: pytest.CaptureFixture[str]) -> None:
    """Text of at most 80 columns, both phases, with the interval's figures, and exit status 0."""
    port = free_port()
    with runtime(port, "once"):
        assert 0 == cli.main(["top", "--once", "--interval", "0.5", f"127.0.0.1:{port}"])
    text = capsys.readouterr().out
    assert re.search(r"● live, over 0\.[3-9] s", text)
    for words in (
        "DECODE",
        "PREFILL",
        "hit rate   75.0%",
        "- idle",
        "recall     50.0%",
        "seq 1",
        "drafts accepted - no drafts",
    ):
        assert words in text
    speed = float(re.search(r"tok/s +([\d.]+)", text)[1])
    assert 100.0 == pytest.approx(speed)
    assert max(map(len, text.splitlines())) <= 80
    assert text.isprintable() or "\x1b" not in text


def test_once_of_an_endpoint_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    """The others are printed, it is named in one line, and the exit status is 2."""
    port, gone = free_port(), free_port()
    with runtime(port, "once"):
        assert 2 == cli.main(["top", "--once", "--interval", "0.2", f"127.0.0.1:{gone}", f"127.0.0.1:{port}"])
    printed = capsys.readouterr()
    assert "once on" in printed.out
    assert 1 == printed.err.count("\n")
    assert f"http://127.0.0.1:{gone}: connection refused" in printed.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--interval", "0"), "--interval must be from 0.2 to 60 seconds, not 0"),
        (("--interval", "nan"), "--interval must be"),
        (("--interval", "soon"), "invalid float value"),
        (("ftp://x",), "give http://host:port or host:port"),
        (("host:port",), "'host:port' is no address"),
        ([f"h{number}" for number in range(33)], "at most 32 endpoints, not 33"),
        ((), "needs a terminal: use --once"),
    ],
)
def test_bad_options_are_one_line(options: tuple[str, ...], words: str, capsys: Any) -> None:
    """What cannot work is said in one line, with exit status 2."""
    try:
        status = cli.main(["top", *options])
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    assert (2, "", 1) == (status, printed.out, printed.err.count("\n"))
    assert words in printed.err


def test_without_textual_top_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The extra is named, and what works without it."""
    for name in [name for name in sys.modules if name.startswith("moe_telemetry.top.")]:
        if name.endswith((".app", ".widgets")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
    assert 2 == cli.main(["top"])
    assert re.search(r"needs textual.*\[tui\].*--once needs nothing", capsys.readouterr().err)
