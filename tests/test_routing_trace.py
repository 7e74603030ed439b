"""The routing trace: what is in the file, its bound, and every way in which a run or a disk ends."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_reuse import Call, trace

import moe_telemetry as mt
from moe_telemetry import catalog as c
from moe_telemetry import cli, policies, routing_trace
from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.demo.engine import Engine
from moe_telemetry.demo.settings import DemoSettings
from moe_telemetry.reports import ReportError
from moe_telemetry.trace_reader import RecordedRun, read

PAGE = Path(__file__).parent.parent / "docs" / "pool_size.md"
Start = Callable[..., Any]


def route(rec: mt.Recorder, calls: list[Call]) -> None:
    """A pass a call."""
    for layer, phase, experts in calls:
        rec.forward(1, phase)
        rec.routed(layer, experts)


def few_lines(path: Path) -> list[Call]:
    """A trace of one run as docs/pool_size.md reads it."""
    (example,) = re.findall(r"```python\n(.*?def calls.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    return [(layer, phase, frozenset(experts)) for layer, phase, experts in names["calls"](path)]


def lru_of(found: RecordedRun) -> dict[str, dict[str, list[int]]]:
    """LRU's curves by layer and phase, from a trace."""
    return {
        str(layer): {
            phase: list(curve.distances)
            for phase, curve in zip(c.PHASES, policies.lru(calls), strict=True)
            if curve.lookups
        }
        for layer, calls in found.layers.items()
    }


