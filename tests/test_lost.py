"""Whatever a hook is given: nothing raised, nothing half counted, each loss counted by reason (D7, D11)."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import signal
import threading
from decimal import Decimal

import every_hook
import lazies
import mlx.core as mx
import numpy as np
import pytest

from moe_telemetry import losses
from moe_telemetry import recorder as rec
from moe_telemetry.series import Distribution
from moe_telemetry.testing import capture

no_evaluation = pytest.fixture(lazies.no_evaluation)


@pytest.fixture(params=[False, True], ids=["plain", "locked"])
def cap(request):
    """A started telemetry, in both variants of the hooks."""
    with capture(locked=request.param) as found:
        yield found


def lost(cap):
    """Records dropped, by reason."""
    return {reason: count for reason, count in cap.store.lost.items() if count}


def counted(cap):
    """Everything that was counted, telemetry's own figures, the clock and the known layers' zeros apart."""
    own = ("moe.telemetry.", "moe.run.", "moe.forward.active")
    return {key: value for key, value in cap.series().items() if not key[0].startswith(own) and _some(value)}


def _some(value):
    return value.count or value.sum if isinstance(value, Distribution) else value


POSITIONS = [(hook, at) for hook, (args, named) in every_hook.CALLS.items() for at in (*range(len(args)), *named)]
"""Each argument of each hook: (hook, its position or name)."""


def call_with(hook, at, value):
    """A good call of the hook but for one argument."""
    args, named = every_hook.CALLS[hook]
    if isinstance(at, str):
        getattr(rec, hook)(*args, **{**named, at: value})
    else:
        getattr(rec, hook)(*args[:at], value, *args[at + 1 :], **named)


# -- numbers -------------------------------------------------------------------------------------------------------

NUMERIC = [
    ("forward_done", 0, "moe.forward.duration"),
    ("tokens", 0, "moe.tokens"),
    ("request", 1, "gen_ai.server.request.duration"),
    ("union", 1, "moe.expert.union"),
    ("prefetch", 1, "moe.prefetch.duration"),
    ("promote", 1, "moe.promote.duration"),
    ("window", 0, "moe.prefetch.window"),
    ("placed", 0, "moe.prefetch.placed"),
    ("prefetch_dropped", 1, "moe.prefetch.dropped"),
    ("prefetch_dropped", 2, "moe.prefetch.wasted"),
    ("block", 1, "moe.block.duration"),
    ("read", 1, "moe.expert.read"),
    ("read", 2, "moe.expert.read.duration"),
    ("stall", 0, "moe.expert.stall.duration"),
    ("evicted", 1, "moe.expert.evictions"),
    ("degraded", 1, "moe.expert.degraded"),
]


def total(cap, name):
    """Sum of all series of a counter or histogram."""
    return sum(
        value.sum if isinstance(value, Distribution) else value
        for (found, _), value in cap.series().items()
        if found == name
    )


@pytest.mark.parametrize(("hook", "at", "name"), NUMERIC)
def test_numbers_that_poison_a_sum_are_dropped(cap, hook, at, name):
    """Of 1, NaN, +Inf, -Inf, -3 and 5 the sum is 6, and four drops are counted (C06)."""
    for value in (1, math.nan, math.inf, -math.inf, -3, 5):
        call_with(hook, at, value if hook != "request" else value and float(value))
    assert 6 == total(cap, name)
    assert {"not_finite": 3, "negative": 1} == lost(cap)


def test_a_histogram_counts_only_what_it_sums(cap):
    """Of those six values two are observations, both in buckets (C06)."""
    for value in (1, math.nan, math.inf, -math.inf, -3, 5):
        rec.stall(value)
    stall = cap.value("moe.expert.stall.duration", phase="decode")
    assert (2, 6) == (stall.count, stall.sum)


@pytest.mark.parametrize(("hook", "at", "name"), [case for case in NUMERIC if case[0] != "request"])
def test_narrow_numpy_scalars_add_up(cap, hook, at, name):
    """uint8, int32 and float16 neither wrap nor saturate; what is no number is dropped (C07)."""
    for value, times in ((np.uint8(200), 3), (np.float16(1), 5000)):
        for _ in range(times):
            call_with(hook, at, value)
    assert 5600 == total(cap, name)
    for value in (Decimal(1), "3", None, np.array([1, 2]), True, 10**400):
        call_with(hook, at, value)
    assert 5600 == total(cap, name)
    assert {"not_a_number": 5, "out_of_range": 1} == lost(cap)


def test_int32_does_not_wrap(cap):
    """Two billion twice is four billion (C07)."""
    for _ in range(2):
        rec.tokens(np.int32(2_000_000_000))
    assert 4_000_000_000 == cap.total("moe.tokens")


def test_true_is_not_one_token(cap):
    """True equals 1 and finds what was remembered for it; it is refused all the same."""
    rec.forward(1)
    rec.forward(100)
    rec.forward(True)
    rec.block_call()
    assert {"not_a_number": 1, "unknown_pass": 1} == lost(cap)
    assert 0 == cap.total("moe.block.calls")


@pytest.mark.parametrize("tokens", [0, -1, 1.5, "1", None, 10**400, [1]], ids=repr)
def test_a_pass_of_no_sensible_length_changes_nothing(cap, tokens):
    """What follows a refused `forward` belongs to no known phase: it counts for none, and is dropped until the next."""
    rec.forward(100)
    rec.forward(tokens)
    rec.block_call()
    rec.routed("7", {1, 2}, {1})
    rec.forward_done(0.5)
    rec.tokens(5)
    assert 0 == cap.total("moe.block.calls") + cap.total("moe.layer.calls") + cap.total("moe.tokens")
    assert 4 == lost(cap).pop("unknown_pass")
    assert 5 == sum(lost(cap).values())
    assert 7 not in cap.store.layers
    rec.tokens(5, phase="decode")
    rec.forward(1)
    rec.block_call()
    assert 6 == cap.total("moe.block.calls") + cap.total("moe.tokens")
    assert 5 == sum(lost(cap).values())


# -- labels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "args"),
    [
        ("prefetch", ("guess", 0.1)),
        ("promote", ("guess", 0.1)),
        ("block", ("guess", 0.1)),
        ("read", ("guess", 1, 0.1)),
        ("read", ("demand", 1, 0.1, "warmup")),
        ("prefetch_dropped", ("guess", 1, 1)),
        ("degraded", ("guess", 1)),
        ("union", (0, 5, "guess")),
        ("tokens", (1, "warmup")),
        ("forward", (1, "warmup")),
        ("routed", ("three", {1})),
        ("evicted", ("three", 1)),
        ("pool", ("three", 4, 4)),
        ("recall", ("three", {1}, {1})),
    ],
)
def test_a_label_outside_its_set_counts_nothing_else(cap, hook, args):
    """No series is made for a label nobody knows."""
    before = set(cap.series())
    getattr(rec, hook)(*args)
    assert {"unknown_label": 1} == lost(cap)
    assert {} == counted(cap)
    assert before == set(cap.series())
    assert 0 == sum(cap.store.hook_errors.values())


@pytest.mark.parametrize("value", [None, 3, [], {}, np.array([1, 2]), mx.array([1, 2]), b"fetch"], ids=repr)
@pytest.mark.parametrize("hook", ["prefetch", "promote", "block", "read", "prefetch_dropped", "degraded"])
def test_what_is_no_label_is_an_unknown_one(cap, hook, value):
    """Unhashable or not, it is no member of the closed set."""
    call_with(hook, 0, value)
    assert {"unknown_label": 1} == lost(cap)
    assert {} == counted(cap)


@pytest.mark.parametrize("value", [3, [], np.array(["all_hit"]), mx.array([1, 2]), b"all_hit"], ids=repr)
def test_residency_and_phase_are_strings(cap, value):
    """Comparing an array with a string may raise, or evaluate it."""
    rec.union(0, 5, value)
    rec.tokens(5, value)
    rec.forward(5, value)
    assert {"unknown_label": 3} == lost(cap)
    assert {} == counted(cap)


# -- a record counts whole or not at all ---------------------------------------------------------------------------

BAD = [object(), math.nan, Decimal(1), -(10**400), b"\x01", "nobody", np.array([1.5, 2.5]), ValueError]


@pytest.mark.parametrize(("hook", "at"), POSITIONS)
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: type(bad).__name__)
def test_one_bad_argument_leaves_all_counters_untouched(cap, hook, at, bad):
    """Nothing of the record is counted, in no position of no hook."""
    if hook in ("routed", "routed_array", "union", "recall", "evicted", "pool") and at == 0 and isinstance(bad, int):
        bad = 10**400  # a negative layer is an unknown one
    call_with(hook, at, bad)
    assert {} == counted(cap)
    assert 1 == sum(lost(cap).values())


@pytest.mark.parametrize(
    ("hook", "at"), [(hook, at) for hook, at in POSITIONS if hook in ("union", "routed", "routed_array", "recall")]
)
def test_a_refused_record_makes_no_layer_known(cap, hook, at):
    """A layer of which nothing was taken has no series."""
    call_with(hook, at, object())
    rec.union(7, -1)
    assert {} == cap.store.layers


# -- iterables -----------------------------------------------------------------------------------------------------


def raising(error):
    """An iterable that fails half way."""
    yield 1
    raise error


IDS = [("routed", 1), ("routed", 2), ("routed", 3), ("routed", 4), ("recall", 1), ("recall", 2)]


class Unprintable(Exception):
    """An exception that cannot be shown."""

    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(("hook", "at"), IDS)
@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), TypeError("x"), Unprintable(), MemoryError()], ids=repr
)
def test_an_error_of_the_callers_iterable_is_counted(cap, hook, at, error):
    """It does not reach the caller, and is an error, whatever its type."""
    call_with(hook, at, raising(error))
    assert {"error": 1} == lost(cap)
    assert {hook: 1} == {name: count for name, count in cap.store.hook_errors.items() if count}
    assert 1 == cap.value("moe.telemetry.hook.errors", hook=hook)
    assert 1 == cap.value("moe.telemetry.dropped", reason="error")
    assert {} == counted(cap)


@pytest.mark.parametrize(("hook", "at"), IDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_program_passes(cap, hook, at, error):
    """Ctrl-C is not telemetry's to swallow."""
    with pytest.raises(error):
        call_with(hook, at, raising(error()))
    assert {} == counted(cap) == lost(cap)


