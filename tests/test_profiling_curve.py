"""The pool curve from the drop-in's calls: the union before the misses names their layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from profiling_state import pristine
from seed_block import Runtime

import moe_telemetry as mt
from moe_telemetry import profiling_ticks, snapshot
from moe_telemetry.profiling import note_miss_attrib, note_union
from moe_telemetry.profiling_state import flow
from moe_telemetry.reuse import LARGE
from moe_telemetry.series import read
from moe_telemetry.testing import Capture, capture

FORWARDS = [(2, "prefill"), (1, "decode"), (3, "decode"), (1, "decode"), (2, "prefill"), (3, "decode")] * 5


@pytest.fixture(autouse=True)
def _pristine() -> Iterator[None]:
    pristine()
    yield
    pristine()


def curve(captured: Capture) -> dict[str, Any]:
    """What a snapshot has of it."""
    found: dict[str, Any] = snapshot.build(captured.store, read(captured.store))["pool_curve"]
    return found


def of_routed(calls: list[tuple[int, str, set[int]]], mode: str) -> dict[str, Any]:
    """The curve of the same calls by `recorder.routed`."""
    recorder = mt.Recorder()
    with capture(recorder=recorder, pool_curve=mode) as captured:
        for layer, phase, experts in calls:
            recorder.forward(1, phase)
            recorder.routed(layer, experts)
        return curve(captured)


@pytest.mark.parametrize("mode", ["all", "sample"])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("order", ["union first", "promote first", "misses last"])
def test_it_is_that_of_routed(mode: str, waits: bool, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids by layer and phase give the same distances, in all layers and in one of four, whether MISS_ATTRIB
    was set or not, and with the recorder's passes in between."""
    runtime = Runtime(order, layers=6)
    monkeypatch.setattr(flow, "_waits_at_first", waits)
    monkeypatch.setattr(profiling_ticks, "perf_counter", lambda: runtime.now)
    with capture(pool_curve=mode) as captured:
        for number, (tokens, phase) in enumerate(FORWARDS):
            if number > 20:
                mt.recorder.forward(tokens, phase)
            runtime.forward(tokens, phase)
        found = curve(captured)
    assert of_routed(runtime.routed, mode) == found
    assert (6 if mode == "all" else 2) == len(found["layers"])


def test_misses_without_a_union_of_their_own_are_left_out() -> None:
    """Whose layer they are is not known: those of another layer would give a curve that is no layer's."""
    with capture(pool_curve="all") as captured:
        for number in range(3):
            note_union(1, 2, 0)
            note_miss_attrib({1, 2}, None, {1}, True)
            note_miss_attrib({number + 5}, None, set(), True)
        assert {"lookups": 6, "distances": [2, 2]} == curve(captured)["overall"]["decode"]
        assert 9 == captured.total("moe.expert.lookups")


@pytest.mark.parametrize("flags", ["miss", "union", "tick"])
def test_where_no_layer_or_no_ids_are_noted_there_is_none(flags: str) -> None:
    """Misses alone have no layer, unions alone no ids: nothing is simulated, and no series says 0."""
    runtime = Runtime("union first", flags=flags)
    with capture(pool_curve="all") as captured:
        runtime.forward(1, "decode")
        assert {} == curve(captured)["overall"]
        if flags != "miss":
            assert 0 == sum(name.startswith("moe.pool.simulated") for name, _ in captured.series())


def test_ids_come_in_any_container_and_size() -> None:
    """Lists with repeats count once each, large unions too; what is no number leaves its layer out, and only that."""
    with capture(pool_curve="all") as captured:
        for ids in ([1, 2, 2], (2, 1), range(LARGE + 1), set(range(LARGE + 1)), {1, 2}):
            note_union(1, 2, 0)
            note_miss_attrib(ids, None, set(), True)
            note_union(1, 1, 1)
            note_miss_attrib(["a"], None, set(), True)
        found = curve(captured)
        assert 2 * (LARGE + 1) == captured.store.curves.put, "large ones are bounded by their size"
    assert 2 + 2 + 2 * (LARGE + 1) + 2 == found["overall"]["decode"]["lookups"]
    assert {"1": 5} == found["left_out"]


def test_the_report_compares_it_with_the_lookups() -> None:
    """Two of three were resident; a pool of eight would have hit all but the first: policy and prefetch earn less."""
    with capture(pool_curve="all") as captured:
        mt.recorder.pool(0, capacity=8)
        for _ in range(20):
            note_union(1, 3, 0)
            note_miss_attrib({1, 2, 3}, None, {1, 2}, True)
        size = mt.report(snapshot.build(captured.store, read(captured.store)))["pool_size"]
    decode = size["phases"]["decode"]
    assert (2 / 3, 0.95) == (pytest.approx(decode["actual"]), pytest.approx(decode["simulated"]))
    assert pytest.approx(2 / 3 - 0.95) == decode["gain"]


def test_nothing_waits_while_no_telemetry_runs() -> None:
    """Nobody would collect it."""
    for layer in range(8):
        note_union(1, 2, layer)
        note_miss_attrib({1, 2}, None, {1}, True)
    assert 0 == len(flow.home.curves.waiting)
