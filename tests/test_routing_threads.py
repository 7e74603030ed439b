"""Routing on the device where several threads make passes, where calls are interrupted, and where telemetry ends."""

from __future__ import annotations

import ast
import inspect
import os
import signal
import sys
import threading
import time

import lazies
import mlx.core as mx
import pytest
from routed import BEHIND, EXPERTS, calls, cap, lost, passes, routing_of, tokens, way

import moe_telemetry as mt
from moe_telemetry import calls as of_calls
from moe_telemetry import cells, counting, live, loads, pending, recording, reduction, routing, store, tallies
from moe_telemetry import passes as whole
from moe_telemetry import recorder as rec
from moe_telemetry.loads import LOAD_CALLS, ExpertLoad
from moe_telemetry.series import Distribution
from moe_telemetry.testing import capture

__all__ = ["cap", "way"]


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Model:
    """A thread that makes passes, and goes on with `more` when it is told to."""

    def __init__(self, work, more=lambda: None):
        self._handed_in, self._go = threading.Event(), threading.Event()

        def run():
            work()
            self._handed_in.set()
            self._go.wait(10)
            more()

        self._thread = threading.Thread(target=run)

    def __enter__(self):
        self._thread.start()
        assert self._handed_in.wait(10)
        return self

    def __exit__(self, *_):
        self._go.set()
        self._thread.join()


# -- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_behind_the_end_nothing_is_taken(cap, whole):
    """Of no thread, and nothing of it is told: whoever calls then is late, or in the middle of a stop."""
    passes(2, whole=whole)
    cap.store.end()
    passes(2, whole=whole)
    in_thread(lambda: passes(2, whole=whole))
    cap.store.drain()
    passes(2, whole=whole)
    cap.store.end()
    assert 4 == calls(cap)
    assert {} == lost(cap)


@pytest.mark.parametrize("whole", [False, True])
def test_the_end_counts_what_another_thread_left(cap, whole):
    """But for the pass that may be in progress, a loss unless it was handed over whole; then it takes no more."""
    with Model(lambda: passes(12, whole=whole), lambda: passes(2 * BEHIND, whole=whole)):
        cap.store.end()
        assert 22 == calls(cap)
        assert {0: [0, 11, 11] + [0] * 13, 1: [0, 11, 11] + [0] * 13} == tokens(cap)
    cap.store.end()  # the thread has ended meanwhile
    assert 22 == calls(cap)
    assert ({} if whole else {"unevaluated": 2}) == lost(cap)


def test_the_end_walks_no_graph_of_another_thread(cap, monkeypatch):
    """To walk a graph while its thread evaluates it crashes the process."""
    walkers = set()
    original = pending._graph

    def noted(*arrays):
        walkers.add(threading.get_ident())
        return original(*arrays)

    monkeypatch.setattr(pending, "_graph", noted)

    def model():
        passes(3)
        passes(5, evaluate=False)

    with Model(model):
        cap.store.end()
    assert 6 == calls(cap)
    assert {"unevaluated": 10} == lost(cap)
    assert walkers
    assert threading.get_ident() not in walkers


def test_the_end_evaluates_no_mask_of_another_thread(cap):
    """A mask may have a graph behind it: passes with any are left out unless they are being reduced already."""

    def model():
        mask = mx.zeros((EXPERTS,)) > mx.zeros((EXPERTS,))
        for _ in range(routing.FORWARDS + 3):
            array = routing_of([[1, 2]])
            rec.routed_array(0, array, EXPERTS, mask)
            mx.eval(array)

    with Model(model):
        cap.store.end()
    assert routing.FORWARDS == calls(cap)
    assert {"unevaluated": 3} == lost(cap)


