"""The drop-in: its names and flags, what it takes and refuses, and what its in-place writes export."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from profiling_state import DICTS, pristine
from seed_reference import Reference

from moe_telemetry import hooks, profiling, profiling_ticks, profiling_times, profiling_unions, snapshot
from moe_telemetry import recorder as rec
from moe_telemetry.catalog import HOST_BOUNDS
from moe_telemetry.profiling import (
    MISS_ATTRIB,
    PREDICT_RECALL_PROF,
    PREFETCH_TPROF,
    PROF,
    UNION_PROF,
    UNION_SAMPLES,
    WINDOW_PROF,
    note_miss_attrib,
    note_tprof,
    note_union,
)
from moe_telemetry.profiling_dicts import Plain
from moe_telemetry.profiling_state import by_key, flow
from moe_telemetry.profiling_times import Series
from moe_telemetry.profiling_views import Samples
from moe_telemetry.series import read
from moe_telemetry.store import Store
from moe_telemetry.testing import Capture, capture

NAMES = {
    *("PROF", "WINDOW_PROF", "PREDICT_RECALL_PROF", "PREFETCH_TPROF", "MISS_ATTRIB", "UNION_PROF", "UNION_SAMPLES"),
    *("_PROF_ON", "TPROF_ON", "UNION_ON", "note_tprof", "note_miss_attrib", "note_union", "_tick"),
    *("tprof_reset", "union_reset", "prof_reset"),
}


@pytest.fixture(autouse=True)
def _pristine() -> Iterator[None]:
    pristine()
    yield
    pristine()


def python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter."""
    flags = ("STREAM_PROF", "PREFETCH_TPROF", "UNION_PROF", "MISS_ATTRIB")
    inherited = {key: value for key, value in os.environ.items() if key not in flags}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def lookups(captured: Capture, phase: str, layer: str = "none") -> dict[str, Any]:
    return {
        outcome: captured.value("moe.expert.lookups", phase=phase, layer=layer, outcome=outcome)
        for outcome in ("hit", "miss_timing", "miss_evicted", "miss_unpredicted")
    }


# -- names, flags, start and stop ---------------------------------------------------------------------------------


def test_a_star_import_is_a_shim():
    """One line in place of the runtime's module gives every name, the private ones included."""
    names: dict[str, Any] = {}
    exec("from moe_telemetry.profiling import *", names)
    assert NAMES | {"set_phase"} == names.keys() - {"__builtins__"}
    assert names["PROF"] is PROF


@pytest.mark.parametrize("value", ["1", "0", "true", "", "11", " 1", None])
def test_flags_are_on_when_exactly_1(value):
    """A flag is read once at import, and '1' alone turns it on."""
    code = "from moe_telemetry.profiling import *; print(_PROF_ON, TPROF_ON, UNION_ON)"
    variables = ("STREAM_PROF", "PREFETCH_TPROF", "UNION_PROF")
    given = {} if value is None else dict.fromkeys(variables, value)
    assert " ".join([str(value == "1")] * 3) == python(code, **given)
    if value == "1":
        assert "False True False" == python(code, PREFETCH_TPROF="1")


def test_misses_decide_where_their_variable_is_set():
    """MISS_ATTRIB=1 lets unions wait for note_miss_attrib; they are in UNION_PROF all the same."""
    code = (
        "from moe_telemetry.testing import capture; from moe_telemetry.profiling import *\n"
        "with capture() as found:\n"
        "    note_union(2, 5, 0); print(UNION_PROF, found.total('moe.layer.calls'))\n"
        "    note_miss_attrib({1}, None, {1}, False); print(found.total('moe.layer.calls', phase='prefill'))"
    )
    assert ["{2: [5, 1]} 0", "1"] == python(code, MISS_ATTRIB="1").split("\n")


def test_the_drop_in_follows_a_telemetry_that_runs_already():
    """Imported behind start(), it counts from then on."""
    code = (
        "from moe_telemetry.testing import capture\n"
        "with capture() as found:\n"
        "    from moe_telemetry.profiling import note_union\n"
        "    note_union(1, 10, 3)\n"
        "    print(found.value('moe.expert.union', phase='decode', seq='1').count)"
    )
    assert "1" == python(code)


def test_off_overrides_nothing():
    """Without telemetry the dicts read and write as a dict does, before the first start and after a stop."""
    methods = set(vars(dict)) - {"__reduce__", "__new__", "__init__", "__doc__", "__getattribute__"}
    methods -= {"__class_getitem__", "fromkeys"}  # bound to the class
    for _ in range(2):
        for name in DICTS:
            kind = type(getattr(profiling, name))
            assert Plain is kind
            assert [] == [method for method in methods if getattr(kind, method) is not getattr(dict, method, None)]
        with capture():
            assert Plain is not type(PROF)


