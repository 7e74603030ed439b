"""The hooks that are made from one text: each bucket is found, by few comparisons, and nothing out of range is."""

from __future__ import annotations

import ast
import math
from bisect import bisect_left

import pytest

from moe_telemetry import recorder as rec
from moe_telemetry.catalog import HOST_BOUNDS
from moe_telemetry.duration_hooks import USUAL, source
from moe_telemetry.testing import capture
from moe_telemetry.values import MAX_SECONDS

HOOKS = {
    "prefetch": ("stage", "submit", "moe.prefetch.duration"),
    "promote": ("step", "route", "moe.promote.duration"),
    "block": ("segment", "fetch", "moe.block.duration"),
    "window": (None, None, "moe.prefetch.window"),
}


@pytest.fixture
def cap():
    with capture() as found:
        yield found


def record(hook: str, seconds: float) -> None:
    """Call a hook with its label, if it has one."""
    label = HOOKS[hook][1]
    getattr(rec, hook)(*(() if label is None else (label,)), seconds)


def recorded(cap, hook: str):
    """The distribution of what `record` has recorded."""
    key, label, metric = HOOKS[hook]
    return cap.value(metric, phase="decode", **({} if key is None else {key: label}))


@pytest.mark.parametrize("hook", HOOKS)
def test_every_bucket_is_found(cap, hook):
    """Every bound, its neighbours, and the ends of the range fall where bisect puts them; the sum is theirs."""
    beside = [math.nextafter(bound, end) for bound in HOST_BOUNDS for end in (0.0, math.inf)]
    given = [0.0, 5e-324, *HOST_BOUNDS, *beside, 60.0, MAX_SECONDS]
    expected = [0] * (len(HOST_BOUNDS) + 1)
    total = 0.0
    for seconds in given:
        record(hook, seconds)
        expected[bisect_left(HOST_BOUNDS, seconds)] += 1
        total += seconds
    found = recorded(cap, hook)
    assert (tuple(expected), total) == (found.counts, found.sum)


@pytest.mark.parametrize("hook", HOOKS)
def test_what_is_out_of_range_is_found_too(cap, hook):
    """Just below 0, just above the largest, and what is no number: each is dropped with its reason."""
    for seconds in (-5e-324, math.nextafter(MAX_SECONDS, math.inf), math.nan, math.inf, -math.inf):
        record(hook, seconds)
    found = recorded(cap, hook)
    assert (0, 0.0) == (found.count, found.sum)
    assert {"negative": 1, "out_of_range": 1, "not_finite": 3} == {
        reason: count for reason, count in cap.store.lost.items() if count
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_batches_and_single_durations_add_up(cap, hook):
    """What the drop-in adds many at a time is read together with what the hook has counted."""
    phase = cap.store.phases["decode"]
    cell = phase.window if hook == "window" else getattr(phase, hook)[HOOKS[hook][1]]
    record(hook, 3e-6)
    cell.counts[2] += 5
    assert 6 == recorded(cap, hook).counts[2]


def comparisons(tree: ast.AST, depth: int = 0) -> dict[str, int]:
    """How many comparisons with bounds lead to each slot that is incremented."""
    found: dict[str, int] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("seconds <= "):
            found |= comparisons(node, depth + 1)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
            assert node.target.attr not in found
            found[node.target.attr] = depth
        else:
            found |= comparisons(node, depth)
    return found


def test_usual_durations_take_few_comparisons():
    """Four where most durations are, eight at most; the search has each bucket once, and then the sum."""
    found = comparisons(ast.parse(source("window")))
    assert 0 == found.pop("sum")
    assert {f"b{bucket}" for bucket in range(len(HOST_BOUNDS) + 1)} == set(found)
    low, high = (bisect_left(HOST_BOUNDS, seconds) for seconds in USUAL)
    assert 4 >= max(found[f"b{bucket}"] for bucket in range(low + 1, high + 1))
    assert 8 >= max(found.values())


@pytest.mark.parametrize("hook", HOOKS)
def test_the_right_side_of_an_increment_holds_no_call(hook):
    """There, an interpreter with a lock may switch threads between loading a field and storing it again."""
    tree = ast.parse(source(hook, HOOKS[hook][0]))
    increments = [node for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    assert len(HOST_BOUNDS) + 2 == len(increments)
    assert [] == [node for each in increments for node in ast.walk(each.value) if isinstance(node, ast.Call)]
