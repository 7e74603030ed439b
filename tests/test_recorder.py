"""The hooks while telemetry runs: routing against a naive reference, phases, and the rules of each hook."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import every_hook
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_telemetry import Phase, catalog, live
from moe_telemetry import recorder as rec
from moe_telemetry.hooks import HOOKS
from moe_telemetry.live import LiveRecorder, ThreadedRecorder
from moe_telemetry.series import Distribution
from moe_telemetry.testing import capture


@pytest.fixture
def cap():
    """A started telemetry."""
    with capture() as found:
        yield found


def counters(cap):
    """All counters that are not 0, telemetry's own apart."""
    names = {metric.name for metric in catalog.counters() if not metric.name.startswith("moe.telemetry.")}
    return {key: value for key, value in cap.series().items() if key[0] in names and value}


def lost(cap):
    """Records dropped, by reason."""
    return {reason: count for reason, count in cap.store.lost.items() if count}


def in_thread(work):
    """Run `work` in a thread of its own, and wait for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# -- routed, recall and union against one expert at a time ---------------------------------------------------------


@dataclass
class Reference:
    """What routing adds, decided expert by expert as the definitions read."""

    outcomes: Counter = field(default_factory=Counter)
    residency: Counter = field(default_factory=Counter)
    recall: Counter = field(default_factory=Counter)
    prefetch_hits: int = 0
    overflows: int = 0
    unions: Counter = field(default_factory=Counter)

    def call(self, experts, residency, capacity):
        self.unions[len(experts)] += 1
        self.residency[residency] += 1
        if capacity is not None and len(experts) > capacity:
            self.overflows += 1

    def routed(self, experts, resident, predicted, ready, capacity):
        missing = 0
        for expert in experts if resident is not None else ():
            named = predicted is not None and expert in predicted
            arrived = named and ready is not None and expert in ready
            if expert in resident:
                self.outcomes["hit"] += 1
                self.prefetch_hits += arrived
                continue
            missing += 1
            self.outcomes["miss_evicted" if arrived else "miss_timing" if named else "miss_unpredicted"] += 1
        if predicted is not None:
            self.predicted(experts, predicted)
        self.call(experts, "unknown" if resident is None else "partial" if missing else "all_hit", capacity)

    def predicted(self, experts, predicted):
        for expert in experts:
            self.recall["recalled" if expert in predicted else "missed"] += 1
        for expert in predicted:
            self.recall["used" if expert in experts else "wasted"] += 1


FORMS = [
    set,
    frozenset,
    list,
    tuple,
    lambda ids: [*ids, *ids],
    lambda ids: iter(list(ids)),
    lambda ids: (expert for expert in [*ids, *ids]),
    lambda ids: dict.fromkeys(ids, 0),
    lambda ids: dict.fromkeys(ids, 0).keys(),
    lambda ids: np.array(list(ids), dtype=np.int32),
    lambda ids: np.array([[*ids], [*ids]], dtype=np.uint16),
    lambda ids: [np.int64(expert) for expert in ids],
]
EXPERTS = st.sets(st.integers(0, 11), max_size=8)
FORM = st.sampled_from(FORMS)
ROUTED = st.tuples(
    st.just("routed"),
    *(EXPERTS, st.none() | EXPERTS, st.none() | EXPERTS, st.none() | EXPERTS),
    *(FORM, FORM, FORM, FORM),
)
UNION = st.tuples(st.just("union"), st.integers(0, 12), st.sampled_from([None, *catalog.RESIDENCIES]))
RECALL = st.tuples(st.just("recall"), EXPERTS, EXPERTS, FORM, FORM)
POOL = st.tuples(st.just("pool"), st.integers(0, 10))


@settings(max_examples=300, deadline=None)
@given(st.lists(ROUTED | UNION | RECALL | POOL, max_size=12), st.booleans())
def test_routing_counts_what_a_loop_over_the_experts_would(steps, locked):
    """Whatever the sets and their types, every counter equals the naive reference, in one partition of outcomes."""
    reference, capacity, lookups = Reference(), None, 0
    with capture(locked=locked) as cap:
        for kind, *given_ in steps:
            if kind == "pool":
                capacity = given_[0]
                rec.pool(3, capacity)
            elif kind == "union":
                size, residency = given_
                rec.union(3, size, residency)
                reference.call(range(size), residency or "unknown", capacity)
            elif kind == "recall":
                predicted, experts, *forms = given_
                rec.recall(3, *(form(ids) for form, ids in zip(forms, (predicted, experts), strict=True)))
                reference.predicted(experts, predicted)
            else:
                sets, forms = given_[:4], given_[4:]
                rec.routed(3, *(ids if ids is None else form(ids) for form, ids in zip(forms, sets, strict=True)))
                reference.routed(*sets, capacity)
                lookups += len(sets[0]) if sets[1] is not None else 0
        assert {} == lost(cap)
        found = {outcome: cap.total("moe.expert.lookups", layer="3", outcome=outcome) for outcome in catalog.OUTCOMES}
        assert {outcome: reference.outcomes[outcome] for outcome in catalog.OUTCOMES} == found
        assert lookups == sum(found.values())
        for residency in catalog.RESIDENCIES:
            assert reference.residency[residency] == cap.total("moe.layer.calls", residency=residency)
        for outcome in ("recalled", "missed"):
            assert reference.recall[outcome] == cap.total("moe.predictor.experts", outcome=outcome)
        for outcome in ("used", "wasted"):
            assert reference.recall[outcome] == cap.total("moe.predictor.candidates", outcome=outcome)
        assert reference.prefetch_hits == cap.total("moe.prefetch.hits")
        assert reference.overflows == cap.total("moe.layer.overflows")
        assert sum(size * times for size, times in reference.unions.items()) == cap.total("moe.layer.experts")
        assert max(reference.unions, default=0) == cap.total("moe.layer.union.max")
        union = cap.value("moe.expert.union", phase="decode", seq="1")
        assert reference.unions.total() == union.count
        assert cap.total("moe.layer.experts") == union.sum


def test_one_expert_of_each_outcome(cap):
    """The four outcomes, told apart by the order resident, predicted, ready."""
    rec.routed(0, {1, 2, 3, 4}, resident={1}, predicted={2, 3}, ready={3})
    assert [1, 1, 1, 1] == [cap.total("moe.expert.lookups", outcome=outcome) for outcome in catalog.OUTCOMES]


def test_ready_outside_predicted_is_ignored(cap):
    """An expert that is ready without having been predicted is unpredicted."""
    rec.routed(0, {1}, resident=set(), predicted={2}, ready={1, 2})
    assert 1 == cap.total("moe.expert.lookups", outcome="miss_unpredicted")
    assert 0 == cap.total("moe.expert.lookups", outcome="miss_evicted")


def test_an_empty_prediction_is_a_prediction(cap):
    """predicted=set() counts recall 0; predicted=None counts no recall."""
    rec.routed(0, {1, 2}, predicted=set())
    rec.routed(0, {1, 2, 3}, predicted=None)
    assert 2 == cap.total("moe.predictor.experts", outcome="missed") == cap.total("moe.predictor.experts")


def test_capacity_holds_from_its_declaration_on(cap):
    """A pool that grows or shrinks is compared with the unions behind the change, in every pass."""
    rec.union(1, 5)
    rec.forward(3)
    rec.union(1, 5)
    rec.pool(1, capacity=4)
    rec.union(1, 4)
    rec.union(1, 5)
    rec.routed(1, range(5))
    rec.pool(1, resident=2)
    rec.union(1, 5)
    rec.pool(1, capacity=5)
    rec.union(1, 5)
    rec.forward(1)
    rec.union(1, 6)
    rec.forward(7)
    rec.union(1, 6)
    rec.union(2, 600)
    assert 5 == cap.total("moe.layer.overflows")
    assert 5 == cap.value("moe.pool.capacity", layer="1")
    assert 2 == cap.value("moe.pool.resident", layer="1")


def test_ratios_of_decode_and_prefill_stay_apart(cap):
    """30.0 % hits in prefill and 94.0 % in decode are read back as such (C19)."""
    for phase, routed, hits in (("prefill", 6144, 1843), ("decode", 98304, 92406)):
        rec.forward(512, phase)
        for first in range(0, routed, 64):
            experts = set(range(first, min(first + 64, routed)))
            rec.routed(0, experts, {expert for expert in experts if expert < hits})

    def ratio(phase):
        hits = cap.total("moe.expert.lookups", phase=phase, outcome="hit")
        return f"{hits / cap.total('moe.expert.lookups', phase=phase):.1%}"

    assert ["30.0%", "94.0%"] == [ratio(phase) for phase in catalog.PHASES]
    assert 6144 == cap.total("moe.expert.lookups", phase="prefill")
    assert 98304 == cap.total("moe.expert.lookups", phase="decode")


@pytest.mark.parametrize("first", [3, "3", np.int64(3), 3.0], ids=repr)
def test_a_layer_is_one_series_whatever_its_type(cap, first):
    """3, '3', np.int64(3) and 3.0 are the same layer, in any order (C26)."""
    for layer in (first, 3, "3", np.int64(3), 3.0):
        rec.routed(layer, {1}, resident={1})
        rec.evicted(layer)
        rec.pool(layer, 8)
    hit = {labels: value for (name, labels), value in cap.series().items() if name == "moe.expert.lookups" and value}
    assert {(("layer", "3"), ("outcome", "hit"), ("phase", "decode")): 5} == hit
    assert 5 == cap.total("moe.expert.evictions", layer="3")
    assert {3} == set(cap.store.layers)


def test_an_unknown_layer_is_none(cap):
    """None and negative numbers share the label value `none`."""
    for layer in (None, -1, "-1", -7, np.int8(-3)):
        rec.union(layer, 2)
    assert 5 == cap.value("moe.layer.calls", phase="decode", layer="none", residency="unknown")


# -- phases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "seq", "args"),
    [
        ("decode", "1", (1,)),
        ("decode", "8", (8,)),
        ("prefill", "9", (9,)),
        ("prefill", "32", (17,)),
        ("prefill", "4096+", (100_000,)),
        ("decode", "3", (3, "decode")),
        ("prefill", "3", (3, "prefill")),
        ("prefill", "3", (3, Phase.PREFILL)),
        ("decode", "64", (64, Phase.DECODE)),
        ("decode", "2", (np.int64(2),)),
        ("prefill", "16", (16.0,)),
    ],
)
def test_the_phase_of_a_pass(cap, phase, seq, args):
    """Named, or by the number of tokens: verifying three tokens is decode (D3)."""
    for _ in range(2):  # the second one takes the remembered row
        rec.forward(*args)
        rec.union(0, 4)
        rec.forward_done(0.1)
    assert 2 == cap.value("moe.layer.calls", phase=phase, layer="0", residency="unknown")
    assert 2 == cap.value("moe.forward.duration", phase=phase, seq=seq).count
    assert 8 == cap.value("moe.expert.union", phase=phase, seq=seq).sum


def test_the_longest_decode_is_configurable():
    """decode_seq_max moves the border between decode and prefill."""
    with capture(decode_seq_max=2) as cap:
        for tokens in (1, 2, 3):
            rec.forward(tokens)
            rec.block_call()
    assert 2 == cap.value("moe.block.calls", phase="decode")
    assert 1 == cap.value("moe.block.calls", phase="prefill")


def test_every_hook_follows_the_pass(cap):
    """What is not named otherwise belongs to the latest pass."""
    rec.forward(100)
    for name in HOOKS[1:]:
        every_hook.call(rec, name)
    named = {labels for name, labels in counters(cap)}
    assert [] == [labels for labels in named if ("phase", "decode") in labels]
    assert 21 == len(counters(cap))  # the fed tokens and the counted ones are one series here


def test_before_any_pass_events_are_decode(cap):
    """Events before the first `forward` belong to decode with one token."""
    every_hook.call(rec, "union")
    assert 1 == cap.value("moe.expert.union", phase="decode", seq="1").count


def test_a_named_phase_wins(cap):
    """`tokens` and `read` take the phase for which the work was done."""
    rec.forward(1)
    rec.tokens(7, "prefill")
    rec.tokens(2, Phase.DECODE)
    rec.read("prefetch", 10, 0.1, phase="prefill")
    assert [7, 2] == [cap.value("moe.tokens", phase=phase) for phase in catalog.PHASES]
    assert 10 == cap.value("moe.expert.read", phase="prefill", source="prefetch")
    assert 1 == cap.value("moe.expert.read.duration", phase="prefill", source="prefetch").count


def test_a_reader_thread_gets_the_latest_pass(cap):
    """A thread that never began a pass reports for the one in progress, before and after threads are told apart."""
    rec.forward(100)
    in_thread(lambda: rec.read("demand", 1, 0.1))
    rec.forward(1)
    in_thread(lambda: rec.read("demand", 10, 0.1))
    in_thread(lambda: rec.forward(200))
    in_thread(lambda: rec.read("demand", 100, 0.1))
    assert [101, 10] == [cap.value("moe.expert.read", phase=phase, source="demand") for phase in catalog.PHASES]


def test_each_thread_has_its_own_pass(cap):
    """Two threads in passes of different phases do not get into each other's figures."""
    turns = [threading.Event() for _ in range(2)]
    seen = []

    def other():
        rec.forward(100)
        rec.union(0, 5)
        turns[0].set()
        turns[1].wait(5)
        rec.union(0, 5)
        rec.forward_done(0.5)
        seen.append(type(rec))

    rec.forward(1)
    assert LiveRecorder is type(rec)
    thread = threading.Thread(target=other)
    thread.start()
    turns[0].wait(5)
    assert ThreadedRecorder is type(rec)
    rec.union(0, 2)
    rec.forward_done(0.1)
    rec.forward(3)
    rec.union(0, 2)
    turns[1].set()
    thread.join()
    assert [ThreadedRecorder] == seen
    assert 10 == cap.value("moe.layer.experts", phase="prefill", layer="0")
    assert 4 == cap.value("moe.layer.experts", phase="decode", layer="0")
    assert 1 == cap.value("moe.forward.duration", phase="prefill", seq="128").count
    assert 1 == cap.value("moe.forward.duration", phase="decode", seq="1").count