def test_a_stopped_telemetry_is_frozen():
    """What comes after the stop is in the dicts, and in no metric of the telemetry before."""
    with capture() as first:
        note_union(1, 10, 3)
        PROF["fetch"] += 0.5
    before = first.series()
    note_union(1, 12, 3)
    PROF["fetch"] += 0.5
    assert before == first.series()
    with capture() as second:
        note_union(1, 14, 3)
        assert 14 == second.value("moe.layer.experts", phase="decode", layer="3")
    assert ([10, 12, 14], 1.0) == (sorted(UNION_SAMPLES[1][3]), PROF["fetch"])


def test_nested_telemetries_count_what_is_theirs():
    """The inner one takes over, and the outer one goes on behind it."""
    with capture() as outer:
        note_union(1, 10, 3)
        with capture() as inner:
            note_union(1, 11, 3)
        note_union(1, 12, 3)
        assert 22 == outer.total("moe.layer.experts")
    assert 11 == inner.total("moe.layer.experts")
    assert {1: [33, 3]} == UNION_PROF


# -- unions ---------------------------------------------------------------------------------------------------------


def test_union_reaches_every_metric():
    """A union is a layer call of unknown residency, its size in the sum, the histogram and the maxima."""
    with capture() as captured:
        note_union(1, 10, 3)
        rec.pool(3, capacity=11)
        note_union(1, 12, 3)
        note_union(200, 40, 3)
        note_union(1, 9)
    labels = {"phase": "decode", "layer": "3"}
    assert 2 == captured.value("moe.layer.calls", **labels, residency="unknown")
    assert 22 == captured.value("moe.layer.experts", **labels)
    assert 12 == captured.value("moe.layer.union.max", **labels)
    assert 1 == captured.value("moe.layer.overflows", **labels)
    assert (3, 31) == (
        captured.value("moe.expert.union", phase="decode", seq="1").count,
        captured.value("moe.expert.union", phase="decode", seq="1").sum,
    )
    assert 40 == captured.value("moe.expert.union.max", phase="prefill", seq="256")
    with pytest.raises(KeyError):  # a pass that recorder.forward was not told of has no duration
        captured.value("moe.forward.duration", phase="prefill", seq="256")
    assert 9 == captured.value("moe.layer.experts", phase="decode", layer="none")
    assert {"200"} == snapshot.build(captured.store, read(captured.store))["unions"]["prefill"].keys()


def test_unions_of_both_hooks_are_one_distribution():
    """Unions of the recorder and of the drop-in add up in the metrics; the dicts hold the drop-in's."""
    with capture() as captured:
        rec.forward(1)
        rec.union(3, 10)
        rec.forward_done(0.1)
        note_union(1, 10, 3)
        note_union(1, 11, 3)
        found = snapshot.build(captured.store, read(captured.store))
    assert {"3": {"10": 2, "11": 1}} == found["unions"]["decode"]["1"]["layers"]
    assert 3 == captured.value("moe.expert.union", phase="decode", seq="1").count
    assert {1: [21, 2]} == UNION_PROF


def test_samples_are_like_the_list():
    """Length, iteration, sum, extrema, sorting, indexing, slices, membership, truth and equality are a list's."""
    values = [5, 3, 5, 9, 1]
    for value in values:
        note_union(2, value, 7)
    found = UNION_SAMPLES[2][7]
    assert isinstance(found, Samples)
    assert (5, 23, 9, 1) == (len(found), sum(found), max(found), min(found))
    assert [1, 3, 5, 5, 9] == sorted(found) == list(found) == found[:]
    assert (1, 9, 5, [3, 5], [9, 5, 5, 3, 1]) == (found[0], found[-1], found[3], found[1:3], found[::-1])
    assert [9, 5, 5, 3, 1] == list(reversed(found))
    assert (True, False, 2, 2) == (5 in found, 4 in found, found.count(5), found.index(5))
    assert values == found == UNION_SAMPLES[2][7]
    assert [1, 2] != found
    assert [3, 3, 5, 9, 1] != found
    assert repr(sorted(values)) == repr(found)
    assert [0, 1, 3, 5, 5, 9, 0] == [0] + found + [0]  # noqa: RUF005
    with pytest.raises(IndexError):
        found[5]
    assert not Samples({})