@pytest.mark.parametrize(("hook", "at"), IDS)
def test_an_endless_iterable_ends(cap, hook, at):
    """It is refused after 65,536 items."""
    call_with(hook, at, itertools.count())
    assert {"too_many": 1} == lost(cap)
    assert {} == counted(cap)


# -- lazy arrays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hook", "at"), [position for position in POSITIONS if position != ("routed_array", 1)])
def test_lazy_arrays_are_dropped_in_every_position(cap, hook, at, no_evaluation):
    """A lazy array is never evaluated or kept, and a scrape from another thread works (C13, C14): but for the indices
    of `routed_array`, which are to be lazy."""
    for lazy in (mx.array(3), mx.array(1) + mx.array(2), mx.array([1, 2]), [mx.array(1)]):
        call_with(hook, at, lazy)
    found = []
    reader = threading.Thread(target=lambda: found.append(counted(cap)))
    reader.start()
    reader.join()
    assert [{}] == found
    assert 4 == sum(lost(cap).values())
    assert [] == lazies.held(cap.store)


def test_lazy_arrays_of_a_thread_that_has_ended(cap, no_evaluation):
    """Streams belong to threads: what an ended one handed in must not be needed any more (C13)."""

    def work():
        for hook, at in POSITIONS:
            call_with(hook, at, mx.array(1) + 2)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert {} == counted(cap)
    assert len(POSITIONS) == sum(lost(cap).values())
    assert [] == lazies.held(cap.store)


