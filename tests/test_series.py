"""What is read from the cells: which series exist when, the layer budget, absolute counters, the snapshot."""

from __future__ import annotations

import json
import logging
import tracemalloc

import every_hook
import pytest

from moe_telemetry import catalog, series, snapshot
from moe_telemetry import recorder as rec
from moe_telemetry.catalog import Kind
from moe_telemetry.series import Distribution, Unions
from moe_telemetry.store import LAYER_BUDGET
from moe_telemetry.testing import capture


@pytest.fixture
def cap():
    """A started telemetry."""
    with capture() as found:
        yield found


def lost(cap):
    """Records dropped, by reason."""
    return {reason: count for reason, count in cap.store.lost.items() if count}


def label_sets(cap, name):
    """Label sets of a metric's series, as dicts."""
    return [dict(labels) for found, labels in cap.series() if found == name]


# -- zero before the first event -----------------------------------------------------------------------------------

BY_PHASE_AND_LAYER = {"moe.layer.experts": 1, "moe.layer.overflows": 1, "moe.expert.evictions": 1, "moe.layer.calls": 4}
WITH_POOL = ("moe.expert.lookups", "moe.predictor.experts")


def test_static_counters_exist_at_zero_from_the_start(cap):
    """Each counter and histogram without layer has every label set it may get, all 0 (C17, D9)."""
    found = cap.series()
    for metric in catalog.CATALOG:
        absent = {"moe.predictor.candidates", "process.cpu.time"}
        absent |= {"moe.pool.simulated.lookups", "moe.pool.simulated.hits"}  # with a pool, or the first set
        if metric.kind is Kind.GAUGE or "layer" in metric.keys or metric.name in absent:
            continue
        if "seq" in metric.keys:
            assert [{"phase": "decode", "seq": "1"}] == label_sets(cap, metric.name)
            continue
        sizes = [len(label.values) for label in metric.labels if label.values]
        expected = 1
        for size in sizes:
            expected *= size
        if metric.name == "moe.telemetry.hook.errors":
            expected = len(every_hook.CALLS)
        assert (metric.name, expected) == (metric.name, len(label_sets(cap, metric.name)))
    values = {v.count if isinstance(v, Distribution) else v for (n, _), v in found.items() if n != "moe.run.start.time"}
    assert {0} == values


def test_gauges_appear_with_their_first_value(cap):
    """No gauge is 0 for want of a value, and none is NaN (C17)."""
    assert ["moe.run.start.time"] == [name for name, _ in cap.series() if catalog.BY_NAME[name].kind is Kind.GAUGE]


@pytest.mark.parametrize(("given", "layers"), [(3, ["0", "1", "2"]), ([5, 9], ["5", "9"]), (None, [])])
def test_a_known_layer_has_its_counters_at_zero(given, layers):
    """`num_layers` makes a layer's counters exist in both phases, without lookups, predictor and gauges."""
    with capture(num_layers=given) as cap:
        for name, count in BY_PHASE_AND_LAYER.items():
            assert sorted(layers * 2 * count) == sorted(labels["layer"] for labels in label_sets(cap, name))
        for name in (*WITH_POOL, "moe.predictor.candidates", "moe.layer.union.max", "moe.pool.capacity"):
            assert [] == label_sets(cap, name)


def test_a_runtime_without_pool_has_no_hit_rate():
    """Unions and passes alone make neither lookups nor recall exist (C20)."""
    with capture(num_layers=2) as cap:
        rec.union(0, 5)
        rec.routed(1, {1, 2})
        rec.evicted(0)
        assert [] == label_sets(cap, "moe.expert.lookups") + label_sets(cap, "moe.predictor.experts")
        assert [] == label_sets(cap, "moe.predictor.candidates")


@pytest.mark.parametrize(
    ("lookups", "predictor", "show"),
    [
        (True, True, lambda: rec.pool(0, 8)),
        (True, False, lambda: rec.routed(0, {1}, {2})),
        (False, True, lambda: rec.routed(0, {1}, predicted={2})),
        (False, True, lambda: rec.recall(0, {1}, {2})),
        (True, False, lambda: rec.cumulative("moe.expert.lookups", 0, phase="decode", layer=0, outcome="hit")),
        (False, True, lambda: rec.cumulative("moe.predictor.candidates", 0, phase="decode", outcome="used")),
        (False, True, lambda: rec.cumulative("moe.predictor.experts", 0, phase="decode", layer=0, outcome="missed")),
    ],
)
def test_lookups_and_recall_exist_once_the_runtime_has_shown_them(lookups, predictor, show):
    """Then they exist for every known layer, outcome and phase, and stay."""
    with capture(num_layers=2) as cap:
        show()
        for _ in range(2):
            assert (2 * 2 * 4 if lookups else 0) == len(label_sets(cap, "moe.expert.lookups"))
            assert (2 * 2 * 2 if predictor else 0) == len(label_sets(cap, "moe.predictor.experts"))
            assert (4 if predictor else 0) == len(label_sets(cap, "moe.predictor.candidates"))