def test_ten_million_samples_in_a_megabyte():
    """10^7 unions of 48 layers take less than 1 MiB, whether telemetry runs or not."""
    rng = random.Random(1)
    calls = [(1 + 2 * (number % 2), min(512, int(rng.gammavariate(20, 1))), number % 48) for number in range(4000)]
    for call in calls:
        note_union(*call)
    before = size_of(flow.unions)
    for _ in range(10**7 // len(calls)):
        for seq, size, layer in calls:
            note_union(seq, size, layer)
    assert 10**7 + len(calls) == sum(count for _, count in UNION_PROF.values())
    assert size_of(flow.unions) < 2**20
    assert size_of(flow.unions) - before < 2**16


def size_of(root: object) -> int:
    """Bytes of everything that an object holds, telemetry's own classes and containers followed."""
    seen: dict[int, object] = {}
    queue = [root]
    while queue:
        node = queue.pop()
        if id(node) not in seen and not isinstance(node, (type, Store)):
            seen[id(node)] = node
            queue += gc.get_referents(node)
    return sum(sys.getsizeof(node) for node in seen.values())


@pytest.mark.parametrize("running", [False, True])
def test_views_raise_what_a_dict_raises(running, caplog):
    """Entries can be removed, what is put in is dropped with one line, and nothing raises that a dict would take."""
    views: list[dict[int, Any]] = [UNION_PROF, UNION_SAMPLES]
    flow.home.logged_at = -1e9
    captured = capture()
    if running:
        captured.__enter__()
    try:
        for view in views:
            profiling.union_reset()
            for seq in (1, 2, 3):
                note_union(seq, 10 + seq, 3)
            before = dict(view)
            view.update({})
            view |= {}
            assert before[1] == view.setdefault(1, None) == view.pop(1)
            del view[2]
            assert ([3], None) == (list(view), view.pop(1, None))
            for missing in (lambda view=view: view.pop(1), lambda view=view: view.__delitem__([])):
                with pytest.raises((KeyError, TypeError)):
                    missing()
            note_union(1, 20, 3)
            assert {3, 1} == view.keys()
            assert ([20, 1] if view is UNION_PROF else {3: [20]}) == view[1]
            other = views[view is UNION_PROF]
            assert {1, 2, 3} == other.keys()
            dropped = flow.home.lost["error"]
            view[7] = [1, 1]
            view.update({8: [1, 1]})
            view |= {9: [1, 1]}
            assert [0, 0] == view.setdefault(7, [0, 0])
            assert ({3, 1}, 4) == (view.keys(), flow.home.lost["error"] - dropped)
            assert {3, 1} == {view.popitem()[0], view.popitem()[0]}
            with pytest.raises(KeyError):
                view.popitem()
            note_union(3, 5, 3)
            view.clear()
            assert ({}, False, {1, 2, 3}) == (view, bool(view), other.keys())
            note_union(3, 6, 3)
            assert ([6, 1] if view is UNION_PROF else {3: [6]}) == view[3]
    finally:
        if running:
            captured.__exit__(None, None, None)
    assert 1 == len([line for line in caplog.messages if "profiling." in line])


def test_samples_as_json():
    """With `default=list` they are written as lists."""
    for size in (12, 10, 10):
        note_union(1, size, 3)
    assert {"1": {"3": [10, 10, 12]}} == json.loads(json.dumps(UNION_SAMPLES, default=list))


def test_more_lengths_and_layers_than_the_metrics_keep_apart():
    """The dicts stay exact where metrics and snapshot share cells."""
    reference = Reference()
    with capture() as captured:
        for number in range(400):
            for found in (profiling, reference):
                found.note_union(20 + number, number % 7, number)
        assert reference.UNION_PROF == UNION_PROF
        assert all(reference.UNION_SAMPLES[seq] == layers for seq, layers in UNION_SAMPLES.items())
        assert 400 == captured.total("moe.layer.calls")
        assert 0 < captured.value("moe.layer.calls", phase="prefill", layer="other", residency="unknown")


def test_unions_that_cannot_be_exported_are_in_the_dicts():
    """A sequence length of 0 and a negative size are counted as the seed counts them, and dropped from the metrics."""
    with capture() as captured:
        note_union(0, 5, 1)
        note_union(1, -3, 1)
        assert 0 == captured.total("moe.layer.calls")
        assert 2 == captured.value("moe.telemetry.dropped", reason="out_of_range")
    assert {0: [5, 1], 1: [-3, 1]} == UNION_PROF


# -- misses ---------------------------------------------------------------------------------------------------------


class Pool:
    """Knows `in` and nothing else."""

    def __init__(self, ids: set[int]) -> None:
        self._ids = ids

    def __contains__(self, item: object) -> bool:
        return item in self._ids


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(
    "convert",
    [
        set,
        frozenset,
        list,
        tuple,
        lambda ids: {np.int32(one) for one in ids},
        lambda ids: np.array(sorted(ids)),
        lambda ids: dict.fromkeys(ids).keys(),
        OrderedDict.fromkeys,
        lambda ids: (one for one in sorted(ids)),
    ],
)
def test_ids_come_in_any_container(running, convert):
    """Sets, lists, arrays, dict views and generators of Python or NumPy ints count the same."""
    predicted, resident, ready = {1, 2, 3, 9}, {1, 4}, {2}
    for decode in (True, False):
        reference = Reference()
        reference.note_miss_attrib([1, 2, 3, 4, 5], predicted, resident, decode, ready)
        pristine()
        with capture() as captured:
            if running:
                note_miss_attrib(
                    convert({1, 2, 3, 4, 5}), convert(predicted), convert(resident), decode, convert(ready)
                )
                wanted = {"hit": 2, "miss_timing": 1, "miss_evicted": 1, "miss_unpredicted": 1}
                assert wanted == lookups(captured, "decode" if decode else "prefill")
        if not running:
            note_miss_attrib(convert({1, 2, 3, 4, 5}), convert(predicted), convert(resident), decode, convert(ready))
        assert reference.MISS_ATTRIB == MISS_ATTRIB


def test_resident_is_anything_with_in():
    """An object that only knows `in` is asked for each routed expert."""
    note_miss_attrib({1, 2}, Pool({2}), Pool({1}), True, Pool({2}))
    assert (1, 1) == (MISS_ATTRIB["resident_hit"], MISS_ATTRIB["dec_miss_A_evicted"])


def test_repeated_ids_collapse_in_what_is_exported():
    """The dict counts an id as often as it comes, the metrics once."""
    with capture() as captured:
        note_miss_attrib([1, 1, 2, 2, 2, 3], {2}, {1}, True, {2})
        assert {"hit": 1, "miss_timing": 0, "miss_evicted": 1, "miss_unpredicted": 1} == lookups(captured, "decode")
    assert (6, 2, 3, 1, 3) == tuple(
        MISS_ATTRIB[key]
        for key in ("routed", "resident_hit", "miss_A_predicted", "miss_B_unpredicted", "dec_miss_A_evicted")
    )


def test_what_is_ready_and_was_not_predicted_is_no_hit_of_a_prefetch():
    """Of three resident experts two were predicted, and of these one was ready; so was another that was not."""
    with capture() as captured:
        note_miss_attrib({1, 2, 3, 4}, {1, 2, 4}, {1, 2, 3}, True, ready={1, 3, 4, 9})
        assert 1 == captured.value("moe.prefetch.hits", phase="decode")
        assert 1 == captured.value("moe.expert.lookups", phase="decode", layer="none", outcome="miss_evicted")


def test_iterables_without_an_end_are_refused():
    """A list is read whole however long it is; of a generator no more than 65,536 ids."""
    with capture() as captured:
        note_miss_attrib(list(range(70_000)), None, set(), True)
        note_miss_attrib(itertools.count(), None, set(), True)
        assert 1 == captured.value("moe.telemetry.dropped", reason="too_many")
    assert (70_000, 1) == (MISS_ATTRIB["routed"], MISS_ATTRIB["n"])


def test_recall_comes_from_its_own_dict_only():
    """note_miss_attrib says nothing of recall, and nobody knows of predictions that were not routed."""
    with capture() as captured:
        note_union(1, 3, 5)
        note_miss_attrib({1, 2, 3}, {1, 2}, {1}, True)
        assert 0 == captured.total("moe.predictor.experts")
        PREDICT_RECALL_PROF["hit"] += 2
        PREDICT_RECALL_PROF["routed"] += 3
        PREDICT_RECALL_PROF["n"] += 1
        assert 2 == captured.value("moe.predictor.experts", phase="decode", layer="5", outcome="recalled")
        assert 1 == captured.value("moe.predictor.experts", phase="decode", layer="5", outcome="missed")
        assert 0 == captured.total("moe.predictor.candidates")


def test_the_first_misses_tell_of_a_layer_call_once():
    """Where MISS_ATTRIB was not announced, the union counted before is not counted again as all hit or partial."""
    with capture() as captured:
        for layer in range(3):
            note_union(1, 2, layer)
            note_miss_attrib({1, 2}, None, {1, 2}, True)
    residency = {key: captured.total("moe.layer.calls", residency=key) for key in ("unknown", "all_hit", "partial")}
    assert {"unknown": 1, "all_hit": 2, "partial": 0} == residency


# -- writes in place ------------------------------------------------------------------------------------------------


def write_misses(decode: bool, *, split: bool = True) -> None:
    """One layer's misses as a runtime writes them that has the seed's loop in line: 2 hits, 2 A, 1 B."""
    for outcome in ("resident_hit", "resident_hit", "miss_A_predicted", "miss_B_unpredicted", "miss_A_predicted"):
        MISS_ATTRIB["routed"] += 1
        MISS_ATTRIB[outcome] += 1
        if decode:
            short = {"miss_A_predicted": "miss_A", "miss_B_unpredicted": "miss_B"}.get(outcome, outcome)
            MISS_ATTRIB["dec_routed"] += 1
            MISS_ATTRIB[f"dec_{short}"] += 1
    if decode and split:
        MISS_ATTRIB["dec_miss_A_evicted"] += 1
        MISS_ATTRIB["dec_miss_A_timing"] += 1
    MISS_ATTRIB["n"] += 1
    if decode:
        MISS_ATTRIB["dec_n"] += 1


def test_misses_written_in_place():
    """Decode comes from the dec_ entries, prefill is the total less decode, with an unsplit A taken for late."""
    with capture() as captured:
        for layer in range(3):
            note_union(1, 5, layer)
            write_misses(decode=True)
        note_union(64, 5, 2)
        write_misses(decode=False)
        note_union(64, 5, 3)
        for layer in ("0", "1", "2"):
            assert {"hit": 2, "miss_timing": 1, "miss_evicted": 1, "miss_unpredicted": 1} == lookups(
                captured, "decode", layer
            )
        assert {"hit": 2, "miss_timing": 2, "miss_evicted": 0, "miss_unpredicted": 1} == lookups(
            captured, "prefill", "2"
        )
        assert 0 == captured.total("moe.expert.lookups", phase="prefill", layer="0")
        assert 5 == captured.total("moe.layer.calls", residency="unknown") == captured.total("moe.layer.calls")


def test_a_decode_miss_without_its_split_is_late():
    """A decode miss A that is not split by the end of its layer counts as miss_timing."""
    with capture() as captured:
        write_misses(decode=True, split=False)
    assert {"hit": 2, "miss_timing": 2, "miss_evicted": 0, "miss_unpredicted": 1} == lookups(captured, "decode")


def test_balances_that_are_negative_in_between():
    """Parts that are written in another order are made up for: counters never fall, and end exactly equal."""
    with capture() as captured:
        MISS_ATTRIB["dec_resident_hit"] += 2  # decode before the total, with an event in between
        PREDICT_RECALL_PROF["hit"] += 2  # recalled before routed
        MISS_ATTRIB["miss_B_unpredicted"] += 1
        note_union(1, 3, 0)
        assert {"hit": 2, "miss_timing": 0, "miss_evicted": 0, "miss_unpredicted": 0} == lookups(captured, "decode")
        assert {"hit": 0, "miss_timing": 0, "miss_evicted": 0, "miss_unpredicted": 1} == lookups(captured, "prefill")
        assert (2, 0) == recall(captured)
        MISS_ATTRIB["resident_hit"] += 3
        PREDICT_RECALL_PROF["routed"] += 3
        MISS_ATTRIB["n"] += 1
        PREDICT_RECALL_PROF["n"] += 1
        MISS_ATTRIB["routed"] += 1  # the next layer's first
        assert 1 == captured.value("moe.expert.lookups", phase="prefill", layer="0", outcome="hit")
        assert (2, 1) == recall(captured)
    assert 4 == captured.total("moe.expert.lookups")


def recall(captured: Capture) -> tuple[float, float]:
    recalled, missed = (captured.total("moe.predictor.experts", outcome=one) for one in ("recalled", "missed"))
    return recalled, missed


MERGED = {
    **{"routed": 100, "resident_hit": 80, "miss_A_predicted": 15, "miss_B_unpredicted": 5, "n": 10},
    **{"dec_routed": 100, "dec_resident_hit": 80, "dec_miss_A": 15, "dec_miss_B": 5, "dec_n": 10},
    **{"dec_miss_A_timing": 9, "dec_miss_A_evicted": 6},
}
"""What a runtime counted by itself, decode only."""


@pytest.mark.parametrize("order", [list, sorted, lambda keys: ["n", "dec_n", *(key for key in keys if key[-1] != "n")]])
@pytest.mark.parametrize("way", ["in turn", "update", "behind a union"])
def test_counts_merged_in_any_order_count_once(order, way):
    """Totals and dec_ entries that are added entry by entry are decode only, though n comes before dec_ entries."""
    with capture() as captured:
        for _ in range(3):
            if way == "behind a union":
                note_union(1, 10, 3)
            rises = {key: MERGED[key] for key in order(list(MERGED))}
            if way == "update":
                MISS_ATTRIB.update({key: MISS_ATTRIB[key] + rise for key, rise in rises.items()})
            else:
                for key, rise in rises.items():
                    MISS_ATTRIB[key] += rise
            shown = captured.total("moe.expert.lookups", phase="decode")
        if order is list:
            assert 200 == shown  # not only when telemetry stops
    wanted = {"hit": 240, "miss_timing": 27, "miss_evicted": 18, "miss_unpredicted": 15}
    assert wanted == lookups(captured, "decode", "3" if way == "behind a union" else "none")
    assert 0 == captured.total("moe.expert.lookups", phase="prefill")


def test_an_entry_that_is_gone_drops_alone():
    """A missing entry raises where it is read itself; start and stop switch whole, and the others count on."""
    missing = [(MISS_ATTRIB, "dec_n"), (PREFETCH_TPROF, "predict_n"), (PREFETCH_TPROF, "take_s"), (PROF, "fetch")]
    with capture() as captured:
        for _ in range(2):
            note_miss_attrib({1, 2}, None, {1}, True)
            note_tprof("predict_s", 0.5, count_key="predict_n")
            note_tprof("take_s", 0.5)
            profiling._tick("fetch", 0.0)
            for found, key in missing:
                found.pop(key, None)
        assert (4, 2, 2, 1.0) == (
            *(MISS_ATTRIB[key] for key in ("routed", "dec_resident_hit", "n")),
            PREFETCH_TPROF["predict_s"],
        )
        for found, key in missing:
            with pytest.raises(KeyError):
                found[key]
        note_miss_attrib({1, 2}, None, {1}, True)
        MISS_ATTRIB["miss_B_unpredicted"] = "some"  # type: ignore[assignment]
    assert all(type(getattr(profiling, name)) is Plain for name in DICTS)
    assert 6 == captured.total("moe.expert.lookups")
    with capture():
        assert all(type(getattr(profiling, name)) is not Plain for name in DICTS)


@pytest.mark.parametrize("value", [2, 0.5])
def test_a_key_of_the_runtimes_own_is_not_another_dicts(value):
    """Entries that a runtime adds are in its dict, and in no metric."""
    own = [(PROF, "predict_s"), (WINDOW_PROF, "fetch"), (PROF, "sum_s"), (PREFETCH_TPROF, "n_calls"), (PROF, "take_s")]
    with capture() as captured:
        nothing = captured.series()
        for found, key in own:
            found[key] = value
            found[key] += value
            assert 2 * value == found[key]
    assert nothing == captured.series()


def test_numbers_beyond_floats_are_dropped():
    """A write in place raises what a dict raises, whatever it writes, and when it is exported."""
    with capture() as captured:
        for value in (0, 10**400, 0.0, 10**400, float("inf"), 0.0, 0.5):
            for found, key in ((WINDOW_PROF, "sum_s"), (PROF, "fetch"), (PROF, "n_calls"), (PREFETCH_TPROF, "take_s")):
                found[key] = value
        for _ in range(2 * Series.LIMIT):
            WINDOW_PROF["sum_s"] = 0
            WINDOW_PROF["sum_s"] = 10**400
        assert 10**400 == WINDOW_PROF["sum_s"]
    assert 0.5 == captured.value("moe.block.duration", phase="decode", segment="fetch").sum
    assert 0 < captured.value("moe.telemetry.dropped", reason="out_of_range")


@pytest.mark.parametrize("one", [True, np.int64(1), 1.0])
def test_a_length_that_equals_an_int_is_that_int(one):
    """True and NumPy's numbers are stored as ints, whether note_union finds their cells by itself or not."""
    with capture() as captured:
        for _ in range(2):
            note_union(one, one, one)
            note_union(1, 1, 1)
            note_union(one, one, one)
        MISS_ATTRIB["resident_hit"] += 2  # prefill: the row of another phase, from what the last union left
        MISS_ATTRIB["n"] += 1
        note_union(one, one, one)
        note_miss_attrib({1}, None, {1}, False)
        note_union(one, one, one)
        for row in captured.store.guest_rows:
            assert (int, "1") == (type(row.tokens), row.seq)
        rows = snapshot.build(captured.store, read(captured.store))["unions"]
        assert 2 == captured.value("moe.expert.lookups", phase="prefill", layer="1", outcome="hit") - 1
    assert {"1"} == {seq for phase in rows.values() for seq in phase}
    assert 0 == captured.total("moe.telemetry.dropped")
    assert {1: [8, 8]} == UNION_PROF
    assert all(type(seq) is int and all(type(layer) is int for layer in by) for seq, by in UNION_SAMPLES.items())


def test_resets_and_lowered_values_lower_nothing():
    """Only rises count: after every reset and every lowered value the metrics go on from where they were."""
    with capture() as captured:
        for _ in range(2):
            write_misses(decode=False)
            PROF["fetch"] += 0.5
            PROF["n_calls"] += 1
            WINDOW_PROF["sum_s"] += 0.25
            WINDOW_PROF["n"] += 1
            note_tprof("take_s", 0.125)
            PREFETCH_TPROF["place_experts"] += 3
            note_union(1, 10, 3)
            profiling.prof_reset()
            profiling.tprof_reset()
            profiling.union_reset()
            WINDOW_PROF.update(sum_s=0.0, n=0)
            for key in MISS_ATTRIB:
                MISS_ATTRIB[key] = 0
            PROF["fetch"] -= 1.0
            PROF["fetch"] = 0.0
    assert 0 == captured.total("moe.telemetry.dropped")
    assert 10 == captured.total("moe.expert.lookups")
    assert 2 == captured.value("moe.block.calls", phase="decode")
    assert 6 == captured.value("moe.prefetch.placed", phase="decode")
    assert 2 == captured.total("moe.layer.calls")
    for name, labels, seconds in (
        ("moe.block.duration", {"segment": "fetch"}, 1.0 + 2.0),  # the rise from -1.0 to 0.0 is one, too
        ("moe.prefetch.window", {}, 0.5),
        ("moe.promote.duration", {"step": "take"}, 0.25),
    ):
        assert seconds == captured.value(name, phase="decode", **labels).sum


def test_seconds_fall_into_the_buckets_of_their_size():
    """Whether ticked, noted or written, each duration is one observation in the bucket that a histogram has for it."""
    rng = random.Random(3)
    seconds = [*(rng.lognormvariate(-9, 3) for _ in range(500)), 0.0, 1e-6, 2e-6, HOST_BOUNDS[-1], 100.0]
    with capture() as captured, capture(recorder=(other := hooks.Recorder())) as wanted:
        for one in seconds:
            other.promote("take", one)
            other.block("fetch", one)
            note_tprof("take_s", one)
            PROF["fetch"] = 0.0
            PROF["fetch"] += one
    for name, labels in (("moe.promote.duration", {"step": "take"}), ("moe.block.duration", {"segment": "fetch"})):
        ours, theirs = (found.value(name, phase="decode", **labels) for found in (captured, wanted))
        # A value that does not rise, 0.0, is no write that could be seen.
        counts = list(theirs.counts)
        if name == "moe.block.duration":
            counts[0] -= 1
        assert tuple(counts) == ours.counts
        assert theirs.sum == pytest.approx(ours.sum)


def test_what_waits_is_bounded():
    """Seconds that no union ever decides do not pile up."""
    with capture() as captured:
        for _ in range(10 * Series.LIMIT):
            note_tprof("predict_s", 1e-4, count_key="predict_n")
            PROF["fetch"] += 1e-4
            assert len(by_key["predict_s"]) <= Series.LIMIT + 1
            assert len(by_key["fetch"]) <= Series.LIMIT + 1
        assert 9 * Series.LIMIT <= captured.value("moe.prefetch.duration", phase="decode", stage="predict").count
    assert 10 * Series.LIMIT == captured.value("moe.prefetch.duration", phase="decode", stage="predict").count


# -- what is refused --------------------------------------------------------------------------------------------------


def explode() -> Iterator[int]:
    yield 1
    raise RuntimeError("no more ids")


WRONG: list[Any] = [
    lambda: note_tprof("nothing", 1.0),
    lambda: note_tprof([], 1.0),  # type: ignore[arg-type]
    lambda: note_tprof("take_s", "1"),  # type: ignore[arg-type]
    lambda: note_tprof("take_s", None),  # type: ignore[arg-type]
    lambda: note_tprof("take_s", 1.0, count_key="nothing"),
    lambda: profiling._tick("nothing", 0.0),
    lambda: profiling._tick([], 0.0),  # type: ignore[arg-type]
    lambda: profiling._tick("fetch", "0"),  # type: ignore[arg-type]
    lambda: note_union("one", 1),  # type: ignore[arg-type]
    lambda: note_union(1, None, 3),  # type: ignore[arg-type]
    lambda: note_union(1, 1, []),  # type: ignore[arg-type]
    lambda: note_miss_attrib(None, None, set(), True),
    lambda: note_miss_attrib([[1]], None, set(), True),
    lambda: note_miss_attrib({1}, None, None, True),
    lambda: note_miss_attrib(explode(), None, set(), True),
    lambda: note_miss_attrib({1}, 7, set(), True),
    lambda: profiling.set_phase("training"),
    lambda: profiling.set_phase([]),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("wrong", range(len(WRONG)))
@pytest.mark.parametrize("running", [False, True])
def test_nothing_is_raised(wrong, running):
    """What a function cannot take is dropped and counted; the metrics are as before, the runtime goes on."""
    with capture() as captured:
        if running:
            note_tprof("take_s", 1e-3)
            assert None is WRONG[wrong]()
            float(PREFETCH_TPROF["take_s"] + PROF["fetch"])
            assert 1 <= captured.total("moe.telemetry.dropped")
            assert 0 == captured.total("moe.layer.calls") == captured.total("moe.expert.lookups")
    if not running:
        assert None is WRONG[wrong]()
    assert 0 == MISS_ATTRIB["n"]
    assert {} == UNION_PROF


@pytest.mark.parametrize("running", [False, True])
def test_one_line_a_minute(running, caplog):
    """However much is dropped, the log has one line of it."""
    flow.home.logged_at = -1e9
    with caplog.at_level(logging.WARNING, "moe_telemetry"), capture():
        if running:
            for wrong in WRONG:
                wrong()
    if not running:
        flow.home.logged_at = -1e9
        caplog.clear()
        for wrong in WRONG:
            wrong()
    assert 1 == len([line for line in caplog.messages if "profiling." in line])


@pytest.fixture
def lazy() -> Iterator[Any]:
    """A maker of arrays that fails the test when one of them is read."""
    pytest.importorskip("mlx.core")
    import lazies

    watch = lazies.no_evaluation()
    next(watch)
    yield lazies.unevaluated
    assert [] == list(watch)


def test_lazy_arrays_are_refused_unread(lazy):
    """An array whose reading would evaluate it reaches neither a cell nor an evaluation."""
    with capture() as captured:
        for call in (
            lambda array: note_tprof("take_s", array),
            lambda array: note_union(array, 1),
            lambda array: note_union(1, array),
            lambda array: note_union(1, 1, array),
            lambda array: note_miss_attrib(array, None, set(), True),
            lambda array: note_miss_attrib([array], None, set(), True),
            lambda array: note_miss_attrib({1}, array, set(), True),
            lambda array: note_miss_attrib({1}, None, array, True),
            lambda array: note_miss_attrib({1}, None, set(), array),
            lambda array: note_miss_attrib({1}, None, set(), True, array),
        ):
            call(lazy())
            assert 0.0 == PREFETCH_TPROF["take_s"]
        assert 10 == captured.value("moe.telemetry.dropped", reason="lazy_array")
    assert 0 == MISS_ATTRIB["n"]


@pytest.mark.parametrize("variant", [lambda function: function, profiling._locked])
def test_threads_lose_nothing(variant):
    """Eight threads that note unions and seconds at once are counted exactly, with the hooks' lock and without."""
    note_union, note_tprof, tick = (variant(getattr(profiling, name)) for name in ("note_union", "note_tprof", "_tick"))
    with capture() as captured:

        def work() -> None:
            for number in range(2000):
                note_union(1, number % 5, number % 3)
                note_tprof("take_s", 0.5)
                tick("fetch", 0.0)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 8000.0 == PREFETCH_TPROF["take_s"]
        assert 16_000 == UNION_PROF[1][1]
    assert 16_000 == captured.total("moe.layer.calls")
    assert 16_000 == captured.value("moe.promote.duration", phase="decode", step="take").count


def test_a_thread_that_comes_in_while_another_adds_loses_nothing(monkeypatch):
    """Seconds that are noted and read in the middle of another read are in the dict behind both."""
    adding = profiling_times.add_up

    def interrupted(numbers, start):
        monkeypatch.undo()
        note_tprof("take_s", 0.25)
        assert 0.0 == PREFETCH_TPROF["take_s"]
        return adding(numbers, start)

    with capture() as captured:
        note_tprof("take_s", 0.5)
        monkeypatch.setattr(profiling_times, "add_up", interrupted)
        assert 0.5 == PREFETCH_TPROF["take_s"]
        assert 0.75 == PREFETCH_TPROF["take_s"]
    assert 0.75 == captured.value("moe.promote.duration", phase="decode", step="take").sum


def test_two_threads_with_the_first_union_of_a_length_count_in_one_row(monkeypatch):
    """The one that comes second finds the row of the first, so that the dict has the unions of both."""
    making = profiling_unions.SeqCells

    def interrupted(*given):
        made = making(*given)
        monkeypatch.undo()
        note_union(5, 7, 0)
        return made

    with capture() as captured:
        monkeypatch.setattr(profiling_unions, "SeqCells", interrupted)
        note_union(5, 9, 0)
        assert [16, 2] == UNION_PROF[5]
        assert 2 == captured.total("moe.layer.calls")


@pytest.mark.parametrize("timing", ["fetch", "predict", "write"])
def test_unions_stay_cheap_while_seconds_are_timed(timing, monkeypatch):
    """A timing, before its layer's decision or behind it, leaves the unions within a pass to note_union itself."""
    with capture() as captured:
        calls = {
            "fetch": lambda: profiling._tick("fetch", profiling_ticks.perf_counter()),
            "predict": lambda: note_tprof("predict_s", 1e-4, count_key="predict_n"),
            "write": lambda: PROF.__setitem__("fetch", PROF["fetch"] + 0.5),
        }
        slow: list[str] = []
        for number in range(10 * 48):
            if number == 3 * 48:
                for name in ("note", "_decide"):
                    monkeypatch.setattr(flow, name, lambda *_, name=name: slow.append(name))
            calls[timing]()
            note_union(1, 10, number % 48)
        assert [] == slow
        monkeypatch.undo()
        assert 480 == captured.total("moe.layer.calls")
        found = captured.value("moe.prefetch.duration", phase="decode", stage="predict")
        if timing != "predict":
            found = captured.value("moe.block.duration", phase="decode", segment="fetch")
        assert found.count >= 480 - 192 - 1  # what a scrape may lack
