"""Routing that stays on the device: exact to the integer, late by two batches, and never the model's work (D8)."""

from __future__ import annotations

import random
import threading
import time

import lazies
import mlx.core as mx
import pytest
from routed import BEHIND, EXPERTS, calls, cap, lost, passes, routing_of, tokens, way

from moe_telemetry import counting, live, pending, reduction, routing, tallies
from moe_telemetry import recorder as rec
from moe_telemetry.loads import LOAD_CALLS, LOAD_WINDOW, ExpertLoad
from moe_telemetry.reuse import curve_of
from moe_telemetry.testing import capture

__all__ = ["cap", "no_evaluation", "way"]
no_evaluation = pytest.fixture(lazies.no_evaluation)


# -- exactness ------------------------------------------------------------------------------------------------


def made_calls(seed):
    """Passes of layer calls with everything that may come with one: (phase, tokens, calls of the pass)."""
    draw = random.Random(seed)

    def ids():
        return draw.choice([None, set(draw.sample(range(EXPERTS), draw.randint(0, EXPERTS)))])

    found = []
    for _ in range(50):
        tokens = draw.choice([1, 1, 1, 4, 40])
        layers = [
            ([draw.sample(range(EXPERTS), 2) for _ in range(tokens)], ids(), ids(), ids(), draw.random() < 0.5)
            for _ in range(3)
        ]
        found.append((draw.choice([None, "decode"]), tokens, layers))
    return found


def as_mask(ids):
    return None if ids is None else mx.array([expert in ids for expert in range(EXPERTS)])


def hand_in(given, on_device):
    """The calls as `routed` or as `routed_array` takes them, evaluated behind each pass."""
    for phase, length, layers in given:
        rec.forward(length, phase)
        arrays = []
        for layer, (routed, resident, predicted, ready, masks) in enumerate(layers):
            if not on_device:
                rec.routed(layer, {expert for row in routed for expert in row}, resident, predicted, ready)
                continue
            arrays.append(routing_of(routed))
            known = (resident, predicted, ready)
            rec.routed_array(layer, arrays[-1], EXPERTS, *(map(as_mask, known) if masks else known))
        mx.eval(arrays)


def recorded(cap):
    """All series but telemetry's own, the clock, what only token counts give, and what needs ids on the host."""
    own = ("moe.telemetry.", "moe.run.", "moe.forward.active", "moe.expert.load.peak", "moe.pool.simulated.")
    return {key: value for key, value in cap.series().items() if not key[0].startswith(own)}


@pytest.mark.parametrize("seed", range(4))
def test_it_counts_what_routed_counts(way, seed):
    """Unions, lookups by outcome, all-hit calls, recall and candidates equal the synchronous form's to the integer."""
    given = made_calls(seed)
    with capture() as cap:
        for layer in range(3):
            rec.pool(layer, 5)
        hand_in(given, on_device=False)
        expected = recorded(cap)
    with capture() as cap:
        for layer in range(3):
            rec.pool(layer, 5)
        hand_in(given, on_device=True)
        assert expected == recorded(cap)
        assert {} == lost(cap)
    assert 150 == sum(value for (name, _), value in expected.items() if name == "moe.layer.calls")


def test_tokens_by_expert_are_counted(cap):
    """Each routed token counts for its expert; the peak is the busiest expert's share times the number of experts."""
    passes(3, layers=1, ids=[[0, 1], [0, 2], [0, 3]])
    assert {("layer", "0"): 8.0} == {
        labels[0]: value for (name, labels), value in cap.series().items() if name == "moe.expert.load.peak"
    }
    assert [9, 3, 3, 3] + [0] * 12 == cap.store.layers[0].load.tokens


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 3, 2), (6, 2), (4,), (1, 60, 2)])
@pytest.mark.parametrize("kind", ["uint32", "int32", "int64", "uint8", "int16"])
def test_any_shape_and_integer_type(cap, shape, kind):
    """The last axis is top-k, whatever is in front of it."""
    size = 1
    for length in shape:
        size *= length
    ids = [at % 7 for at in range(size)]
    array = mx.array(ids, dtype=getattr(mx, kind)).reshape(shape)
    mx.eval(array)
    rec.routed_array(3, array, EXPERTS)
    assert len(set(ids)) == cap.total("moe.layer.experts", layer="3")
    assert [ids.count(expert) for expert in range(EXPERTS)] == cap.store.layers[3].load.tokens