def test_an_array_stays_unevaluated():
    """Nothing computes its values: MLX holds no more memory behind the hooks than before (C14)."""
    lazy = lazies.unevaluated()
    before = lazies.memory()
    with capture() as cap:
        for hook, at in POSITIONS:
            call_with(hook, at, lazy)
            call_with(hook, at, (lazy,))
        cap.series()
    assert before == lazies.memory()
    mx.eval(lazy)
    assert before + lazy.nbytes - 1024 < lazies.memory()


def test_a_decode_run_evaluates_nothing(cap, no_evaluation):
    """256 steps of 48 layers read no array, with every hook on but `routed_array`, which reads older ones (C14)."""
    for _ in range(256):
        for layer in range(48):
            rec.routed(layer, mx.array([1, 2]), {1}, {2}, {2})
            rec.union(layer, 3)
        for name in every_hook.CALLS.keys() - {"routed_array"}:
            every_hook.call(rec, name)
    assert {"lazy_array": 256 * 48} == lost(cap)


# -- the log -------------------------------------------------------------------------------------------------------


def test_one_log_line_a_minute(cap, caplog, monkeypatch):
    """A hook that drops every record must not fill the log."""
    now = [1000.0]
    monkeypatch.setattr(losses.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.WARNING, "moe_telemetry"):
        for second in range(121):
            now[0] = 1000.0 + second
            for _ in range(10):
                rec.tokens(-1)
    assert [1, 601, 1201] == [int(record.getMessage().split("; ")[1].split()[0]) for record in caplog.records]
    assert "tokens() dropped a record: negative (int); 1 dropped so far" == caplog.records[0].getMessage()
    assert {"negative": 1210} == lost(cap)