def test_a_thread_is_not_the_heir_of_one_that_ended(cap):
    """Thread identifiers are used again; what an ended thread did last is nobody's pass."""
    rec.forward(1)
    for _ in range(5):
        in_thread(lambda: rec.forward(100))
        rec.forward(1)
        in_thread(lambda: rec.read("demand", 1, 0.1))
    assert 5 == cap.value("moe.expert.read", phase="decode", source="demand")
    assert 0 == cap.value("moe.expert.read", phase="prefill", source="demand")


def test_nothing_is_kept_of_ended_threads(cap):
    """A server that uses a thread a request does not grow, and an abandoned pass does not age for ever."""
    rec.forward(1)
    rec.forward_done(0.1)
    for _ in range(200):
        in_thread(lambda: rec.forward(100))
    assert {threading.get_ident()} == set(cap.store.by_thread)
    assert {} == cap.store.active
    assert 0 == cap.value("moe.forward.active", phase="prefill")


def test_one_thread_after_another_stays_on_the_fast_path(cap):
    """Only threads that make passes at the same time need rows of their own."""
    for tokens in (1, 100, 2):
        in_thread(lambda tokens=tokens: (rec.forward(tokens), rec.block_call()))
    assert LiveRecorder is type(rec)
    assert [1, 2] == [cap.value("moe.block.calls", phase=phase) for phase in catalog.PHASES]