def test_a_pool_makes_its_layer_known(cap):
    """Declared at load, a layer's counters are at 0 before its first pass."""
    rec.pool(7, capacity=8)
    assert 8 == cap.value("moe.pool.capacity", layer="7")
    assert [] == label_sets(cap, "moe.pool.resident")
    assert 0 == cap.value("moe.expert.lookups", phase="decode", layer="7", outcome="miss_timing")
    assert 0 == cap.value("moe.layer.calls", phase="prefill", layer="7", residency="all_hit")


def test_label_sets_belong_to_the_catalog(cap):
    """Every series has exactly its metric's labels, with values of their closed sets."""
    every_hook.call_all(rec)
    for name, labels in cap.series():
        metric = catalog.BY_NAME[name]
        assert sorted(metric.keys) == [key for key, _ in labels]
        assert all(value in metric.label(key).values for key, value in labels if metric.label(key).values)


# -- the budget of layers ------------------------------------------------------------------------------------------


def test_layers_over_the_budget_are_one(caplog):
    """Of 10,000 layers 256 have series of their own and the rest is `other`, with one warning (C16)."""
    with capture() as cap, caplog.at_level(logging.WARNING, "moe_telemetry"):
        for layer in range(10_000):
            rec.routed(layer, {1, 2}, {1})
        labels = {found["layer"] for found in label_sets(cap, "moe.layer.experts")}
        assert {*(str(layer) for layer in range(LAYER_BUDGET)), "other"} == labels
        assert 2 * (10_000 - LAYER_BUDGET) == cap.value("moe.layer.experts", phase="decode", layer="other")
        assert 20_000 == cap.total("moe.layer.experts") == cap.total("moe.expert.lookups")
        assert 10_000 - LAYER_BUDGET == cap.value("moe.telemetry.overflow")
        assert {} == lost(cap)
    assert 1 == len(caplog.records)
    assert 'layer="other"' in caplog.records[0].getMessage()
    assert "moe_telemetry_overflow_total" in caplog.records[0].getMessage()


def test_the_overflow_counts_exactly_the_folded_records():
    """Every hook with a layer counts once when it folds; refused records, and layers of old, do not."""
    with capture(num_layers=LAYER_BUDGET) as cap:
        rec.union(0, 3)
        rec.union(None, 3)
        assert 0 == cap.value("moe.telemetry.overflow")
        rec.union(1000, 3)
        rec.routed("1001", {1})
        rec.recall(1000, {1}, {1})
        rec.evicted(1002.0)
        rec.pool(1003, 8)
        assert 5 == cap.value("moe.telemetry.overflow")
        rec.union(1000, -1)
        rec.routed(1000, [None])
        rec.recall(1000, {1}, 3)
        rec.evicted(1000, -1)
        rec.pool(1003, -8)
        rec.union(5, 3)
        rec.union(None, 3)
        assert 5 == cap.value("moe.telemetry.overflow")
        assert [] == label_sets(cap, "moe.pool.capacity")
        assert 2 == cap.total("moe.layer.calls", layer="none")
        assert 2 == cap.total("moe.layer.calls", layer="other")


def test_memory_is_flat_over_the_budget():
    """A second ten thousand of unknown layers takes no memory."""
    with capture() as cap:
        for layer in range(1000):
            rec.routed(layer, {1, 2}, {1})
        tracemalloc.start()
        try:
            cap.series()
            before = tracemalloc.get_traced_memory()[0]
            for layer in range(1000, 11_000):
                rec.routed(layer, {1, 2}, {1})
                rec.pool(layer, 8, 8)
                rec.union(str(layer), 3)
            cap.series()
            assert 64 * 1024 > tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()


def test_every_hook_on_every_expert_stays_in_the_budget():
    """48 layers of 128 experts make no series by expert (C16)."""
    with capture(num_layers=48) as cap:
        for layer in range(48):
            every_hook.call_all(rec)
            for expert in range(128):
                rec.routed(layer, {expert}, {expert}, {expert}, {expert})
        assert 48 * 2 * 4 == len(label_sets(cap, "moe.expert.lookups"))
        assert 48 * 2 == len(label_sets(cap, "moe.layer.experts"))
        assert 2000 > len(cap.series())


# -- counters fed as absolute values -------------------------------------------------------------------------------


def test_an_absolute_counter_adds_its_rise(cap):
    """The exported total follows the source, and adds to what hooks counted themselves (D10)."""
    rec.tokens(5)
    for value in (10, 10, 25.0, 25.5):
        rec.cumulative("moe.tokens", value, phase="decode")
    assert 30.5 == cap.value("moe.tokens", phase="decode")
    assert 0 == cap.value("moe.tokens", phase="prefill")


