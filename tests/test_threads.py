"""Eight threads in all hooks at once, and a reader all the while: exact totals, no counter that falls (D13)."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext

import every_hook
import pytest

from moe_telemetry import catalog
from moe_telemetry import recorder as rec
from moe_telemetry.catalog import Kind
from moe_telemetry.hooks import Recorder
from moe_telemetry.series import Distribution
from moe_telemetry.testing import capture

THREADS = 8
ROUNDS = 1500
FED = ("moe.tokens", (("phase", "prefill"),))


@pytest.fixture(autouse=True)
def switch_often():
    """Let the interpreter switch threads a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


class Reader(threading.Thread):
    """Reads all series until told to stop; keeps the counters that were ever seen to fall."""

    def __init__(self, cap):
        super().__init__()
        self.cap, self.done, self.fell, self.readings = cap, threading.Event(), [], 0
        self.error = None

    def run(self):
        last = {}
        try:
            while not self.done.is_set():
                for key, value in self.cap.series().items():
                    if catalog.BY_NAME[key[0]].kind is Kind.GAUGE and not key[0].endswith(".max"):
                        continue
                    parts = (*value.counts, value.sum) if isinstance(value, Distribution) else (value,)
                    before = last.get(key, parts)
                    if any(now < then for now, then in zip(parts, before, strict=True)):
                        self.fell.append((key, before, parts))
                    last[key] = parts
                self.readings += 1
        except Exception as error:
            self.error = error


def together(work, count=THREADS):
    """Run `work(number)` in so many threads that begin at one time."""
    barrier = threading.Barrier(count)

    def run(number):
        barrier.wait()
        work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("locked", [False, True], ids=["plain", "locked"])
def test_totals_are_exact(locked):
    """Every counter and observation of every hook is there, and a scrape never saw one fall."""
    with capture(locked=locked) as cap:
        reader = Reader(cap)
        reader.start()

        def work(_):
            for _ in range(ROUNDS):
                every_hook.call_all(rec)
                rec.tokens(-1)
            cap.series()  # counts what `routed_array` holds back of this thread's passes

        together(work)
        reader.done.set()
        reader.join()
        found = cap.series()
        times = THREADS * ROUNDS
        for key, once in every_hook.COUNTED.items():
            # Absolute values are the source's, whoever hands them in.
            assert (key, once if key == FED else times * once) == (key, found[key])
        for key, once in every_hook.OBSERVED.items():
            assert (key, times * once) == (key, found[key].count)
        assert times == cap.value("moe.telemetry.dropped", reason="negative") == sum(cap.store.lost.values())
    assert reader.error is None
    assert [] == reader.fell
    assert 3 < reader.readings


@pytest.mark.parametrize("locked", [False, True], ids=["plain", "locked"])
def test_new_entries_met_by_all_threads_at_once(locked):
    """Layers, lengths and union sizes that all threads meet for the first time lose no event."""
    with capture(locked=locked) as cap:

        def work(_):
            for step in range(300):
                rec.forward(step + 1, "decode")
                rec.union(step % 100, step)
                rec.routed(step % 100, {step, step + 1}, {step})

        together(work)
        times = THREADS * 300
        assert times == cap.total("moe.layer.calls", residency="unknown")
        assert times == cap.total("moe.layer.calls", residency="partial")
        assert THREADS * sum(range(300)) + 2 * times == cap.total("moe.layer.experts")
        unions = [value for (name, _), value in cap.series().items() if name == "moe.expert.union"]
        assert 2 * times == sum(value.count for value in unions)
        assert {"decode"} == {phase for phase, _ in cap.store.rows}


@pytest.mark.parametrize("locked", [False, True], ids=["plain", "locked"])
def test_each_of_many_threads_reports_for_its_own_pass(locked):
    """Eight threads in passes of different lengths; each one's events stay with its length."""
    with capture(locked=locked) as cap:

        def work(number):
            for _ in range(300):
                rec.forward(number + 1, "decode")
                rec.union(0, number + 1)
                rec.forward_done(0.01)

        together(work)
        for seq in range(1, THREADS + 1):
            union = cap.value("moe.expert.union", phase="decode", seq=str(seq))
            assert (300, 300 * seq) == (union.count, union.sum)
            assert 300 == cap.value("moe.forward.duration", phase="decode", seq=str(seq)).count
        assert {} == cap.store.active


@pytest.mark.parametrize("locked", [False, True], ids=["plain", "locked"])
def test_sources_polled_by_several_threads(locked):
    """The rise of an absolute counter is added once, not once a thread."""
    with capture(locked=locked) as cap:
        same_time = threading.Barrier(THREADS)
        names = ("moe.expert.evictions", "moe.layer.experts", "moe.layer.overflows")

        def work(_):
            for layer in range(256):
                same_time.wait()
                for name in names:
                    for phase in catalog.PHASES:
                        rec.cumulative(name, 1000, phase=phase, layer=layer)

        together(work)
        found = {value for (name, _), value in cap.series().items() if name in names}
        assert {1000} == found
        assert [2 * 256 * 1000] * 3 == [cap.total(name) for name in names]


@pytest.mark.parametrize("locked", [False, True], ids=["plain", "locked"])
def test_turned_off_and_on_under_way(locked):
    """Threads keep calling while telemetry comes and goes: nothing is raised or dropped, and off stays off."""
    stop = threading.Event()
    problems = []

    def work(number):
        try:
            while not stop.is_set():
                rec.forward(number + 1)
                rec.routed(0, {1, 2, 3}, {1, 2})
                rec.tokens(2)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(150):
        with capture(locked=locked) as cap:
            cap.series()
            stop.wait(0.001)
        stop.wait(0.001)
        if type(rec) is not Recorder or any(cap.store.lost.values()):
            problems.append((type(rec), cap.store.lost))
    stop.set()
    for thread in threads:
        thread.join()
    assert [] == problems


@pytest.mark.parametrize("again", [False, True], ids=["stopped", "started-again"])
def test_a_pass_that_begins_during_a_stop_does_not_undo_it(monkeypatch, again):
    """The first pass of a second thread changes the recorder's class, but only that of its own telemetry."""
    reached, go_on = threading.Event(), threading.Event()
    with capture() as cap:
        rec.forward(1)
        watch = cap.store.watch

        def slow(thread):
            reached.set()
            go_on.wait(5)
            watch(thread)

        monkeypatch.setattr(cap.store, "watch", slow)
        second = threading.Thread(target=lambda: rec.forward(100))
        second.start()
        reached.wait(5)
    with capture() if again else nullcontext():
        before = type(rec)
        go_on.set()
        second.join()
        assert before is type(rec)
        assert not again or "decode" == rec._row.phase.name
    assert Recorder is type(rec)