def test_the_age_of_a_pass_in_progress(cap):
    """moe.forward.active appears with the first finished pass, rises during one, and is 0 when none runs."""
    rec.forward(1)
    assert ("moe.forward.active", every_hook.DECODE) not in cap.series()
    rec.forward_done(0.1)
    assert 0 == cap.value("moe.forward.active", phase="decode")
    rec.forward(1)
    first = cap.value("moe.forward.active", phase="decode")
    assert 0 < first < cap.value("moe.forward.active", phase="decode") < 60
    assert 0 == cap.value("moe.forward.active", phase="prefill")
    rec.forward_done(float("nan"))
    assert 0 == cap.value("moe.forward.active", phase="decode")


def test_the_age_is_that_of_the_oldest_pass(cap):
    """Of two passes in progress the one that hangs is told of."""
    rec.forward_done(0.1)
    rec.forward(1)
    cap.store.active[-1] = ("decode", time.perf_counter() - 100)
    assert 100 < cap.value("moe.forward.active", phase="decode") < 160
    assert 0 == cap.value("moe.forward.active", phase="prefill")


def test_exact_lengths_are_bounded(cap):
    """Ten thousand sequence lengths make no more rows than the labels and the exact ones; none is lost."""
    for tokens in range(1, 10_001):
        rec.forward(tokens, "prefill")
        rec.union(0, 3)
    assert len(cap.store.rows) <= 1 + 16 + 32 + len(catalog.SEQ_VALUES)
    assert len(cap.store.forwards) <= 16 + 32
    assert 30_000 == cap.value("moe.layer.experts", phase="prefill", layer="0")
    labels = [labels for (name, labels) in cap.series() if name == "moe.expert.union"]
    assert len(catalog.SEQ_VALUES) + 1 == len(labels)