def test_a_fall_is_a_reset_of_the_source(cap):
    """The exported counter never falls: behind a reset the new value is the rise (D10)."""
    seen = []
    for value in (100, 120, 5, 6, 0, 7, 0, 0):
        rec.cumulative("moe.expert.read", value, phase="decode", source="demand")
        seen.append(cap.value("moe.expert.read", phase="decode", source="demand"))
    assert [100, 120, 125, 126, 126, 133, 133, 133] == seen


def test_absolute_counters_by_layer(cap):
    """A layer in any form is one series, and becomes known."""
    labels = {"phase": "decode", "outcome": "hit"}
    rec.cumulative("moe.expert.lookups", 10, layer=3, **labels)
    rec.cumulative("moe.expert.lookups", 12, layer="3", **labels)
    rec.cumulative("moe.expert.evictions", 4, layer=None, phase="prefill")
    assert 12 == cap.value("moe.expert.lookups", layer="3", **labels)
    assert 4 == cap.value("moe.expert.evictions", layer="none", phase="prefill")
    assert 0 == cap.value("moe.layer.experts", layer="3", phase="prefill")


def test_sources_over_the_layer_budget_are_refused():
    """Folded into one series, their values would look like resets of each other and add up for ever."""
    with capture(num_layers=LAYER_BUDGET) as cap:
        for value in range(10):
            for layer in (1000, 1001):
                rec.cumulative("moe.expert.evictions", layer + value, layer=layer, phase="decode")
        assert {"out_of_range": 20} == lost(cap)
        assert 0 == cap.total("moe.expert.evictions")
        assert 0 == cap.value("moe.telemetry.overflow")


@pytest.mark.parametrize(
    ("reason", "name", "value", "labels"),
    [
        ("unknown_metric", "moe.tokens.total", 1, {"phase": "decode"}),
        ("unknown_metric", "moe.pool.capacity", 1, {"layer": 1}),
        ("unknown_metric", "moe.forward.duration", 1, {"phase": "decode", "seq": "1"}),
        ("unknown_metric", "moe.telemetry.dropped", 1, {"reason": "error"}),
        ("unknown_metric", "moe.telemetry.hook.errors", 1, {"hook": "routed"}),
        ("unknown_metric", "process.cpu.time", 1, {}),
        ("unknown_metric", ["moe.tokens"], 1, {"phase": "decode"}),
        ("unknown_metric", None, 1, {}),
        ("unknown_label", "moe.tokens", 1, {}),
        ("unknown_label", "moe.tokens", 1, {"phase": "warmup"}),
        ("unknown_label", "moe.tokens", 1, {"phase": ["decode"]}),
        ("unknown_label", "moe.tokens", 1, {"phase": "decode", "layer": 1}),
        ("unknown_label", "moe.expert.evictions", 1, {"phase": "decode"}),
        ("unknown_label", "moe.expert.evictions", 1, {"phase": "warmup", "layer": 3}),
        ("unknown_label", "moe.expert.evictions", 1, {"phase": "decode", "layer": "x"}),
        ("negative", "moe.tokens", -1, {"phase": "decode"}),
        ("not_a_number", "moe.tokens", True, {"phase": "decode"}),
    ],
)
def test_only_a_counter_of_the_catalog_is_fed(cap, reason, name, value, labels):
    """Name, kind and labels must be the catalog's; a refused value makes nothing known and is no reset."""
    before = cap.series()
    rec.cumulative(name, value, **labels)
    assert {reason: 1} == lost(cap)
    assert {key: v for key, v in before.items() if key[0] != "moe.telemetry.dropped"} == {
        key: v for key, v in cap.series().items() if key[0] != "moe.telemetry.dropped"
    }


def test_every_counter_of_the_catalog_can_be_fed(cap):
    """All but telemetry's own, with any value of each label."""
    own = ("moe.telemetry.", "process.")
    names = [metric for metric in catalog.counters() if not metric.name.startswith(own)]
    for metric in names:
        rec.cumulative(metric.name, 7, **{label.key: (*label.values, 3)[0] for label in metric.labels})
    assert {} == lost(cap)
    assert [7] * len(names) == [cap.total(metric.name) for metric in names]


# -- readings ------------------------------------------------------------------------------------------------------


