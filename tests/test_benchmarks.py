"""The benchmarks measure what they say, and the quick ones find a regression."""

import sys
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import pytest

from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.hooks import HOOKS

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