# -- rules of single hooks -----------------------------------------------------------------------------------------


def test_every_hook_adds_what_it_says(cap):
    """One call of each: these counters and observations, and nothing else."""
    every_hook.call_all(rec)
    assert every_hook.COUNTED == counters(cap)
    found = {key: value.count for key, value in cap.series().items() if isinstance(value, Distribution) and value.count}
    assert every_hook.OBSERVED == found
    assert {} == lost(cap)


def test_hooks_are_called_by_keyword(cap):
    """The names of the arguments are part of the API."""
    rec.forward(tokens=1, phase="decode")
    rec.forward_done(seconds=0.01)
    rec.tokens(n=3, phase=None)
    rec.speculation(proposed=4, accepted=3)
    rec.request(time_to_first_token=0.5, duration=2.0, output_tokens=11, idle=True)
    rec.routed(layer=2, experts={1, 2, 3, 4}, resident={1, 2}, predicted={2, 3, 9}, ready={2, 3})
    sets = {"resident": {1, 2}, "predicted": {2, 3, 9}, "ready": {2, 3}}
    rec.routed_array(layer=2, indices=every_hook.INDICES, num_experts=16, **sets)
    rec.union(layer=2, size=7, residency="bypassed")
    rec.recall(layer=2, predicted={1, 2, 3}, routed={2, 3, 4, 5})
    rec.prefetch(stage="submit", seconds=0.01)
    rec.promote(step="place", seconds=0.01)
    rec.window(seconds=0.01)
    rec.placed(experts=2)
    rec.prefetch_dropped(reason="unused", experts=3, nbytes=100)
    rec.block(segment="fetch", seconds=0.01)
    rec.block_call()
    rec.read(source="demand", nbytes=1000, seconds=0.01, phase=None)
    rec.stall(seconds=0.01)
    rec.evicted(layer=2, experts=5)
    rec.degraded(mode="cpu", experts=2)
    rec.pool(layer=2, capacity=8, resident=6)
    rec.cumulative(metric="moe.tokens", value=1000, phase="prefill")
    assert every_hook.COUNTED == counters(cap)