@pytest.mark.parametrize(
    ("told", "work"),
    [
        ("routed() dropped a record: error (ValueError: bad id)", lambda: rec.routed(0, raising(ValueError("bad id")))),
        ("routed() dropped a record: lazy_array (array)", lambda: rec.routed(0, mx.array([1]))),
        ("block() dropped a record: unknown_label (KeyError: fetsh)", lambda: rec.block("fetsh", 0.1)),
        ("block() dropped a record: unknown_label (KeyError: array)", lambda: rec.block(mx.array(1) + 1, 0.1)),
    ],
)
def test_the_log_line_says_what_was_dropped(cap, caplog, no_evaluation, told, work):
    """It names hook, reason and type; an array is named, not shown, which would evaluate it."""
    with caplog.at_level(logging.WARNING, "moe_telemetry"):
        work()
    assert f"{told}; 1 dropped so far" == caplog.records[0].getMessage()


def test_a_broken_log_does_not_reach_the_caller(cap, monkeypatch):
    """Neither does it lose the count."""

    def fail(*_):
        raise RuntimeError("reentrant call")

    monkeypatch.setattr(losses.logger, "warning", fail)
    rec.tokens(-1)
    assert {"negative": 1} == lost(cap)


# -- hooks inside of hooks -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_signal_handlers_and_finalizers_may_call_hooks(cap):
    """A handler and a finalizer interrupt hooks and readings thousands of times: no hang, exact totals (C15)."""
    handled = finalized = 0

    def record():
        rec.routed(5, {1, 2}, {1}, {2}, {2})
        rec.union(5, 3)
        rec.read("demand", 1, 0.5)
        rec.tokens(1)
        rec.tokens(-1)

    class Dying:
        def __del__(self):
            nonlocal finalized
            finalized += 1
            record()

    def handle(*_):
        nonlocal handled
        handled += 1
        record()

    previous = signal.signal(signal.SIGALRM, handle)
    direct = readings = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
        while handled < 3000:
            for _ in range(20):
                record()
                direct += 1
                circle = [Dying()]
                circle.append(circle)
                del circle
            rec.routed(5, (Dying() and 1 for _ in range(3)), {1})
            cap.series()
            readings += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    gc.collect()
    times = direct + handled + finalized
    assert finalized == 23 * readings
    assert times == cap.total("moe.tokens") == lost(cap)["negative"]
    assert 5 * times + readings == cap.total("moe.layer.experts", layer="5")
    assert 2 * times + readings == cap.total("moe.expert.lookups")
    assert times == cap.total("moe.expert.lookups", outcome="miss_evicted")
    assert times == cap.value("moe.expert.read.duration", phase="decode", source="demand").count
    assert {"negative"} == set(lost(cap))
