"""Hooks take anything: a share of the fuzzing (`python tests/fuzz_hooks.py` is the long form), and what it found."""

from __future__ import annotations

import logging
import os
from random import Random
from types import MethodType
from unittest.mock import MagicMock

import fuzz_hooks
import hostile
import pytest

from moe_telemetry import profiling
from moe_telemetry import recorder as rec
from moe_telemetry.hooks import HOOKS
from moe_telemetry.testing import capture
from moe_telemetry.values import Refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what a comparison with hostile objects does
SEED = int(os.environ.get("FUZZ_SEED", "0"))


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "moe_telemetry")


def lost(cap) -> dict[str, int]:
    return {reason: number for reason, number in cap.store.lost.items() if number}


def test_every_hook_is_fuzzed():
    """A hook that is added gets its arguments here, too."""
    assert set(HOOKS) == set(fuzz_hooks.PARAMETERS)


@pytest.mark.parametrize("number", range(5))
def test_hostile_arguments(number):
    """Whatever the arguments: no Exception, whole records, figures that never fall, each loss by one reason."""
    with fuzz_hooks.changing():
        for seed in range(10):
            found = fuzz_hooks.run(Random(f"{SEED} {number} {seed}"), 200)
            assert found.taken
            assert found.refused


def test_what_hypothesis_builds():
    """The same with plain and nested values of every type, shrunk to the smallest calls where one fails."""
    sessions = fuzz_hooks.built(90)
    assert sum(each.refused.total() for each in sessions)
    assert sum(each.taken.total() for each in sessions)


def test_hostile_arguments_of_the_drop_in():
    """The functions of `profiling` raise nothing either, and what they export never falls."""
    for seed in range(8):
        assert fuzz_hooks.dropin(Random(f"{SEED} {seed}"), 200).taken


def test_fuzzing_finds_what_is_wrong(monkeypatch):
    """A total that falls, a loss that is not counted, an Exception and a torn record do not pass."""
    with fuzz_hooks.session(Random(1)) as found:
        found.make("tokens", (3,), {})
        found.check()
        found.captured.store.phases["decode"].tokens -= 1
        with pytest.raises(fuzz_hooks.Broken):
            found.check()
    with fuzz_hooks.session(Random(1)) as found:
        found.make("union", (0, 3), {})
        found.captured.store.layers[0].capacity = None
        found.captured.store.rows["decode", 1].layers[0].unknown = 0
        with pytest.raises(fuzz_hooks.Broken):
            found.check()
    with fuzz_hooks.session(Random(1)) as found:
        with pytest.raises(fuzz_hooks.Broken, match="tokens raised TypeError"):
            found.make("tokens", (), {})
        found.captured.store.phases["decode"].window.sum = float("nan")
        with pytest.raises(fuzz_hooks.Broken):
            found.check()


# -- what it has found ---------------------------------------------------------------------------------------------


def test_what_says_it_is_a_set_is_read_as_far_as_anything():
    """A mock of a set is an iterable: one that never ends is given up, and an empty one is empty."""
    with capture() as cap:
        rec.routed(0, hostile._lying(set), {1})
        rec.routed(0, MagicMock(spec=set), {1})
    assert {"too_many": 1} == lost(cap)
    assert 1 == cap.total("moe.layer.calls")


def test_items_that_equal_what_they_like_make_no_figure_negative():
    """Sets whose intersections do not fit each other: no figure may fall, and each expert has one outcome."""
    with capture() as cap:
        for seed in range(300):
            rec.routed(0, *(hostile._fickle(Random(f"{seed} {number}")) for number in range(4)))
            cells = cap.store.latest.layers.get(0)
            assert cells is None or 0 <= min(
                *(cells.hit, cells.miss_timing, cells.miss_evicted, cells.miss_unpredicted),
                *(cells.recalled, cells.missed, cells.wasted, cells.prefetch_hits),
            )
        assert {"changed"} >= set(lost(cap))
        assert 0 < cap.total("moe.layer.experts") == cap.total("moe.expert.lookups")
        assert cap.total("moe.prefetch.hits") <= cap.total("moe.expert.lookups", outcome="hit")


def test_timing_by_what_has_no_name_raises_nothing():
    """A bound method need not have a name, and telling which hook it was must not fail."""
    with capture() as cap, rec.timed(MethodType(hostile._NoName(), 1)):
        pass
    assert {"error": 1} == lost(cap)


def test_a_condition_that_raises_leaves_a_request_uncounted(no_evaluation):
    """`idle` is looked at before anything is counted, and not at all where that would evaluate it."""
    with capture() as cap:
        rec.request(0.1, 1.0, 5, idle=hostile.raising("__bool__", ValueError))
        rec.request(0.1, 1.0, 5, idle=hostile.mx.array(1) + 1)
        assert 0 == cap.value("gen_ai.server.request.duration", **_GEN_AI).count
        rec.request(0.1, 1.0, 5, idle=0)
        assert 1 == cap.value("gen_ai.server.request.duration", **_GEN_AI).count
    assert {"error": 1, "lazy_array": 1} == lost(cap)


_GEN_AI = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "test",
    "gen_ai.request.model": "test",
}


def _refusing():
    raise Refused(["no reason"])  # type: ignore[arg-type]
    yield


def test_a_reason_that_is_none_is_an_error():
    """A caller's code that raises our own exception does not make a loss go uncounted."""
    with capture() as cap:
        rec.routed(0, _refusing())
    assert {"error": 1} == lost(cap)


def test_long_ranges_end_in_the_drop_in():
    """A range says how long it is, and compares all of its numbers with what is no int."""
    with capture() as cap:
        profiling.note_miss_attrib(range(10**12), None, set(), True)
        profiling.note_miss_attrib({"a", 3}, None, range(10**12), True)
        profiling.union_reset()
    assert {"too_many": 1} == lost(cap)
    assert 1 == cap.total("moe.expert.lookups", outcome="hit")


@pytest.fixture
def no_evaluation():
    from lazies import no_evaluation as watched

    yield from watched()