def test_the_material_covers_every_hook():
    """A new hook must be added to what the tests call."""
    assert set(HOOKS) == set(every_hook.CALLS)


def test_hooks_return_nothing(cap):
    """A hook's result is never a record or a reason."""
    assert {None} == {getattr(rec, name)(*args, **named) for name, (args, named) in every_hook.CALLS.items()}


def test_durations_fall_into_inclusive_buckets(cap):
    """A bound belongs to its bucket, 0 to the first one, and the largest to the bucket above the top."""
    for seconds in (0.0, 1e-6, 1.0000001e-6, 8.388608, 8.4, 1e9):
        rec.window(seconds)
    counts = cap.value("moe.prefetch.window", phase="decode").counts
    assert (2, 1, 0) == counts[:3]
    assert (1, 2) == counts[-2:]
    assert 25 == len(counts)


DURATIONS = [name for name, (args, _) in every_hook.CALLS.items() if any(arg is every_hook.SECONDS for arg in args)]


@pytest.mark.parametrize("hook", DURATIONS)
def test_durations_of_different_scale_are_told_apart(cap, hook):
    """2, 20 and 200 ms are three buckets of every duration (C18)."""
    for seconds in (0.002, 0.02, 0.2):
        args, named = every_hook.CALLS[hook]
        getattr(rec, hook)(*(seconds if arg == 0.01 else arg for arg in args), **named)
    found = [v for (name, _), v in cap.series().items() if isinstance(v, Distribution) and v.count]
    assert [[1, 1, 1]] == [[count for count in value.counts if count] for value in found]
    assert [pytest.approx(0.222)] == [value.sum for value in found]


def test_unions_are_exact_in_the_snapshot_and_on_the_wire(cap):
    """Each size to 64 has a bucket; larger ones share some, and the sum stays exact."""
    for size in (1, 10, 10, 64, 65, 96, 97, 513, 100_000):
        rec.union(0, size)
    union = cap.value("moe.expert.union", phase="decode", seq="1")
    assert {0: 1, 9: 2, 63: 1, 64: 2, 65: 1, 70: 2} == {at: count for at, count in enumerate(union.counts) if count}
    assert 1 + 10 + 10 + 64 + 65 + 96 + 97 + 513 + 100_000 == union.sum
    assert 100_000 == cap.value("moe.expert.union.max", phase="decode", seq="1")


