"""The benchmarks measure what they say."""

import sys
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import pytest

from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.hooks import HOOKS

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def hooks(monkeypatch):
    """The module benchmarks/hooks.py."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("hooks", "hook_cases", "dropin", "seed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import hooks

    return hooks


def test_every_hook_is_measured(hooks):
    """Each hook of the recorder has a case."""
    assert set(HOOKS) == {case.call.partition("(")[0] for case in hooks.CASES}


def test_every_call_is_taken(hooks):
    """No measured call is one that the recorder drops."""
    for case in hooks.CASES:
        recorder = hooks.recorder("on")
        exec(f"rec.{case.call}", {**case.names, "rec": recorder})
        assert {0} == set(recorder._store.lost.values()), case.name


def test_a_missed_target_is_told(hooks):
    """A row beyond a limit names it."""
    case = next(case for case in hooks.CASES if case.most)
    row = hooks.Row(case, {"on": 100.0, "off": 20.0, "stopped": 10.0, "empty": 10.0, "sdk": 2400.0, "seed": 10.0})
    assert 3 == len(row.misses())
    assert (
        [] == hooks.Row(case, {"on": 1.0, "off": 1.0, "stopped": 1.0, "empty": 1.0, "sdk": 99.0, "seed": 9.0}).misses()
    )


def test_the_ways_of_recording_routing_must_agree(monkeypatch):
    """All give the same outputs and figures; a call more in one of them is told."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import routing_calls

    model = routing_calls.Model(ModelConfig(layers=2, experts=16, top_k=2, width=32, hidden=16))
    with ExitStack() as stack:
        found = routing_calls.measure(model, 1, stack)
        assert [] == routing_calls.misses(found, 2)
        assert all(len(way.passes) == 1 for way in found)
        found[3].hook(0, mx.array([[1, 2]]))
        assert 2 == len(routing_calls.misses(found, 2))