@pytest.mark.parametrize(
    "kinds",
    [
        [([[1, 2]], EXPERTS), ([[1, 2, 3]], EXPERTS), ([[[60, 61]]], 64)],
        [([[1, 2]], EXPERTS), ([[1, 2, 3]], EXPERTS), ([[1, 2], [5, 5]], EXPERTS)],
        [([[1, 2]], EXPERTS), ([[14, 15]], EXPERTS), ([[60, 61]], 64)],
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_layers_of_different_kind_in_one_pass(cap, kinds, whole):
    """Other numbers of experts, other top-k and other shapes in the layers of a pass are kept apart."""
    arrays, experts = [routing_of(ids) for ids, _ in kinds], [number for _, number in kinds]
    if whole:
        live.routed_pass(rec, (0, 1, 2), tuple(experts), arrays)
    else:
        for layer, array in enumerate(arrays):
            rec.routed_array(layer, array, experts[layer])
    mx.eval(arrays)
    expected = [len(set(array.flatten().tolist())) for array in arrays]
    assert expected == [cap.total("moe.layer.experts", layer=str(layer)) for layer in range(3)]
    assert {} == lost(cap)


def test_other_experts_in_the_same_layers(cap):
    """As when another model is loaded: ids that the first one did not have are known, and its own are no longer."""
    for experts, last in ((8, 7), (16, 15), (8, 15), (8, 7)):
        arrays = [routing_of([[1, last]]) for _ in range(2)]
        live.routed_pass(rec, (0, 1), (experts, experts), arrays)
        mx.eval(arrays)
    assert 2 * 3 == cap.total("moe.layer.calls")
    assert {"out_of_range": 2} == lost(cap)


def test_layers_of_different_type_in_one_pass(cap, monkeypatch):
    """Whatever integers the routers of the layers give."""
    kinds = (mx.uint8, mx.int64, mx.uint32, mx.int16, mx.uint64)
    arrays = [mx.array([[1, 2, 14]]).astype(kind) for kind in kinds]
    mx.eval(arrays)
    original, counted = counting.token_counts, []

    def noted(indices, experts):
        counted.append(len({array.itemsize for array in indices}))
        return original(indices, experts)

    monkeypatch.setattr(counting, "token_counts", noted)
    for number in range(3):
        live.routed_pass(rec, tuple(range(5)), (EXPERTS,) * 5, [arrays[number]] * 5)
        live.routed_pass(rec, tuple(range(5)), (EXPERTS,) * 5, arrays)
        for layer, array in enumerate(arrays):
            rec.routed_array(layer, array, EXPERTS)
    assert 45 * 3 == cap.total("moe.layer.experts")
    assert {layer: [0, 9, 9, *[0] * 11, 9, 0] for layer in range(5)} == tokens(cap)
    assert {1} >= set(counted)  # the kernel reads all arrays of a launch alike


@pytest.mark.parametrize("whole", [False, True])
def test_a_union_is_held_against_the_pool_of_its_time(cap, whole):
    """A pool that grows before the figures are read does not undo what overflowed it, nor the other way round."""
    for capacity in (1, 2, 1, 3, 2):
        rec.pool(0, capacity)
        passes(1, layers=1, whole=whole)
    assert 2 == cap.total("moe.layer.overflows")


@pytest.mark.parametrize("whole", [False, True])
def test_each_layer_is_held_against_its_own_pool(cap, whole):
    """Call by call, and a union that just fits is none too many."""
    for layer, capacity in enumerate((1, 2, 3)):
        rec.pool(layer, capacity)
    passes(5, layers=3, whole=whole)
    assert [5, 0, 0] == [cap.total("moe.layer.overflows", layer=str(layer)) for layer in range(3)]


def test_layers_in_another_order(cap):
    """Each has its own tokens, those that come twice in a row of a call included."""
    arrays = [routing_of([[1, 2], [1, 3]]), routing_of([[4, 5], [4, 6]]), routing_of([[7, 8], [7, 9]])]
    mx.eval(arrays)
    for _ in range(2):
        live.routed_pass(rec, (2, 0, 1), (EXPERTS,) * 3, arrays)
    live.routed_pass(rec, (2, 0, 1), (EXPERTS,) * 3, [array[:1] for array in arrays])
    mx.eval(cap.store.routers[threading.get_ident()]._forward.indices)
    assert 3 * 3 == cap.total("moe.layer.calls")
    assert 3 * (2 * 3 + 2) == cap.total("moe.layer.experts")
    assert [(1, [5, 3, 2]), (4, [5, 3, 2]), (7, [5, 3, 2])] == [
        (first, tokens(cap)[layer][first : first + 3]) for first, layer in ((1, 2), (4, 0), (7, 1))
    ]


@pytest.mark.parametrize("whole", [False, True])
def test_passes_of_another_shape(cap, whole):
    """Of more sequences, say: one kind's ids are not another's."""
    for ids in ([[1, 2], [3, 4], [5, 6]], [[1, 2]]) * 2:
        passes(1, layers=3, ids=ids, whole=whole)
    assert 3 * 2 * (6 + 2) == cap.total("moe.layer.experts")
    assert {layer: [0, 4, 4, 2, 2, 2, 2, *[0] * 9] for layer in range(3)} == tokens(cap)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("hand_over", [lambda _: False, lambda _: True, lambda number: number % 23 < 19])
def test_routing_is_simulated(hand_over):
    """Pool curves are those of the same sets given to `routed`, pass by pass: calls of a pass one by one, whole passes,
    both in turn, of several lengths and in both phases."""
    draw, found = random.Random(0), []
    given = [[draw.choices(range(EXPERTS), k=2) for _ in range(1 if draw.random() < 0.8 else 40)] for _ in range(90)]
    for sets in (True, False):
        with capture(pool_curve="all") as cap:
            for number, ids in enumerate(given):
                rec.forward(len(ids), "decode" if len(ids) == 1 else "prefill")
                if sets:
                    for layer in range(3):
                        rec.routed(layer, {expert for row in ids for expert in row})
                else:
                    passes(1, layers=3, ids=ids, whole=hand_over(number))
            cap.series()
            stacks = cap.store.curves.followed
            found.append({(layer, at): curve_of(feed) for layer, one in stacks() for at, feed in one.feeds.items()})
    assert found[0] == found[1]
    assert found[0]


# -- carried from batch to batch ----------------------------------------------------------------------------------


@pytest.fixture
def carrying(monkeypatch):
    """On the device nothing is read for lack of time."""
    monkeypatch.setattr(counting, "on_cuda", lambda: True)
    monkeypatch.setattr(counting, "_broken", True)
    monkeypatch.setattr(tallies, "SECONDS", 1e9)
    with capture() as cap:
        yield cap


def test_what_is_added_up_is_not_read(carrying):
    """Before it is time: so long the device has it, and all of it is there when it is asked for."""
    passes(4 * BEHIND, whole=True)
    assert 0 == calls(carrying)
    router = carrying.store.routers[threading.get_ident()]
    assert [4 * BEHIND - routing.FORWARDS] == [tally.passes for tally in router._tallies.values()]
    assert 2 * 4 * BEHIND == carrying.total("moe.layer.calls")


@pytest.mark.parametrize("limit", ["SECONDS", "PASSES", "TALLIES"])
def test_when_it_is_read(carrying, monkeypatch, limit):
    """Behind a second, many passes, or with many kinds of them; a batch later, as all is."""
    monkeypatch.setattr(tallies, limit, {"SECONDS": 0.0, "PASSES": routing.FORWARDS, "TALLIES": 0}[limit])
    passes(BEHIND, whole=True)
    assert 0 == calls(carrying)
    passes(1, whole=True)
    assert 2 * routing.FORWARDS == calls(carrying)


def test_its_second_begins_with_its_first_pass(carrying, monkeypatch):
    """And not with the last one that was added."""
    monkeypatch.setattr(tallies, "SECONDS", 0.3)
    for _ in range(3):
        passes(routing.FORWARDS, whole=True)
        time.sleep(0.16)
    passes(2 * routing.FORWARDS, whole=True)
    assert 3 * 2 * routing.FORWARDS == calls(carrying)


@pytest.mark.parametrize("whole", [False, True])
def test_the_peak_is_that_of_the_last_passes(cap, whole):
    """An old skew goes with its pieces, though some batches are read together."""
    passes(5 * LOAD_CALLS, layers=1, ids=[[0, 1]], whole=whole)
    passes(LOAD_WINDOW + LOAD_CALLS, layers=1, ids=[list(range(EXPERTS))], whole=whole)
    cap.series()
    assert 1.0 == cap.store.layers[0].load_peak


@pytest.mark.parametrize("whole", [False, True])
def test_layers_over_the_budget_are_folded(cap, whole):
    """Each call of theirs, as with `routed`."""
    passes(3, layers=260, whole=whole)
    assert 3 * 4 == cap.total("moe.telemetry.overflow")
    assert 3 * 4 == cap.total("moe.layer.calls", layer="other")
    assert 3 * 260 == cap.total("moe.layer.calls")
    assert {layer: [0, 3, 3, *[0] * 13] for layer in range(256)} == tokens(cap)
    assert {} == lost(cap)


def test_models_that_take_turns(cap):
    """Other layers, other numbers of experts, other phases, pass by pass."""
    models = (((0, 1), 8), ((0, 1, 2), 16), ((3,), 300), ((1, 0), 8))
    for turn in range(40):
        layers, experts = models[turn % 4]
        rec.forward(1 + turn % 3, "decode" if turn % 2 else "prefill")
        arrays = [routing_of([[0, experts - 1]]) for _ in layers]
        live.routed_pass(rec, layers, (experts,) * len(layers), arrays)
        mx.eval(arrays)
    assert 10 * (2 + 3 + 1 + 2) == cap.total("moe.layer.calls")
    assert 2 * 10 * (2 + 3 + 1 + 2) == cap.total("moe.layer.experts")
    assert {"decode": 50, "prefill": 30} == {
        phase: cap.total("moe.layer.calls", phase=phase) for phase in ("decode", "prefill")
    }
    assert [10] + [0] * 298 + [10] == cap.store.layers[3].load.tokens
    assert {} == lost(cap)
    router = cap.store.routers[threading.get_ident()]
    assert len(router._plans) <= len(models) * 6


def test_plans_are_bounded(cap, monkeypatch):
    """Passes of ever new layers keep no more than MAX_PLANS."""
    monkeypatch.setattr(routing, "MAX_PLANS", 4)
    for layer in range(20):
        passes(1, layers=[layer], whole=True)
    assert 20 == cap.total("moe.layer.calls")
    assert len(cap.store.routers[threading.get_ident()]._plans) <= 4


def test_an_empty_array_is_a_call_of_no_expert(cap):
    """As `routed` counts an empty set."""
    empty = mx.zeros((0, 2), dtype=mx.uint32)
    mx.eval(empty)
    rec.routed_array(0, empty, EXPERTS)
    assert 1 == cap.total("moe.layer.calls")
    assert 0 == cap.total("moe.layer.experts")


def test_what_is_changed_afterwards_does_not_count(cap):
    """Arrays written to and sets changed behind the call: what held at the call counts."""
    indices, mask, resident = routing_of([[1, 2]]), as_mask({1}), {1, 2}
    rec.routed_array(0, indices, EXPERTS, mask)
    rec.routed_array(1, indices, EXPERTS, resident)
    mx.eval(indices, mask)
    indices[0, 0], mask[2] = 5, True
    resident.clear()
    mx.eval(indices, mask)
    assert 3 == cap.total("moe.expert.lookups", outcome="hit")
    assert 1 == cap.total("moe.expert.lookups", outcome="miss_unpredicted")
    assert [0, 1, 1] == cap.store.layers[0].load.tokens[:3]


# -- when -----------------------------------------------------------------------------------------------------


def test_a_batch_is_read_behind_the_next(cap):
    """The figures of sixteen passes appear when the second sixteen have gone, without anybody asking."""
    passes(BEHIND)
    assert 0 == calls(cap)
    passes(1)
    assert 2 * routing.FORWARDS == calls(cap)
    cap.series()
    assert 2 * (BEHIND + 1) == calls(cap)


def test_a_request_counts_what_is_outstanding(cap):
    """Unless others are under way: then nobody waits."""
    passes(3)
    rec.request(0.1, 1.0, 3, idle=False)
    assert 0 == calls(cap)
    rec.request(0.1, 1.0, 3)
    assert 6 == calls(cap)
    assert 2 == cap.series()["gen_ai.server.request.duration", next(iter(labels_of(cap)))].count


def labels_of(cap):
    return [labels for name, labels in cap.series() if name == "gen_ai.server.request.duration"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_long_prefill_is_counted_early(cap, whole):
    """Many ids, of all layers, are not kept for sixteen passes."""
    passes(1, ids=[[1, 2]] * (routing.MAX_IDS // 4), whole=whole)
    passes(1, whole=whole)
    router = cap.store.routers[threading.get_ident()]
    assert 1 == len(router._batches)
    assert 4 == router._ids


def test_nothing_is_read_or_evaluated_between_two_batches(cap, no_evaluation):
    """A call only keeps what it is given, masks and sets alike."""
    array, mask = lazies.unevaluated(8), lazies.unevaluated(EXPERTS) > 0
    before = lazies.memory()
    for _ in range(routing.FORWARDS):
        for layer in range(3):
            rec.routed_array(layer, array, EXPERTS, mask, {1, 2}, mask)
    assert before == lazies.memory()
    cap.store.routers.clear()  # or the fixture's reading would evaluate


# -- the model's work is its own -------------------------------------------------------------------------------


def test_what_the_model_never_evaluates_stays_so(cap):
    """A pass that nobody asked for is a loss, and is not computed."""
    kept = [lazies.unevaluated() for _ in range(2)]
    before = lazies.memory()
    for layer, array in enumerate(kept):
        rec.routed_array(layer, array, EXPERTS)
    cap.store.drain()
    assert before == lazies.memory()
    assert {"unevaluated": 2} == lost(cap)
    assert 0 == calls(cap)


@pytest.mark.parametrize("whole", [False, True])
def test_dead_routers_behind_a_prefill_chunk_are_left_out(cap, whole):
    """The last layers' routing that the model does not need is no call, and no loss; where it is needed, it is one."""
    for number in range(5):
        made = [routing_of([[1, 2]]) for _ in range(2)]
        arrays = [*made, mx.ones((1, 2), dtype=mx.uint32) + 1]
        if whole:
            live.routed_pass(rec, (0, 1, 2), (EXPERTS,) * 3, arrays)
        else:
            for layer, array in enumerate(arrays):
                rec.routed_array(layer, array, EXPERTS)
        mx.eval(arrays if number == 2 else made)
    before = lazies.memory()
    assert [5, 5, 1] == [cap.total("moe.layer.calls", layer=str(layer)) for layer in range(3)]
    assert lazies.memory() <= before
    assert {0: [0, 5, 5], 1: [0, 5, 5], 2: [0, 0, 2]} == {layer: found[:3] for layer, found in tokens(cap).items()}
    assert {} == lost(cap)


def test_what_is_dead_is_let_go_with_the_next_pass(cap):
    """It holds what a model has in its last layer: cache, weights and activations."""
    alive = [routing_of([[1, 2]]) for _ in range(2)]
    live.routed_pass(rec, (0, 1, 2), (EXPERTS,) * 3, [*alive, lazies.unevaluated()])
    mx.eval(alive)
    router = cap.store.routers[threading.get_ident()]
    assert 3 == lazies.held(router).count("array")
    passes(1, whole=True)
    assert 2 + 2 == lazies.held(router).count("array")


def test_a_pass_handed_over_whole_may_be_dead(cap):
    """An integration hands over every pass of a model, also those whose routing is never needed."""
    live.routed_pass(rec, (0,), (EXPERTS,), [lazies.unevaluated()])
    live.routed_pass(rec, (0,), (EXPERTS,), [array := routing_of([[1, 2]])])
    mx.eval(array)
    live.routed_pass(rec, (0, 1), (EXPERTS, EXPERTS), [lazies.unevaluated(), lazies.unevaluated(1)])
    assert 1 == cap.total("moe.layer.calls")
    assert {} == lost(cap)


def test_what_is_dead_is_a_loss_once_something_behind_it_is_not(cap):
    """Nobody will evaluate it any more, and it is not kept."""
    passes(1, evaluate=False)
    passes(5)
    assert {"unevaluated": 2} == lost(cap)
    assert 0 == len(cap.store.routers[threading.get_ident()]._pending)


def test_an_error_in_a_walk_is_the_loss_of_a_pass(cap, monkeypatch):
    """Of all its calls."""
    original, errors = pending._graph, [RuntimeError("no memory")]

    def failing(*arrays):
        if errors:
            raise errors.pop()
        return original(*arrays)

    passes(1)
    monkeypatch.setattr(pending, "_graph", failing)
    passes(2)
    assert 2 * 2 == cap.total("moe.layer.calls")
    assert {"error": 2} == lost(cap)


def test_what_is_outstanding_is_counted_behind_passes_that_are_dead(cap):
    """However many: with a request each is looked at."""
    passes(3, evaluate=False)
    passes(1)
    assert 2 == cap.total("moe.layer.calls")
    assert {"unevaluated": 6} == lost(cap)


def grow(number, whole):
    """So many passes of a call, each behind the one before, of which nothing is evaluated."""
    array = routing_of([[1, 2]])
    for _ in range(number):
        array = array + 0
        if whole:
            live.routed_pass(rec, (0,), (EXPERTS,), [array])
        else:
            rec.routed_array(0, array, EXPERTS)


def test_passes_that_are_evaluated_together_are_counted(cap):
    """Up to MAX_PENDING calls wait for that, whatever the passes are."""
    for number in (1, 2, 3, 7, 20):
        array, kept = routing_of([[1, 2]]), []
        for _ in range(number):
            for layer in range(3):
                array = array + 0
                kept.append(array)
                rec.routed_array(layer, array, EXPERTS)
        mx.eval(kept)
    assert 3 * (1 + 2 + 3 + 7 + 20) == cap.total("moe.layer.calls")
    assert {} == lost(cap)


@pytest.mark.parametrize("order", [[None] * 20, [0] * 7, [0, 1, 2] * 3, [None, 0, None, 1], [5, 3, 5, 3, 3]])
@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_may_come_several_times_in_a_pass(cap, order, whole):
    """As those whose number is not known do: nothing is lost, though a call that comes again begins a pass."""
    passes(30, order, whole=whole)
    assert 30 * len(order) == cap.total("moe.layer.calls")
    assert 2 * 30 * len(order) == cap.total("moe.layer.experts")
    assert {-1 if layer is None else layer: [0, *[30 * order.count(layer)] * 2, *[0] * 13] for layer in order} == (
        tokens(cap)
    )
    assert {} == lost(cap)


def test_looking_for_what_is_evaluated_stays_cheap(cap, monkeypatch):
    """Where each call begins a pass, and all are evaluated together, few graphs are walked, and short ones."""
    walked = []
    original = pending._graph

    def noted(array):
        walked.append(original(array))
        return walked[-1]

    monkeypatch.setattr(pending, "_graph", noted)
    passes(10, [None] * 100)
    unevaluated = [length for length in walked if length]
    assert len(walked) < 10 * (100 + 20)
    assert len(unevaluated) < 10 * 10
    assert max(unevaluated) < 2000


def test_what_is_never_evaluated_is_given_up(cap, monkeypatch):
    """It is a loss, and not kept, when it is too much, or when something behind it is evaluated."""
    monkeypatch.setattr(pending, "MAX_PENDING", 10)
    for _ in range(20):
        passes(1, evaluate=False)
    router = cap.store.routers[threading.get_ident()]
    assert len(router._pending) <= 10
    assert lost(cap)["unevaluated"] >= 40 - 10 - 2
    passes(BEHIND)
    assert 0 == len(router._pending)
    assert {"unevaluated": 40} == lost(cap)
    assert 2 * BEHIND == cap.total("moe.layer.calls")


@pytest.mark.parametrize("whole", [False, True])
def test_a_graph_that_only_grows_is_not_walked_for_ever(cap, monkeypatch, whole):
    """Passes of which nobody evaluates any are refused until the next request, and so is what they hold."""
    monkeypatch.setattr(pending, "MAX_GRAPH", 400)
    monkeypatch.setattr(pending, "MAX_PENDING", 3)
    walked = []
    original = pending._graph
    monkeypatch.setattr(pending, "_graph", lambda *arrays: walked.append(original(*arrays)) or walked[-1])
    grow(50, whole)
    router = cap.store.routers[threading.get_ident()]
    assert lost(cap)["unevaluated"] > 40
    assert lazies.held(router).count("array") < 4
    assert max(walked) < 1200
    cap.store.drain()
    passes(1)
    assert 2 == cap.total("moe.layer.calls")


def test_functions_under_transformation_are_left_alone(cap):
    """Inside mx.compile and mx.grad arrays are tracers: outputs are right, nothing is counted, nothing is kept."""

    def forward(x):
        indices = mx.argpartition(x, kth=2, axis=-1)[..., :2]
        rec.routed_array(0, indices, 8)
        return mx.take_along_axis(x, mx.stop_gradient(indices), axis=-1).sum()

    x = mx.arange(8, dtype=mx.float32).reshape(1, 8)
    plain = forward(x).item()
    compiled = mx.compile(forward)
    gradient = mx.grad(forward)(x)
    for _ in range(2 * routing.FORWARDS):
        assert plain == compiled(x).item()
        mx.compile(lambda y: forward(y) * 2)(x)
    assert [1.0, 1.0] + [0.0] * 6 == gradient.tolist()[0]
    assert cap.total("moe.layer.calls") <= 2  # the plain one, and the gradient's if it is evaluated with it
    assert [] == lazies.held(cap.store.routers[threading.get_ident()]._closed)


def test_a_batch_under_transformation_is_read_all_the_same(cap):
    """Where MLX refuses to evaluate beside the program: what is read is evaluated then."""

    def forward(x):
        for layer in range(3):
            indices = mx.argpartition(x, kth=2, axis=-1)[..., :2]
            rec.routed_array(layer, indices, 8, mx.zeros((8,), dtype=mx.bool_))
            x = x + mx.take_along_axis(x, mx.stop_gradient(indices), axis=-1).sum(-1, keepdims=True)
        return x

    x = mx.arange(800, dtype=mx.float32).reshape(100, 8)
    for _ in range(BEHIND):
        mx.eval(mx.grad(lambda x: mx.checkpoint(forward)(x).sum())(x))
    assert 2 * 3 * BEHIND == cap.total("moe.layer.calls")
    assert 0 == sum(cap.store.hook_errors.values())


def test_counting_takes_little_memory(cap):
    """A prompt that is read at once, 48 layers of 8,192 tokens: not all its ids are joined together."""
    arrays = [mx.zeros((1, 8192, 8), dtype=mx.uint32) + layer % EXPERTS for layer in range(48)]
    mx.eval(arrays)
    before = lazies.memory()
    mx.reset_peak_memory()
    live.routed_pass(rec, tuple(range(48)), (EXPERTS,) * 48, arrays)
    cap.store.drain()
    assert mx.get_peak_memory() - before < 2 * before  # which is what the ids are
    assert before == lazies.memory()
    assert 48 == cap.total("moe.layer.experts")


def test_nothing_is_held_when_all_is_counted(cap):
    """Memory is what it was once the figures are read."""
    passes(4)
    cap.series()
    before = lazies.memory()
    for _ in range(3):
        passes(4 * routing.FORWARDS, ids=[[1, 2]] * 64)
        cap.series()
    assert before == lazies.memory()


@pytest.mark.parametrize("whole", [False, True])
def test_large_routing_is_handed_to_the_device(cap, whole):
    """It is not kept until its figures are read, nor read by the host, as that of a few tokens is where it can be."""
    router = routing.router_of(cap.store)
    before = lazies.memory()
    passes(3, layers=1, ids=[[1, 2]] * routing.MAX_IDS, whole=whole)
    assert lazies.memory() - before < 2 * (2 * 4 * routing.MAX_IDS)
    cap.store.drain()
    found = []
    for number in (reduction.HOST_IDS // 2, reduction.HOST_IDS // 2 + 1):
        passes(routing.FORWARDS, layers=1, ids=[[1, 2]] * number, whole=whole)
        passes(1, layers=1, whole=whole)
        device = [*router._batches[-1]._parts, *router._tallies.values()]
        found.append([type(part).__name__ for part in device])
        cap.store.drain()
    host, counted = ("HostPasses", "Tally") if whole else ("HostCalls", "DeviceCalls")
    assert [[counted if counting.on_cuda() else host], [counted]] == found


def test_at_most_three_batches_are_held(cap):
    """However long it goes on without a request."""
    most = []
    for _ in range(20):
        passes(routing.FORWARDS)
        most.append(len(lazies.held(cap.store.routers[threading.get_ident()])))
    assert max(most[-5:]) <= max(most[:5])


# -- what is wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, EXPERTS, 1000, -256, -(1 << 16), (1 << 32) + 1, (1 << 63) - 1])
def test_an_id_that_is_none_spoils_its_call_only(cap, bad):
    """The record is dropped whole, and memory beyond the counts is left alone."""
    good = mx.array([[1, 2]])
    wrong = mx.array([[1, bad]], dtype=mx.int32 if abs(bad) < 1 << 31 else mx.int64)
    mx.eval(good, wrong)
    for _ in range(2):
        rec.routed_array(0, good, EXPERTS)
        rec.routed_array(1, wrong, EXPERTS)
        live.routed_pass(rec, (2, 3), (EXPERTS, EXPERTS), [good, wrong])
    assert {"0": 2, "1": 0, "2": 2, "3": 0} == {
        layer: cap.total("moe.layer.calls", layer=layer) for layer in ("0", "1", "2", "3")
    }
    assert {"out_of_range": 4} == lost(cap)
    assert [0, 2, 2] == cap.store.layers[0].load.tokens[:3]
    assert {1: [0] * EXPERTS, 3: [0] * EXPERTS} == {1: [0] * EXPERTS, 3: [0] * EXPERTS} | {
        layer: found for layer, found in tokens(cap).items() if layer in (1, 3)
    }


WRONG = {
    "a list": (([[1, 2]], EXPERTS), "not_a_number"),
    "floats": ((mx.array([1.0]), EXPERTS), "not_a_number"),
    "a scalar": ((mx.array(1), EXPERTS), "not_a_number"),
    "no experts": ((mx.array([1]), 0), "out_of_range"),
    "too many experts": ((mx.array([1]), 10**6), "out_of_range"),
    "experts unknown": ((mx.array([1]), None), "not_a_number"),
    "ids without end": ((mx.broadcast_to(mx.array([1], dtype=mx.uint8), (1 << 16, 1 << 15)), EXPERTS), "too_many"),
    "a lazy number of experts": ((mx.array([1]), mx.array(8)), "lazy_array"),
    "a mask of another length": ((mx.array([1]), EXPERTS, mx.zeros((3,), dtype=mx.bool_)), "not_a_number"),
    "a mask of numbers": ((mx.array([1]), EXPERTS, None, mx.zeros((EXPERTS,))), "not_a_number"),
    "a set beyond the experts": ((mx.array([1]), EXPERTS, {EXPERTS}), "out_of_range"),
    "a negative id in a set": ((mx.array([1]), EXPERTS, None, {-1}), "out_of_range"),
    "lazy scalars in a set": ((mx.array([1]), EXPERTS, None, {mx.array(1)}), "lazy_array"),
    "ready of text": ((mx.array([1]), EXPERTS, {1}, {1}, "12"), "not_a_number"),
}


@pytest.mark.parametrize("given", WRONG, ids=WRONG)
def test_what_cannot_be_counted_is_refused(cap, given):
    """With the reason, before anything of it counts or makes its layer known."""
    arguments, reason = WRONG[given]
    rec.routed_array(5, *arguments)
    assert {reason: 1} == lost(cap)
    assert 5 not in cap.store.layers
    assert 0 == cap.total("moe.layer.calls")
    assert [] == lazies.held(cap.store.routers.get(threading.get_ident()))


def fail_for(monkeypatch, shape):
    """Let the device be asked to count, and fail where an array has this shape."""
    monkeypatch.setattr(counting, "on_cuda", lambda: True)
    original = counting.token_counts

    def failing(indices, experts):
        if any(array.shape == shape for array in indices):
            raise RuntimeError("no memory")
        return original(indices, experts)

    monkeypatch.setattr(counting, "token_counts", failing)


@pytest.mark.parametrize("whole", [False, True])
def test_an_error_in_one_pass_leaves_the_others(cap, monkeypatch, whole):
    """What cannot be reduced together is reduced apart, and counts for what it is."""
    fail_for(monkeypatch, (3, 2))
    passes(2, whole=whole)
    passes(1, ids=[[1, 2]] * 3, whole=whole)
    assert 4 == cap.total("moe.layer.calls")
    assert 8 == cap.total("moe.layer.experts")
    assert {0: [0, 2, 2] + [0] * 13, 1: [0, 2, 2] + [0] * 13} == tokens(cap)
    assert {"error": 2} == lost(cap)


def test_an_error_when_figures_are_read_leaves_the_other_kinds(cap, monkeypatch):
    """Other shapes of the same batch are counted."""
    passes(2)
    passes(1, ids=[[1, 2, 3]])
    monkeypatch.setattr(cap.store.layers[0], "load", BrokenLoad(EXPERTS))
    passes(1, layers=[1], ids=[[1, 2, 3, 4]])
    cap.store.drain()
    assert 4 == cap.series()["moe.layer.union.max", (("layer", "1"), ("phase", "decode"))]
    assert 0 < lost(cap)["error"]


@pytest.mark.parametrize("whole", [False, True])
def test_what_cannot_be_read_is_a_loss_of_all_its_calls(cap, whole):
    """As when the device has run out of memory; the batch behind it counts."""

    class Unreadable:
        def tolist(self):
            raise RuntimeError("no memory")

    passes(2, ids=[[1, 2]] * 40, whole=whole)
    router = cap.store.routers[threading.get_ident()]
    router._begin()
    router._pending.close(router._closed, every=True)
    router._launch()
    for part in [*(part for batch in router._batches for part in batch._parts), *router._tallies.values()]:
        object.__setattr__(part, "counts" if whole else "_read", Unreadable() if whole else [Unreadable()])
    router._read(0)
    router._count()
    assert {"error": 4} == lost(cap)
    passes(1, ids=[[1, 2]] * 40, whole=whole)
    assert 2 == cap.total("moe.layer.calls")


class BrokenLoad(ExpertLoad):
    def count(self, *_):
        raise OverflowError

    add = count


def test_what_is_no_routing_spoils_its_pass_only(cap):
    """Handed over whole it is not looked at: MLX or reading it finds out, in our hands."""
    for wrong in ([None, None], [mx.array(1), mx.array(2)], [mx.array([1.5]), mx.array([2.5])], ["12", "34"]):
        mx.eval([each for each in wrong if isinstance(each, mx.array)])
        passes(1, whole=True)
        live.routed_pass(rec, (0, 1), (EXPERTS, EXPERTS), wrong)
        passes(1, whole=True)
    assert 2 * 2 * 4 == cap.total("moe.layer.calls")
    assert 0 < sum(lost(cap).values())


def test_ids_without_end_in_a_whole_pass(cap):
    """To count them would take memory that the model needs."""
    endless, _ = WRONG["ids without end"]
    mx.eval(endless[0])
    passes(1, whole=True)
    live.routed_pass(rec, (0, 1), (EXPERTS, EXPERTS), [endless[0]] * 2)
    assert 2 == cap.total("moe.layer.calls")
    assert {"too_many": 1} == lost(cap)


def test_a_count_in_the_middle_of_a_pass(cap):
    """What is handed in behind it is counted once."""
    array = routing_of([[1, 2]])
    mx.eval(array)
    for layer in range(3):
        rec.routed_array(layer, array, EXPERTS)
        assert layer + 1 == cap.total("moe.layer.calls")
    cap.store.drain()
    assert 3 == cap.total("moe.layer.calls")
    assert 0 == len(routing._NOTHING)


def test_off_it_does_nothing():
    """Before start() and after stop()."""
    rec.routed_array(0, [object()], None)
    with capture() as cap:
        passes(1)
    passes(1)
    cap.store.end()
    assert 2 == calls(cap)


# -- load -------------------------------------------------------------------------------------------------------


def test_the_peak_looks_back_on_the_last_calls():
    """Of 256 calls, in pieces of 64: older pieces go, and an old skew with them."""
    load = ExpertLoad(4)
    for _ in range(LOAD_CALLS):
        load.count([0, 0])
    assert 4.0 == load.peak()
    for _ in range(LOAD_WINDOW):
        load.count([0, 1, 2, 3])
    assert 1.0 == load.peak()
    assert [2 * LOAD_CALLS + LOAD_WINDOW, LOAD_WINDOW, LOAD_WINDOW, LOAD_WINDOW] == load.tokens


def test_no_token_has_no_peak():
    """Nothing to divide by."""
    assert ExpertLoad(4).peak() is None