def test_speculation_counts_accepted_and_rejected(cap):
    """More accepted than proposed is a mistake; none proposed is not."""
    rec.speculation(4, 3)
    rec.speculation(3, 3)
    rec.speculation(0, 0)
    rec.speculation(2, 3)
    assert [6, 1] == [cap.value("moe.speculation.tokens", outcome=o) for o in ("accepted", "rejected")]
    assert {"out_of_range": 1} == lost(cap)


def test_a_request_gives_three_durations(cap):
    """The time per output token is that behind the first, and needs two tokens."""
    rec.request(1.0, 11.0, 21)
    rec.request(1.0, 2.0, 1)
    rec.request(2.0, 2.0, 0)
    rec.request(None, 5.0, 10)
    found = cap.series()
    whole = found["gen_ai.server.request.duration", every_hook.GEN_AI]
    assert (4, 20.0) == (whole.count, whole.sum)
    assert 3 == found["gen_ai.server.time_to_first_token", every_hook.GEN_AI].count
    per_token = found["gen_ai.server.time_per_output_token", every_hook.GEN_AI]
    assert (1, 0.5) == (per_token.count, per_token.sum)
    assert {} == lost(cap)


@pytest.mark.parametrize("args", [(3.0, 2.0, 5), (1.0, 2.0, -1), (1.0, None, 5), ("1", 2.0, 5), (1.0, 2.0, 1.5)])
def test_an_impossible_request_counts_nowhere(cap, args):
    """A first token behind the end, or one bad figure: none of the three durations is recorded."""
    rec.request(*args)
    assert [0, 0, 0] == [value.count for (name, _), value in cap.series().items() if name.startswith("gen_ai")]
    assert 1 == sum(lost(cap).values())


def test_timed_records_what_the_block_took(cap):
    """The hook gets its arguments and the seconds behind them, also when the block raises."""
    with rec.timed(rec.block, "fetch"):
        pass
    with pytest.raises(ZeroDivisionError), rec.timed(rec.read, "demand", 10):
        raise ZeroDivisionError
    with rec.timed(rec.forward_done):
        pass
    assert 1 == cap.value("moe.block.duration", phase="decode", segment="fetch").count
    assert 0 < cap.value("moe.block.duration", phase="decode", segment="fetch").sum < 1
    assert 10 == cap.value("moe.expert.read", phase="decode", source="demand")
    assert 1 == cap.value("moe.forward.duration", phase="decode", seq="1").count


def test_timed_with_a_mistake_in_it_raises_nothing(cap):
    """A block that ran while telemetry was off must not fail once it is on."""
    for args in ((rec.block,), ("fetch",), (rec.block, "fetch", 1, 2), (None,)):
        with rec.timed(*args):
            pass
    assert {"error": 2, "unknown_label": 2} == lost(cap)


def test_timed_blocks_nest(cap):
    """Each block has a clock of its own."""
    with rec.timed(rec.window), rec.timed(rec.stall):
        pass
    assert (
        cap.value("moe.prefetch.window", phase="decode").sum
        > cap.value("moe.expert.stall.duration", phase="decode").sum
    )


# -- sets that change under our hands ----------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("argument", ["experts", "resident", "predicted", "ready"])
@pytest.mark.parametrize("change", [set.clear, lambda found: found.update(range(100, 200))], ids=["empties", "fills"])
def test_a_set_that_changes_within_a_hook_counts_once(cap, monkeypatch, argument, change, at):
    """Another thread's change at any call inside the hook makes no count negative and breaks no partition."""
    calls = iter(range(1, 100))
    rec.forward(1)
    given = {
        **{"experts": set(range(10)), "resident": set(range(5))},
        **{"predicted": {*range(3, 8), 20}, "ready": {3, 4, 5, 6, 20}},
    }

    def switched(found):
        if next(calls) == at:
            change(given[argument])
        return len(found)

    monkeypatch.setattr(live, "len", switched, raising=False)
    rec.routed(0, **given)
    rec.recall(0, given["predicted"], given["experts"])
    values = counters(cap)
    assert values
    assert all(value > 0 for value in values.values())
    outcomes = sum(value for (name, _), value in values.items() if name == "moe.expert.lookups")
    assert values.get(("moe.layer.experts", (("layer", "0"), ("phase", "decode"))), 0) == outcomes
    assert cap.total("moe.prefetch.hits") <= cap.total("moe.expert.lookups", outcome="hit")
    if argument != "experts":
        assert outcomes == 10


