"""The benchmarks measure what they say, and the quick ones find a regression."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.hooks import HOOKS
from moe_telemetry.live import LiveRecorder

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    """The folder's modules can be imported, anew."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for path in FOLDER.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.fixture
def hooks(benchmarks):
    """The module benchmarks/hooks.py."""
    import hooks

    return hooks


def test_every_hook_is_measured(hooks):
    """Each hook of the recorder has a case, and so has `timed`."""
    assert {*HOOKS, "timed"} == {case.call.partition("(")[0] for case in hooks.CASES}


def test_every_call_is_taken(hooks):
    """No measured call is one that the recorder drops."""
    for case in hooks.CASES:
        recorder = hooks.recorder("on")
        exec(case.statement("rec."), {**case.names, "rec": recorder})
        assert {0} == set(recorder._store.lost.values()), case.name


def test_a_missed_goal_is_told(hooks):
    """A row beyond its limits misses each of them, one within them none."""
    case = next(case for case in hooks.CASES if case.most)
    beyond = {"on": [100.0], "off": [20.0], "stopped": [10.0], "empty": [10.0], "sdk": [2400.0], "seed": [10.0]}
    assert [True, True, False, True] == [not goal.met for goal in hooks.Row(case, beyond).goals()]
    within = {name: [1.0] for name in beyond} | {"sdk": [99.0], "seed": [9.0]}
    assert all(goal.met for goal in hooks.Row(case, within).goals())


def test_a_limit_twice_as_loose(benchmarks):
    """Of a ratio it is the double or the half; of one that is best at 1, twice the distance from it."""
    from measuring import Goal, Ratio

    found = Ratio(1.0, 0.9, 1.1)
    loose = [
        Goal.of("", "", found, 1.5).loose,
        Goal.of("", "", found, 25.0, least=True).loose,
        Goal.of("", "", found, 1.01, origin=1.0).loose,
        Goal.of("", "", found, 0.98, origin=1.0, least=True).loose,
    ]
    assert pytest.approx([3.0, 12.5, 1.02, 0.96]) == loose


def test_only_a_whole_interval_beyond_is_a_regression(benchmarks):
    """An interval that reaches into the loose limit is noise, whatever the figure."""
    from measuring import Goal, Ratio

    assert Goal.of("", "", Ratio(5.0, 3.1, 6.0), 1.5).broken
    assert not Goal.of("", "", Ratio(5.0, 2.9, 6.0), 1.5).broken
    assert Goal.of("", "", Ratio(5.0, 4.0, 12.4), 25.0, least=True).broken
    assert not Goal.of("", "", Ratio(5.0, 4.0, 12.6), 25.0, least=True).broken


def test_a_ratio_is_of_medians(benchmarks):
    """Medians, not means, and the turns drawn again stay within their extremes."""
    from measuring import ratio

    found = ratio([2.0, 2.0, 2.0, 90.0, 2.2], [1.0, 1.0, 1.0, 1.0, 1.1])
    assert 2.0 == found.value
    assert 2.0 <= found.low <= found.value <= found.high <= 90.0


@pytest.mark.alone
def test_quick_benchmarks_find_no_regression():
    """All ratios are within limits twice as loose as the goals."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "quick.py")], capture_output=True, text=True, timeout=300, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr


def test_a_hook_that_calls_the_sdk_is_found(benchmarks, monkeypatch, capsys):
    """With an SDK instrument in one hook the quick benchmarks fail, and name that hook alone; without it, not."""
    import quick

    meter = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False).get_meter("test")
    record = meter.create_histogram("moe.prefetch.duration").record
    hook = LiveRecorder.prefetch

    def slow(self, stage, seconds):
        hook(self, stage, seconds)
        record(seconds, {"phase": "decode", "stage": stage})

    monkeypatch.setattr(sys, "argv", ["quick.py", "hooks"])
    assert 0 == quick.main(), capsys.readouterr().err
    monkeypatch.setattr(LiveRecorder, "prefetch", slow)
    assert 1 == quick.main()
    wrong = capsys.readouterr().err.splitlines()
    assert any(line.startswith("failed: OpenTelemetry SDK / hook, prefetch: ") for line in wrong), wrong
    assert any(line.startswith("failed: hook / the seed's, prefetch, prefetch: ") for line in wrong), wrong
    assert {"prefetch"} == {line.rpartition(": ")[0].rpartition(", ")[2] for line in wrong}, wrong


def test_the_ways_of_recording_routing_must_agree(benchmarks):
    """All give the same outputs and figures; a call more in one of them is told."""
    import routing_calls

    model = routing_calls.Model(ModelConfig(layers=2, experts=16, top_k=2, width=32, hidden=16))
    with ExitStack() as stack:
        found = routing_calls.measure(model, 1, stack)
        assert [] == routing_calls.misses(found, 2)
        assert all(len(way.passes) == 1 for way in found)
        found[3].hook(0, mx.array([[1, 2]]))
        assert 2 == len(routing_calls.misses(found, 2))