def live(snapshot: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    """The same of a snapshot."""
    return {
        layer: {phase: curve["distances"] for phase, curve in of.items()}
        for layer, of in snapshot["pool_curve"]["layers"].items()
    }


def test_each_call_is_a_line_in_its_order(start: Start, recorder: mt.Recorder, tmp_path: Path) -> None:
    """Layer, phase and ids, in a file of the user's own; the run before them, the end behind them."""
    path = tmp_path / "trace"
    calls = trace("zipf", 40, 100, seed=1)
    telemetry = start(trace=path, pool_curve="all", model="m", run="night", snapshot_file=tmp_path / "totals.json")
    route(recorder, calls)
    telemetry.stop()
    assert calls == few_lines(path)
    assert 0o600 == path.stat().st_mode & 0o777
    first, *_, last = map(json.loads, path.read_text().splitlines())
    assert ("m", "all", list(c.PHASES)) == (first["model"], first["layers"], first["phases"])
    assert telemetry.snapshot()["run"]["run"] == first["run"]
    assert {"end": {"calls": 200, "left_out": 0, "why": None, "layers": 2}} == last
    for snapshot in (telemetry.snapshot(), json.loads((tmp_path / "totals.json").read_text())):
        assert {"calls": 200, "left_out": 0} == snapshot["pool_curve"]["trace"]
    assert live(telemetry.snapshot()) == lru_of(read(str(path)))


def test_layers_that_are_not_followed_are_not_in_it(start: Start, recorder: mt.Recorder, tmp_path: Path) -> None:
    """One of four by default, and none that has too many experts or ids that are none."""
    path = tmp_path / "trace"
    telemetry = start(trace=path)
    for layer in range(8):
        recorder.routed(layer, {layer, 30})
    recorder.routed(1, set(range(600)))
    recorder.routed(5, {"a"})  # type: ignore[arg-type]
    recorder.routed(5, {3})
    telemetry.stop()
    assert [(1, {1, 30}), (5, {5, 30})] == [(layer, experts) for layer, _, experts in few_lines(path)]


def test_without_it_there_is_neither_file_nor_thread(start: Start, recorder: mt.Recorder, tmp_path: Path) -> None:
    """Off by default."""
    telemetry = start(pool_curve="all")
    recorder.routed(0, {1})
    assert [] == [thread.name for thread in threading.enumerate() if thread.name == "moe-telemetry-trace"]
    assert "trace" not in telemetry.snapshot()["pool_curve"]
    assert [] == list(tmp_path.iterdir())


def test_lru_of_the_demos_trace_is_the_live_curve(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every size, by layer and phase, to the integer; and the report has the pools' capacity of the snapshot."""
    path, totals = tmp_path / "trace", tmp_path / "totals.json"
    model = ModelConfig(layers=3, experts=48, width=64, hidden=64)
    telemetry = start(trace=path, snapshot_file=totals, pool_curve="all", recorder=mt.recorder)
    with Engine(DemoSettings(tokens=60, read_mbps=1e5, cache_dir=tmp_path), config=model) as engine:
        engine.prepare()
        engine.run(threading.Event())
    telemetry.stop()
    snapshot = telemetry.snapshot()
    assert live(snapshot) == lru_of(read(str(path), snapshot["run"]["run"]))
    assert 0 == cli.main(["report", str(totals), "--trace", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (16, []) == (
        found["policies"]["capacity"],
        [of["whole"] for of in found["policies"]["phases"].values() if of["whole"] is not None],
    )
    for phase in c.PHASES:
        of = found["policies"]["phases"][phase]
        assert found["pool_size"]["phases"][phase]["hit_rates"] == {
            slots: of["hit_rates"]["lru"][slots] for slots in found["pool_size"]["phases"][phase]["hit_rates"]
        }
        assert (16, found["pool_size"]["phases"][phase]["simulated"]) == (of["at"]["slots"], of["at"]["lru"])
        assert of["at"]["optimum"] >= max(of["at"]["lru"], of["at"]["lfu"])


def test_each_layer_is_judged_by_its_own_pool(
    start: Start, recorder: mt.Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two capacities, neither of the catalog's: the figure is the sum of each layer's at its own."""
    path, totals = tmp_path / "trace", tmp_path / "totals.json"
    telemetry = start(trace=path, snapshot_file=totals, pool_curve="all")
    for layer, slots in ((0, 5), (1, 11)):
        recorder.pool(layer, capacity=slots)
    route(recorder, trace("zipf", 40, 200, seed=4))
    telemetry.stop()
    assert 0 == cli.main(["report", str(totals), "--trace", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)["policies"]
    decode = found["phases"]["decode"]
    for policy in ("lru", "lfu", "optimum"):
        hits = sum(
            found["layers"][layer]["decode"]["hits"][policy][slots] for layer, slots in (("0", "5"), ("1", "11"))
        )
        assert hits / decode["lookups"] == decode["at"][policy]
    assert 5 == decode["at"]["slots"]
    assert {"8", "16", "24", "32", "48"} == decode["hit_rates"]["lru"].keys()


def test_threads_write_one_trace(start: Start, recorder: mt.Recorder, tmp_path: Path) -> None:
    """Layers of two threads, while a third scrapes: the calls of each in their order, and LRU is the live curve."""
    path = tmp_path / "trace"
    telemetry = start(trace=path, pool_curve="all")
    own = {layer: [{(layer + step * number) % 50 for step in range(4)} for number in range(2000)] for layer in range(2)}
    done = threading.Event()

    def work(layer: int) -> None:
        for experts in own[layer]:
            recorder.forward(1)
            recorder.routed(layer, experts)

    def collect() -> None:
        while not done.is_set():
            telemetry.snapshot()

    workers = [threading.Thread(target=work, args=(layer,)) for layer in own]
    collector = threading.Thread(target=collect)
    for thread in (collector, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    collector.join()
    telemetry.stop()
    calls = few_lines(path)
    for layer, sets in own.items():
        assert sets == [experts for at, _, experts in calls if at == layer]
    assert live(telemetry.snapshot()) == lru_of(read(str(path)))


# -- bounds and disks ------------------------------------------------------------------------------------------------


def test_a_full_file_ends_the_trace_and_counts(
    start: Start, recorder: mt.Recorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds the exact beginning, in no more bytes than were allowed, and says how many calls it lacks."""
    path = tmp_path / "trace"
    calls = trace("random", 300, 800, seed=2)
    telemetry = start(trace=path, trace_bytes=65_536, pool_curve="all")
    route(recorder, calls)
    telemetry.stop()
    written = few_lines(path)
    assert 65_536 >= path.stat().st_size > 60_000
    assert calls[: len(written)] == written
    lacking = len(calls) - len(written)
    assert 0 < lacking
    assert {"calls": len(written), "left_out": lacking} == telemetry.snapshot()["pool_curve"]["trace"]
    end = read(str(path)).end
    assert {"calls": len(written), "left_out": lacking, "why": "full", "layers": 2} == end
    assert f"lacks the last {lacking} calls: the file has no room for more" in caplog.text
    assert sum(len(experts) for *_, experts in calls) == sum(
        curve["lookups"] for curve in telemetry.snapshot()["pool_curve"]["overall"].values()
    )


def test_a_file_that_is_full_already_takes_no_further_run(
    start: Start, recorder: mt.Recorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Telemetry starts nevertheless, and leaves the file as it is."""
    path = tmp_path / "trace"
    path.write_bytes(
        routing_trace.BEGIN + b'1, "run": "first", "phases": ["prefill", "decode"]}\n' + b"[0,1,2]\n" * 9000
    )
    before = path.read_bytes()
    telemetry = start(trace=path, trace_bytes=65_536, pool_curve="all")
    recorder.routed(0, {1})
    telemetry.stop()
    assert before == path.read_bytes()
    assert {"calls": 0, "left_out": 1} == telemetry.snapshot()["pool_curve"]["trace"]
    assert "ends here, further calls are only counted: the file has no room for more" in caplog.text


def test_runs_stand_one_behind_the_other(start: Start, recorder: mt.Recorder, tmp_path: Path) -> None:
    """A file that is there is appended to, also behind a run that was cut off; each run is read by its name."""
    path = tmp_path / "trace"
    for number in range(3):
        telemetry = start(trace=path, pool_curve="all", run=f"run {number}")
        recorder.routed(0, {number, 7})
        recorder.routed(0, {number, 8})
        telemetry.stop()
        if number == 1:
            text = path.read_text()
            path.write_text(text[: text.rindex("[0,") + 4])  # its second call is torn, its end gone
    found = read(str(path))
    assert (3, 0, 2) == (found.runs, found.unreadable, len(found.layers[0].ends))
    assert found.run["run"].startswith("run 2 ")
    begins = [json.loads(line)["run"] for line in path.read_text().splitlines() if "routing_trace" in line]
    ids = [read(str(path), run).layers[0].ids for run in begins]
    assert [{0, 7, 8}, {1, 7}, {2, 7, 8}] == [set(each) for each in ids]
    assert (None, 1) == (read(str(path), begins[1]).end, read(str(path), begins[1]).unreadable)
    with pytest.raises(ReportError, match="is of another run than the snapshot"):
        read(str(path), "run 9")


def test_a_torn_last_line_is_left_out(start: Start, recorder: mt.Recorder, tmp_path: Path) -> None:
    """Wherever it is torn, whole lines count and the torn one is told."""
    path = tmp_path / "trace"
    telemetry = start(trace=path, pool_curve="all")
    for number in range(5):
        recorder.routed(0, {number, 100 + number})
    telemetry.stop()
    whole = path.read_bytes()
    last = whole.rindex(b"[0,")
    for cut in range(last, whole.index(b"\n", last)):
        path.write_bytes(whole[:cut])
        found = read(str(path))
        assert (4, cut > last, None) == (len(found.layers[0].ends), found.unreadable == 1, found.end)
    compressed = tmp_path / "trace.gz"
    import gzip

    compressed.write_bytes(gzip.compress(whole))
    assert 5 == len(read(str(compressed)).layers[0].ends)


def refused(start: Start, **options: Any) -> str:
    """What a start that fails says."""
    with pytest.raises(mt.ConfigurationError) as raised:
        start(**options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_is_no_file_for_it_is_told_at_the_start(start: Start, recorder: mt.Recorder, tmp_path: Path) -> None:
    """Another file, a pipe, one that a run is writing to; nothing has started or changed then."""
    other = tmp_path / "run.json"
    other.write_text('{"schema": 1}')
    os.mkfifo(tmp_path / "pipe")
    assert refused(start, trace=other).endswith(": there is a file that is no routing trace")
    assert '{"schema": 1}' == other.read_text()
    assert refused(start, trace=tmp_path / "pipe").endswith(": it is no file")
    assert refused(start, trace=tmp_path / "no" / "trace").endswith(": there is no such folder")
    assert type(recorder) is mt.Recorder
    assert [] == [thread.name for thread in threading.enumerate() if thread.name == "moe-telemetry-trace"]
    running = start(trace=tmp_path / "trace")
    assert refused(start, trace=tmp_path / "trace").endswith(": another run writes to it")
    running.stop()
    start(trace=tmp_path / "trace").stop()
    assert 2 == read(str(tmp_path / "trace")).runs


PROGRAM = """
import os, resource, signal, sys, time
import moe_telemetry as mt
rec = mt.recorder
telemetry = mt.start(port=0, trace=sys.argv[1], pool_curve="all")
"""


def program(path: Path, body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that writes a trace."""
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM + textwrap.dedent(body), path, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("again", [False, True])
def test_a_disk_that_fails_in_the_middle_costs_the_trace_only(again: bool, tmp_path: Path) -> None:
    """The process may write 20,000 bytes, in the middle of a line: one log line, what is whole is read, the rest is
    counted, every hook works on; where there is room again, the end is written, and no call behind the gap."""
    path = tmp_path / "trace"
    done = program(
        path,
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        for number in range(1000):
            rec.routed(0, {number % 400, 400, 401, 402, 403})
        telemetry._trace._curves.collect()
        time.sleep(1.5)
        for number in range(1000):
            rec.routed(0, {number % 400, 400, 401, 402, 403})
        if sys.argv[2] == "True":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        telemetry.stop()
        found = telemetry.snapshot()["pool_curve"]
        print(found["trace"]["calls"], found["trace"]["left_out"], found["overall"]["decode"]["lookups"])
        """,
        str(again),
    )
    calls, left_out, lookups = map(int, done.stdout.split())
    assert 0 == done.returncode
    found = read(str(path))
    assert (calls, 1) == (len(found.layers[0].ends), found.unreadable)
    end = {"calls": calls, "left_out": left_out, "why": "disk", "layers": 1} if again else None
    assert (end, again) == (found.end, path.stat().st_size > 20_000)
    assert (2000, 10_000) == (calls + left_out, lookups)
    assert 700 < calls < 1000
    assert ["ends here, further calls are only counted", f"lacks the last {left_out} calls"] == [
        words
        for line in done.stderr.splitlines()
        for words in ("ends here, further calls are only counted", f"lacks the last {left_out} calls")
        if words in line
    ]
    assert 2 == done.stderr.count("it could not be written to")


def test_a_killed_run_has_its_calls_up_to_a_second_before(tmp_path: Path) -> None:
    """Nobody scrapes, nothing is stopped, and no more than what is a line's end is missing."""
    path = tmp_path / "trace"
    done = program(
        path,
        """
        for number in range(500):
            rec.routed(0, {number % 40, 50})
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    found = read(str(path))
    assert (-signal.SIGKILL, 500, None) == (done.returncode, len(found.layers[0].ends), found.end)


def test_a_forked_child_leaves_the_parents_trace_alone(tmp_path: Path) -> None:
    """It writes nothing, may write one of its own, and keeps no lock; an interpreter that ends writes the end."""
    path = tmp_path / "trace"
    done = program(
        path,
        """
        rec.routed(0, {1})
        child = os.fork()
        if child == 0:
            rec.routed(0, {2})
            with mt.start(port=0, trace=sys.argv[1] + "2", pool_curve="all"):
                rec.routed(0, {3})
            time.sleep(1)
            os._exit(0)
        rec.routed(0, {4})
        telemetry.stop()
        mt.start(port=0, trace=sys.argv[1], pool_curve="all")
        rec.routed(0, {5})
        os.waitpid(child, 0)
        """,
    )
    assert (0, 2) == (done.returncode, read(str(path)).runs), done.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [[0, 1, 1], [0, 1, 4], [0, 1, 5]] == [record for record in records if isinstance(record, list)]
    assert 2 == sum("end" in record for record in records if isinstance(record, dict))
    assert [3] == read(f"{path}2").layers[0].ids


def test_hooks_never_wait_for_the_disk(
    start: Start,
    recorder: mt.Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that hangs: hooks and scrapes go on, what waits for it is bounded, a stop is not held up for long."""
    monkeypatch.setattr(routing_trace, "MAX_BACKLOG", 10_000)
    monkeypatch.setattr(routing_trace, "WRITE_SECONDS", 0.01)
    monkeypatch.setattr(routing_trace, "END_SECONDS", 0.2)
    telemetry = start(trace=tmp_path / "trace", pool_curve="all")
    hangs, goes_on = threading.Event(), threading.Event()
    write = os.write

    def slow(file: int, data: Any) -> int:
        if threading.current_thread().name == "moe-telemetry-trace":
            hangs.set()
            goes_on.wait(20)
        return write(file, data)

    monkeypatch.setattr(os, "write", slow)
    recorder.routed(0, {1})
    assert hangs.wait(10)
    rng = random.Random(1)
    for _ in range(3000):
        recorder.routed(0, set(rng.sample(range(100), 4)))
    held = telemetry._trace
    telemetry.snapshot()
    assert 10_000 >= sum(map(len, held._waiting)) > 9_000
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        telemetry.stop()
    assert 5 > time.monotonic() - began
    assert "has no end yet: a thread waits for the disk" in caplog.text
    goes_on.set()
    held._thread.join(10)
    end = read(str(tmp_path / "trace")).end
    assert end is not None
    assert (3001, "behind") == (end["calls"] + end["left_out"], end["why"])