def test_live_sets_of_a_reader_thread_never_lower_a_counter(cap):
    """A thread that fills and empties `ready` and `predicted` meanwhile makes no counter fall."""
    ready, predicted, done = set(), set(range(16)), threading.Event()

    def change():
        while not done.is_set():
            ready.update(range(16))
            predicted.difference_update(range(8))
            ready.clear()
            predicted.update(range(8))

    thread = threading.Thread(target=change)
    thread.start()
    rec.forward(1)
    before = {}
    for _ in range(300):
        for _ in range(100):
            rec.routed(0, set(range(12)), resident={0, 1, 2}, predicted=predicted, ready=ready)
        now = counters(cap)
        assert [] == [key for key, value in before.items() if now.get(key, 0) < value]
        before = now
    done.set()
    thread.join()
    outcomes = sum(value for (name, _), value in before.items() if name == "moe.expert.lookups")
    assert 300 * 100 * 12 == outcomes


def test_a_prefetch_that_ends_in_another_phase_belongs_to_its_own(cap):
    """A background thread names the phase that it read for."""
    rec.forward(4, "prefill")
    rec.forward(1)
    rec.prefetch_dropped("unused", 1, nbytes=10, phase="prefill")
    rec.placed(2, phase=Phase.PREFILL)
    assert 10 == cap.value("moe.prefetch.wasted", phase="prefill")
    assert 1 == cap.value("moe.prefetch.dropped", phase="prefill", reason="unused")
    assert 2 == cap.value("moe.prefetch.placed", phase="prefill")
    assert 0 == cap.value("moe.prefetch.wasted", phase="decode")


# -- passes that are refused, and keys that are not what they seem ------------------------------------------------


@pytest.mark.parametrize(("tokens", "phase"), [(512, "Prefill"), ("512", "prefill"), (0, "prefill"), (None, None)])
def test_events_of_a_refused_pass_count_for_no_phase(cap, tokens, phase):
    """After a forward() that is dropped nothing counts for the pass before it, until the next good one."""
    rec.forward(1)
    rec.routed(0, {1}, resident={1})
    before = counters(cap)
    rec.forward(tokens, phase)
    rec.routed(0, set(range(60)), resident=set())
    rec.prefetch("predict", 0.1)
    rec.tokens(512)
    rec.forward_done(3.0)
    assert before == counters(cap)
    assert 0 == cap.value("moe.forward.duration", phase="decode", seq="1").count
    rec.forward(1)
    rec.routed(0, {1}, resident={1})
    assert 2 == cap.value("moe.expert.lookups", phase="decode", layer="0", outcome="hit")


def test_a_refused_pass_of_one_thread_does_not_touch_another(cap):
    """Each thread's events belong to its own pass, refused or not."""
    rec.forward(1)
    in_thread(lambda: rec.forward(7, "no such phase"))
    rec.routed(0, {1}, resident={1})
    assert 1 == cap.value("moe.expert.lookups", phase="decode", layer="0", outcome="hit")


class Liar(str):
    """A string that hashes as itself and equals a given number of times."""

    def __new__(cls, text, times):
        made = super().__new__(cls, text)
        made.times = times
        return made

    def __hash__(self):
        return super().__hash__()

    def __eq__(self, other):
        self.times -= 1
        return self.times >= 0 and str.__eq__(self, other)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_no_label_is_made_of_what_a_caller_hands_in(cap, times):
    """Keys that equal a label now and then add no series."""
    labels = set(cap.series())
    rec.prefetch_dropped(Liar("budget", times), 1)
    rec.degraded(Liar("cpu", times), 1)
    rec.read(Liar("demand", times), 1, 0.1)
    rec.cumulative("moe.tokens", 5, phase=Liar("decode", times))
    assert labels == set(cap.series())


def test_subclasses_of_str_are_not_kept(cap):
    """A phase that equals itself alone is looked up again each time, and forgotten."""
    for _ in range(50):
        rec.forward(2, Liar("decode", 100))
    assert 1 >= len([key for key in cap.store.forwards if key[1] == 2])
    assert all(type(key[0]) in (str, Phase, type(None)) for key in cap.store.forwards)