def test_without_layers_counters_are_summed(cap):
    """layers="off" keeps totals: counters add up, a pool is the smallest, a maximum the largest (D6)."""
    for layer, capacity in ((0, 8), (1, 4), (2, 6)):
        rec.pool(layer, capacity, capacity - 1)
        rec.routed(layer, set(range(layer + 5)), {0})
    families = {family.metric.name: family for family in series.read(cap.store, layers=False)}
    assert [] == [name for name, family in families.items() if "layer" in family.metric.keys]
    assert {("decode",): 18, ("prefill",): 0} == families["moe.layer.experts"].series
    assert 3 == families["moe.expert.lookups"].series["decode", "hit"]
    assert {(): 4} == families["moe.pool.capacity"].series
    assert {(): 3} == families["moe.pool.resident"].series
    assert {("decode",): 7} == families["moe.layer.union.max"].series
    assert ("phase", "outcome") == families["moe.expert.lookups"].metric.keys


def test_families_come_in_the_catalogs_order(cap):
    """Two scrapes list the same families in the same order."""
    every_hook.call_all(rec)
    names = [family.metric.name for family in series.read(cap.store)]
    assert [metric.name for metric in catalog.CATALOG if metric.name in names] == names


def test_a_distribution_is_a_copy(cap):
    """A reading does not change behind the reader."""
    rec.stall(1.0)
    before = cap.value("moe.expert.stall.duration", phase="decode")
    rec.stall(1.0)
    assert (1, 1.0) == (before.count, before.sum)


def test_unions_are_exact_by_phase_length_and_layer(cap):
    """Each size of each layer is kept, for each length of a pass."""
    rec.union(0, 10)
    rec.union(0, 10)
    rec.union(1, 9)
    rec.forward(20, "prefill")
    rec.union(None, 30)
    found = series.unions(cap.store)
    assert {"1": Unions({"0": {10: 2}, "1": {9: 1}})} == found["decode"]
    assert {"20": Unions({"none": {30: 1}})} == found["prefill"]


def test_lengths_that_share_cells_are_not_taken_for_an_exact_one(cap):
    """A length kept apart and those that share its label are two entries; nothing is overwritten."""
    for tokens in (64, *range(17, 64), 5000, 6000):
        rec.forward(tokens, "prefill")
        rec.union(0, tokens)
    found = series.unions(cap.store)["prefill"]
    assert {64: 1} == found["64"].layers["0"]
    assert set(range(48, 64)) == set(found["<=64"].layers["0"])
    assert {5000: 1, 6000: 1} == found["4096+"].layers["0"]
    assert 50 == sum(sum(sizes.values()) for unions in found.values() for sizes in unions.layers.values())


def test_a_caller_with_endless_union_sizes_stays_bounded(cap):
    """Past the exact table count, sum and maximum stay exact."""
    sizes = range(20_000)
    for size in sizes:
        rec.union(0, size)
    tally = cap.store.rows["decode", 1].layers[0].union
    assert (len(sizes), sum(sizes), max(sizes)) == (tally.count(), tally.sum(), tally.max())
    assert 8192 == len(tally.sizes)
    assert sum(sizes) == cap.value("moe.layer.experts", phase="decode", layer="0")
    union = cap.value("moe.expert.union", phase="decode", seq="1")
    assert (len(sizes), sum(sizes)) == (union.count, union.sum)
    rest = series.unions(cap.store)["decode"]["1"].rest
    assert (20_000 - 8192, sum(range(8192, 20_000)), 19_999) == rest


def test_a_snapshot_is_json_and_exact(cap):
    """It survives JSON, and holds what the series hold."""
    every_hook.call_all(rec)
    found = snapshot.build(cap.store, series.read(cap.store))
    assert found == json.loads(json.dumps(found))
    assert {"decode": {"1": {"layers": {"2": {"4": 1, "7": 1}}}}, "prefill": {}} == found["unions"]
    [tokens] = [s for s in found["metrics"]["moe.tokens"]["series"] if s["labels"]["phase"] == "decode"]
    assert 3 == tokens["value"]
    duration = found["metrics"]["moe.block.duration"]
    assert list(catalog.HOST_BOUNDS) == duration["bounds"]
    assert all(s["count"] == sum(s["buckets"]) for s in duration["series"])
    assert [{"model": "test", "run": "test", "runtime": "test"}] == [
        {key: s["labels"][key] for key in ("model", "run", "runtime")}
        for s in found["metrics"]["moe.run.info"]["series"]
    ]


def test_capture_gives_values_and_totals(cap):
    """The helper for runtimes' own tests: one series, a sum over series, and a KeyError for what does not exist."""
    rec.union(0, 2)
    rec.union(1, 3)
    assert 2 == cap.value("moe.layer.experts", phase="decode", layer="0")
    assert 5 == cap.total("moe.layer.experts") == cap.total("moe.layer.experts", phase="decode")
    assert 0 == cap.total("moe.layer.experts", phase="prefill") == cap.total("no.such.metric")
    with pytest.raises(KeyError):
        cap.value("moe.layer.experts", phase="decode", layer="9")
