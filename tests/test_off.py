"""Hooks that are off: no-ops on the object that was imported before (D12)."""

from __future__ import annotations

import every_hook
import lazies
import mlx.core as mx
import pytest
from conftest import stable_repr

from moe_telemetry import recorder as rec
from moe_telemetry import recording
from moe_telemetry.hooks import HOOKS, Recorder
from moe_telemetry.testing import capture

no_evaluation = pytest.fixture(lazies.no_evaluation)


def test_a_reference_taken_at_import_is_right_at_any_time():
    """Off, on, off, on: one object, and each start counts from 0."""
    assert Recorder is type(rec)
    rec.tokens(1)
    for tokens in (2, 3):
        with capture() as cap:
            assert Recorder is not type(rec)
            rec.tokens(tokens)
        rec.tokens(10)
        assert Recorder is type(rec)
        assert tokens == cap.total("moe.tokens")


def test_off_every_hook_accepts_what_it_accepts_on():
    """The same calls, by position and by name, return None."""
    for _ in range(2):
        for name, (args, named) in every_hook.CALLS.items():
            assert getattr(rec, name)(*args, **named) is None
        with capture():
            every_hook.call_all(rec)


@pytest.mark.parametrize("value", [None, "x", -1, float("nan"), object(), mx.array(1)], ids=stable_repr)
def test_off_nothing_is_looked_at(value, no_evaluation):
    """Not even a lazy array or an iterable."""
    for name, (args, named) in every_hook.CALLS.items():
        getattr(rec, name)(*(value for _ in args), **dict.fromkeys(named, value))
    source = iter([1])
    rec.routed(0, source)
    assert 1 == next(source)


def test_timed_when_off():
    """The block runs, its exception passes, nothing is called."""
    called = []
    with rec.timed(lambda *args: called.append(args), "fetch"), rec.timed(rec.window):
        called.append("block")
    with pytest.raises(ZeroDivisionError), rec.timed(rec.window):
        raise ZeroDivisionError
    assert ["block"] == called


def test_timed_across_start_and_stop():
    """A block that began off records nothing; one that ended after the stop raises nothing."""
    with rec.timed(rec.window), capture() as cap:
        pass
    assert 0 == cap.value("moe.prefetch.window", phase="decode").count
    with capture() as cap:
        block = rec.timed(rec.window)
        block.__enter__()
    block.__exit__(None, None, None)
    with capture() as later:
        pass
    assert 0 == later.value("moe.prefetch.window", phase="decode").count


@pytest.mark.parametrize("locked", [False, True], ids=["plain", "locked"])
def test_nested_telemetries_do_not_see_each_other(locked):
    """The inner one takes the recorder over; the outer one goes on with its own pass and variant."""
    with capture(locked=locked) as outer:
        variant = type(rec)
        rec.forward(100)
        rec.tokens(1)
        with capture() as inner:
            rec.forward(1)
            rec.tokens(10)
        assert variant is type(rec)
        rec.tokens(2)
    assert {"prefill": 3, "decode": 0} == {
        phase: outer.total("moe.tokens", phase=phase) for phase in ("prefill", "decode")
    }
    assert {"prefill": 0, "decode": 10} == {
        phase: inner.total("moe.tokens", phase=phase) for phase in ("prefill", "decode")
    }


def test_recorders_of_ones_own_are_apart():
    """Two recorders feed two telemetries."""
    mine, other = Recorder(), Recorder()
    with capture(recorder=mine) as first, capture(recorder=other) as second:
        mine.tokens(1)
        other.tokens(10)
        rec.tokens(100)
    assert (1, 10) == (first.total("moe.tokens"), second.total("moe.tokens"))


def test_an_error_in_the_block_turns_the_recorder_off():
    """capture() restores the state before, whatever happens in it."""
    with pytest.raises(ZeroDivisionError), capture():
        raise ZeroDivisionError
    assert Recorder is type(rec)


def test_a_recorder_cannot_be_given_stray_attributes():
    """A misspelt hook assigned to the recorder would otherwise shadow it for good."""
    with pytest.raises(AttributeError):
        rec.token = 1


@pytest.mark.parametrize("locked", [True, False])
def test_the_variant_follows_the_interpreter_unless_chosen(monkeypatch, locked):
    """Free-threaded interpreters get the locked hooks."""
    monkeypatch.setattr(recording.sys, "_is_gil_enabled", lambda: not locked, raising=False)
    assert locked is recording.needs_lock()
    with capture():
        assert locked is isinstance(rec, recording.LockedRecorder)
        every_hook.call_all(rec)


def test_a_locked_hook_runs_under_the_lock(monkeypatch):
    """Each hook of the locked variant takes the lock and gives it back."""
    taken = []

    class Lock:
        def __enter__(self):
            taken.append("in")

        def __exit__(self, *_):
            taken.append("out")

    with capture(locked=True):
        monkeypatch.setattr(recording, "_lock", Lock())
        every_hook.call_all(rec)
        found = taken.copy()  # turning the recorder off takes the lock, too
    assert ["in", "out"] * len(HOOKS) == found