def test_the_end_waits_once_for_all_threads_that_wait_for_the_device(cap, monkeypatch):
    """And tells what it leaves out."""
    monkeypatch.setattr(store, "TAKE_OVER_SECONDS", 0.2)
    hang, hanging = threading.Event(), threading.Semaphore(0)
    original = reduction.Batch.count

    def count(batch, of):
        hanging.release()
        hang.wait(10)
        original(batch, of)

    monkeypatch.setattr(reduction.Batch, "count", count)
    threads = [threading.Thread(target=passes, args=(BEHIND + 1, 1)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert hanging.acquire(timeout=10)
    began = time.monotonic()
    cap.store.end()
    took = time.monotonic() - began
    hang.set()
    for thread in threads:
        thread.join()
    assert 0.2 <= took < 0.8
    assert 6 * routing.FORWARDS == calls(cap)  # those that were in their hands
    assert {"unevaluated": 6 * routing.BATCHES_BEHIND * routing.FORWARDS} == lost(cap)


def test_a_call_in_the_middle_of_the_end_is_no_loss(cap, monkeypatch):
    """Nothing is taken any more, and nothing of it is told."""
    original = reduction.Batch.count

    def count(batch, of):
        own = threading.get_ident()
        of.routers[own] = next(iter(of.routers.values()))
        passes(1)  # finds the lock taken, as the model's thread would
        del of.routers[own]
        original(batch, of)

    with Model(lambda: passes(2, whole=True)):
        monkeypatch.setattr(reduction.Batch, "count", count)
        cap.store.end()
    assert 2 == calls(cap)
    assert {} == lost(cap)


def test_figures_go_where_the_call_was_made():
    """Two telemetries in turn, each with passes outstanding at the change."""
    with capture() as outer:
        passes(3, whole=True)
        passes(2)
        with capture() as inner:
            passes(4)
            passes(1, whole=True)
        passes(5)
        inner.store.end()
    passes(7)
    outer.store.end()
    assert 2 * (3 + 2 + 5) == calls(outer)
    assert 2 * (4 + 1) == calls(inner)


def test_a_stop_in_the_middle_of_a_pass(start, recorder):
    """Counts the layers of it that the model has evaluated, and takes no more of it."""
    telemetry = start()
    done, waits = routing_of([[1, 2]]), routing_of([[1, 2]])
    mx.eval(done)
    recorder.routed_array(0, done, EXPERTS)
    recorder.routed_array(1, waits, EXPERTS)
    telemetry.stop()
    recorder.routed_array(2, done, EXPERTS)
    (series,) = [each for each in telemetry.snapshot()["metrics"]["moe.layer.calls"]["series"] if each["value"]]
    assert ("0", 1) == (series["labels"]["layer"], series["value"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.usefixtures("way")
def test_a_forked_child_waits_for_no_device(start, recorder):
    """MLX's threads are not there: a snapshot in a child is what its parent had counted."""
    telemetry = start()
    for _ in range(3):
        array = routing_of([[1, 2]])
        live.routed_pass(recorder, (0,), (EXPERTS,), [array])
        mx.eval(array)
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        try:
            telemetry.snapshot()
        finally:
            os._exit(0)
    assert 0 == os.waitpid(child, 0)[1]
    telemetry.snapshot()
    assert 3 == sum(telemetry._store.latest.layers[0].sizes.values())


# -- threads ----------------------------------------------------------------------------------------------------


def test_threads_that_have_ended_leave_their_figures(cap):
    """To the next thread that comes, or to the end; their identifiers may be used again."""
    for _ in range(3):
        in_thread(lambda: passes(2))
    assert len(cap.store.routers) + len(cap.store.orphans) <= 2
    in_thread(lambda: passes(2))
    assert 12 == calls(cap)
    cap.store.end()
    assert 16 == calls(cap)


@pytest.mark.parametrize("whole", [False, True])
def test_streams_belong_to_threads(cap, whole):
    """Passes on streams of a thread's own, two in turn, are counted by that thread and by others behind its end."""

    def model():
        streams = [mx.new_stream(mx.default_device()) for _ in range(2)]
        for number in range(BEHIND + 2):
            with mx.stream(streams[number % 2]):
                passes(1, whole=whole)

    for _ in range(2):
        in_thread(model)
    model()
    cap.store.end()
    assert 3 * 2 * (BEHIND + 2) == calls(cap)
    assert 3 * 2 * 2 * (BEHIND + 2) == sum(map(sum, tokens(cap).values()))
    assert {} == lost(cap)


@pytest.mark.parametrize("locked", [False, True], ids=["plain", "locked"])
@pytest.mark.usefixtures("way")
def test_threads_count_apart_and_exactly(locked):
    """Eight models at once, their tokens by expert, too."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with capture(locked=locked) as cap:

            def model():
                passes(30)
                array = routing_of([[1, 2]])
                mx.eval(array)
                for _ in range(4 * LOAD_CALLS):
                    live.routed_pass(rec, (0, 1), (EXPERTS, EXPERTS), [array, array])
                cap.store.drain()

            threads = [threading.Thread(target=model) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(switch)
    number = 8 * (30 + 4 * LOAD_CALLS)
    assert 2 * number == cap.total("moe.layer.calls")
    assert Distribution((0, 2 * number, *(0,) * 69), 4 * number) == only(cap, "moe.expert.union")
    assert {layer: [0, number, number] + [0] * 13 for layer in (0, 1)} == tokens(cap)


def only(cap, name):
    (value,) = [value for (found, _), value in cap.series().items() if found == name and value.count]
    return value


def test_threads_add_to_one_load():
    """No number is lost between a piece that is closed and the sums, and the window is what its pieces are."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    load = ExpertLoad(4)
    try:

        def model():
            for _ in range(2000):
                load.count([0, 1, 1, 3])
                load.add(1, [0, 0, 1, 0])

        threads = [threading.Thread(target=model) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert load.peak() is None or 1.0 <= load.peak() <= 4.0
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert [8000, 16000, 8000, 8000] == load.tokens
    assert [sum(tokens) for tokens in zip(*(piece for _, piece in load._pieces), strict=True)] == load._window


def test_a_call_of_one_thread_in_the_middle_of_anothers_counts():
    """It loses nothing of either: here the other fills a piece while the ids of the one are read."""
    load = ExpertLoad(2)

    def ids():
        yield 0
        in_thread(lambda: [load.count([1]) for _ in range(LOAD_CALLS)])
        yield 0

    load.count(ids())
    assert [2, LOAD_CALLS] == load.tokens
    assert [sum(tokens) for tokens in zip(*(piece for _, piece in load._pieces), strict=True)] == load._window


def test_two_threads_may_meet_a_layer_at_once(monkeypatch):
    """They count in one load, the first one's, but for another number of experts."""
    layer, others = store.Layer(0), []

    class Made(ExpertLoad):
        def __init__(self, experts):
            if not others:
                others.append(None)
                in_thread(lambda: others.append(loads.load_of(layer, 4)))
            super().__init__(experts)

    monkeypatch.setattr(loads, "ExpertLoad", Made)
    assert loads.load_of(layer, 4) is others[1]
    others.clear()
    assert 8 == loads.load_of(layer, 8).experts
    assert 8 == layer.load.experts


@pytest.mark.parametrize("module", [cells, live, loads, whole, reduction, of_calls, store])
def test_the_right_side_of_an_increment_holds_no_call(module):
    """An interpreter with a lock may switch threads at a call, between loading a field and storing it again."""
    increments = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.AugAssign)]
    fields = [node for node in increments if not isinstance(node.target, ast.Name)]
    calls = [node for node in fields if any(isinstance(each, ast.Call) for each in ast.walk(node.value))]
    assert [] == [ast.unparse(node) for node in calls if "self._records" != ast.unparse(node.target)]
    assert increments


def test_where_hooks_hold_a_lock_counting_does_too(monkeypatch):
    """A snapshot and a stop count outside of a hook, in the middle of another thread's where no lock is held."""
    held = []

    def look():
        free = recording.hook_lock().acquire(blocking=False)
        if free:
            recording.hook_lock().release()
        held.append(not free)

    def noted(original):
        def count(self, *args):
            in_thread(look)
            original(self, *args)

        return count

    monkeypatch.setattr(reduction.Batch, "count", noted(reduction.Batch.count))
    monkeypatch.setattr(tallies.Tally, "count", noted(tallies.Tally.count))
    with capture(locked=True) as cap:
        passes(2)
        cap.series()
        passes(2, ids=[[1, 2]] * 40, whole=True)
        cap.store.end()
    assert [True, True, True] == held  # two batches, and the tally of the second
    assert 8 == calls(cap)


# -- interrupted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("at", [(counting, "on_cuda"), (pending, "_graph"), (reduction.Batch, "count")])
def test_what_comes_between(cap, monkeypatch, at, whole):
    """A signal handler or a finalizer in the middle of a call: its own call is a loss, its snapshot waits for nothing,
    and all else is counted once."""
    owner, name = at
    original = getattr(owner, name)
    between = []

    def interrupted(*args):
        if not between:
            between.append(True)
            passes(1, layers=1, whole=whole)
            cap.store.drain()
            between.clear()
        return original(*args)

    monkeypatch.setattr(owner, name, interrupted)
    passes(2 * BEHIND, whole=whole)
    monkeypatch.undo()
    assert 2 * 2 * BEHIND == cap.total("moe.layer.calls")
    assert 2 * 2 * 2 * BEHIND == sum(map(sum, tokens(cap).values()))
    assert {"changed"} == set(lost(cap))


@pytest.mark.parametrize("whole", [False, True])
def test_an_end_that_comes_between(cap, monkeypatch, way, whole):
    """A stop in a signal handler cannot wait for the call it has interrupted: it says what it leaves out."""
    original = reduction.Batch.count

    def interrupted(batch, of):
        of.end()
        original(batch, of)

    monkeypatch.setattr(reduction.Batch, "count", interrupted)
    passes(BEHIND + 1, whole=whole)
    passes(1, whole=whole)
    monkeypatch.undo()
    cap.store.drain()
    in_hands = 0 if whole and way == "carried" else 2 * routing.FORWARDS
    assert in_hands == calls(cap)
    assert {"unevaluated": 2 * BEHIND - in_hands} == lost(cap)
    assert [] == lazies.held(cap.store.routers[threading.get_ident()])


def test_an_end_in_the_middle_of_a_call_tells_of_all_that_waits(cap, monkeypatch):
    """Passes that are complete, one that nobody has evaluated, and the one in progress: a loss each, and no call."""
    passes(3)
    passes(1, evaluate=False)
    done = routing_of([[1, 2]])
    mx.eval(done)
    rec.routed_array(0, done, EXPERTS)
    original = store.Store.layer_cells

    def interrupted(of, *args):
        of.end()
        return original(of, *args)

    monkeypatch.setattr(store.Store, "layer_cells", interrupted)
    rec.routed_array(2, done, EXPERTS)
    monkeypatch.undo()
    rec.routed_array(3, done, EXPERTS)
    cap.store.drain()
    assert 0 == calls(cap)
    assert {"unevaluated": 2 * 3 + 2 + 1} == lost(cap)
    assert [] == lazies.held(cap.store.routers[threading.get_ident()])


def test_a_finalizer_may_stop_telemetry(recorder):
    """Wherever the interpreter runs it."""
    telemetry = mt.start(port=0, recorder=recorder)
    stopped = []

    class Last:
        def __del__(self):
            telemetry.stop()
            stopped.append(True)

    array = mx.array([[1, 2]])
    mx.eval(array)
    last = Last()
    last.itself = last
    del last
    kept = []  # what lives on is what makes the interpreter collect
    while not stopped:
        kept.append([])
        recorder.routed_array(0, array, EXPERTS)
    assert type(recorder) is mt.Recorder
    before = telemetry.snapshot()
    recorder.routed_array(0, array, EXPERTS)
    assert before["metrics"]["moe.layer.calls"] == telemetry.snapshot()["metrics"]["moe.layer.calls"]
