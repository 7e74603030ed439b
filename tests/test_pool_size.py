"""What a report says of a pool's size, from the curve of a snapshot."""

from __future__ import annotations

import pytest

import moe_telemetry as mt
from moe_telemetry import recorder as rec
from moe_telemetry import snapshot
from moe_telemetry.reports import lines
from moe_telemetry.series import read
from moe_telemetry.testing import capture


def taken(cap):
    """A snapshot."""
    return snapshot.build(cap.store, read(cap.store))


def cycle(layers, experts, passes=50):
    """Passes that need two experts at a time, in turn: a pool of all hits each time behind the first round, a smaller
    one never."""
    for number in range(passes):
        rec.forward(1)
        for layer in range(layers):
            first = 2 * number % experts
            rec.routed(layer, {first, first + 1}, resident={first})


def test_curve_gain_knee_steps_and_the_smallest_safe_size():
    """Of 20 experts in turn: 16 slots hit nothing, 24 all but the first ten passes'; half was actually resident."""
    with capture(pool_curve="all") as cap:
        for layer in range(3):
            rec.pool(layer, capacity=16)
        cycle(layers=3, experts=20)
        rec.read("demand", 3_000, 0.1)
        rec.read("prefetch", 1_000, 0.1)
        rec.forward(20)
        rec.routed(0, set(range(18)), resident=set())
        found = mt.report(taken(cap))["pool_size"]
    decode = found["phases"]["decode"]
    assert {"8": 0.0, "16": 0.0, "24": 0.8} == decode["hit_rates"]
    assert (300, {}, 20) == (decode["lookups"], decode["errors"], decode["knee"])
    assert (0.5, 0.0, 0.5) == (decode["actual"], decode["simulated"], decode["gain"])
    assert (3, 3, 16, 2000, 18) == tuple(
        found[key] for key in ("followed", "layers", "capacity", "expert_bytes", "safe")
    )
    assert {"slots": [16, 24], "hit_rates": [0.0, 0.8], "bytes": 8 * 3 * 2000} == found["steps"][1]


def test_it_is_told_in_text_and_as_markdown():
    """The curve at the catalog's sizes, what the pool itself hit, and what more slots would add."""
    with capture(pool_curve="all") as cap:
        rec.pool(0, capacity=16)
        cycle(layers=1, experts=20)
        rec.read("demand", 1 << 20, 0.1)
        found = mt.report(taken(cap))
    text = "\n".join(lines(found))
    assert "pool size, decode: what an LRU pool without prefetch would have hit\n" in text
    assert "  slots           8      16      24\n  hit rate    0.0 %   0.0 %  80.0 %\n" in text
    assert "actual   50.0 % with 16 slots, an LRU pool of them 0.0 %: policy and prefetch earn +50.0 points" in text
    assert "knee     20 slots" in text
    assert "  16 -> 24 slots: decode hit rate 0.00 -> 0.80, about 8.0 MiB more" in text
    assert "safe     2 slots at least" in text
    from moe_telemetry import markdown

    shown = "\n".join(markdown.report_lines(found))
    assert "| decode | 0.0 % | 0.0 % | 80.0 % |" in shown
    assert "- 16 -> 24 slots: decode hit rate 0.00 -> 0.80, about 8.0 MiB more" in shown


def test_a_sample_of_layers_has_its_standard_error():
    """Two of eight, at 0.8 and 0: 0.566 over the root of two is 0.4, times that of the three quarters left out."""
    with capture() as cap:
        for number in range(50):
            for layer in range(8):
                first = 2 * number % (20 if layer == 1 else 100)
                rec.routed(layer, {first, first + 1})
        found = mt.report(taken(cap))["pool_size"]
    decode = found["phases"]["decode"]
    assert (2, 8) == (found["followed"], found["layers"])
    assert pytest.approx(0.4 * 0.75**0.5) == decode["errors"]["24"]
    assert 0.4 == decode["hit_rates"]["24"]
    assert (None, None, None) == (decode["actual"], decode["simulated"], decode["gain"])
    assert [None] * 2 == [step["bytes"] for step in found["steps"][:2]]


@pytest.mark.parametrize("mode", ["off", "all"])
def test_nothing_is_told_where_nothing_was_simulated(mode):
    """Switched off, or without routing, or in a snapshot of an earlier version."""
    with capture(pool_curve=mode) as cap:
        rec.union(0, 3)
        known = taken(cap)
    assert mt.report(known)["pool_size"] is None
    del known["pool_curve"]
    found = mt.report(known)
    assert found["pool_size"] is None
    assert "pool size" not in "\n".join(lines(found))


def test_without_the_label_of_layers_the_gain_is_of_all():
    """The smallest pool stands for each."""
    with capture(pool_curve="all") as cap:
        rec.pool(0, capacity=24)
        rec.pool(1, capacity=24)
        cycle(layers=2, experts=20)
        decode = mt.report(snapshot.build(cap.store, read(cap.store, layers=False)))["pool_size"]["phases"]["decode"]
    assert (0.5, 0.8) == (decode["actual"], decode["simulated"])
