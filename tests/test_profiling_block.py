"""The drop-in under a replica of the seed runtime's block: dicts, labels, and a scrape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import samples, scrape, snapshot_samples
from profiling_state import DICTS, pristine
from seed_block import Runtime, recorded

import moe_telemetry as mt
from moe_telemetry import profiling, profiling_ticks, snapshot
from moe_telemetry.profiling_dicts import Plain
from moe_telemetry.profiling_state import flow
from moe_telemetry.profiling_times import Series
from moe_telemetry.series import read
from moe_telemetry.testing import capture

PASSES = {"prefill": 2, "decode": 1, "verify": 3}
FORWARDS = ["prefill", "prefill", "decode", "verify", "decode", "prefill", "verify", "prefill", "decode"]
NO_MISSES = "tick tprof union recall"


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runtime]]:
    """A runtime on a drop-in as after its import, with MISS_ATTRIB=1 where it notes misses."""

    def make(order: str, **options: Any) -> Runtime:
        pristine()
        runtime = Runtime(order, **options)
        monkeypatch.setattr(flow, "_waits_at_first", "miss" in runtime.flags)
        monkeypatch.setattr(profiling_ticks, "perf_counter", lambda: runtime.now)
        return runtime

    yield make
    pristine()


def dicts_of(source: Any) -> dict[str, Any]:
    return {name: dict(getattr(source, name)) for name in DICTS}


def phase_of(kind: str) -> str:
    return "prefill" if kind == "prefill" else "decode"


@pytest.mark.parametrize("order", ["union first", "promote first"])
@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize(
    "flags", ["tick tprof union miss recall", "tick tprof union miss", "tprof miss recall", "tick miss"]
)
def test_every_record_has_the_phase_of_its_pass(drive, order, layers, flags):
    """A prefill chunk of 2, a decode of 1 and a verify of 3 are told apart by note_miss_attrib, in whatever order."""
    runtime = drive(order, layers=layers, flags=flags)
    with capture() as captured:
        for kind in FORWARDS:
            runtime.forward(PASSES[kind], phase_of(kind))
    found = recorded(snapshot.build(captured.store, read(captured.store)))
    assert +runtime.expected == found


@pytest.mark.parametrize("order", ["union first", "promote first"])
@pytest.mark.parametrize("layers", [1, 5])
def test_a_union_decides_by_its_length_without_misses(drive, order, layers):
    """Without MISS_ATTRIB a pass of 16 tokens is prefill, and its seconds with it, in whatever order they come."""
    runtime = drive(order, layers=layers, flags=NO_MISSES)
    with capture() as captured:
        for kind in FORWARDS:
            runtime.forward({**PASSES, "prefill": 16}[kind], phase_of(kind))
    assert +runtime.expected == recorded(snapshot.build(captured.store, read(captured.store)))


@pytest.mark.parametrize("flags", [NO_MISSES, "tick tprof", "tick tprof union miss recall"])
def test_a_named_phase_decides_at_once(drive, flags):
    """set_phase() tells a prefill chunk of 2 from decode where nothing else does."""
    runtime = drive("union first", flags=flags.replace(" recall", "") if "union" not in flags else flags)
    with capture() as captured:
        for kind in FORWARDS:
            profiling.set_phase(phase_of(kind))
            runtime.forward(PASSES[kind], phase_of(kind))
        profiling.set_phase(None)
    assert +runtime.expected == recorded(snapshot.build(captured.store, read(captured.store)))


def test_the_recorders_pass_decides(drive):
    """Where the runtime calls recorder.forward, its phase is that of the unions and seconds behind it."""
    runtime = drive("promote first", flags=NO_MISSES)
    with capture() as captured:
        for kind in FORWARDS:
            mt.recorder.forward(PASSES[kind], phase_of(kind))
            runtime.forward(PASSES[kind], phase_of(kind))
    assert +runtime.expected == recorded(snapshot.build(captured.store, read(captured.store)))


def test_a_pass_that_ended_early_keeps_its_phase(drive):
    """A pass cut short in the middle of its layers takes nothing from the next one, nor gives it anything."""
    runtime = drive("promote first", layers=6)
    with capture() as captured:
        for kind, layers in (("decode", 6), ("decode", 6), ("decode", 3), ("prefill", 2), ("verify", 6)):
            runtime.layers = layers
            runtime.forward(PASSES[kind], phase_of(kind))
    assert +runtime.expected == recorded(snapshot.build(captured.store, read(captured.store)))


@pytest.mark.parametrize("layers", [1, 3])
def test_seconds_between_a_union_and_its_misses_wait(drive, layers):
    """While a union waits, pyremap and the others belong to its pass, not to the layer decided before."""
    runtime = drive("misses last", layers=layers)
    with capture() as captured:
        for kind in FORWARDS:
            runtime.forward(PASSES[kind], phase_of(kind))
    assert +runtime.expected == recorded(snapshot.build(captured.store, read(captured.store)))


def test_a_union_that_no_misses_came_for_keeps_the_phase_that_was_named(drive):
    """It is counted when the next one comes, in a pass that may be of the other phase."""
    drive("union first", flags="miss")
    with capture() as captured:
        for phase in ("prefill", "prefill", "decode", "decode"):
            mt.recorder.forward(2, phase)
            profiling.note_union(2, 5, 0)
        assert 3 == captured.total("moe.layer.calls")
        assert 2 == captured.total("moe.layer.calls", phase="prefill", residency="unknown")
        assert 1 == captured.total("moe.layer.calls", phase="decode", residency="unknown")


@pytest.mark.parametrize("layer", [-1, 0, 7])
def test_a_pass_of_one_layer_ends_with_it(drive, layer):
    """Whatever the layer is called, all that was timed before its union is of its phase, twice a segment, too."""
    drive("union first", flags=NO_MISSES)
    with capture() as captured:
        for tokens in (16, 1, 16, 16, 1):
            for _ in range(2):
                profiling.note_tprof("predict_s", 0.5 * tokens, count_key="predict_n")
            profiling.note_union(tokens, 4, layer)
    found = {
        phase: captured.value("moe.prefetch.duration", phase=phase, stage="predict") for phase in ("prefill", "decode")
    }
    assert (6, 48.0) == (found["prefill"].count, found["prefill"].sum)
    assert (4, 2.0) == (found["decode"].count, found["decode"].sum)


def test_the_order_of_calls_is_learned_when_it_can_be(drive):
    """Where the first seconds were too many to wait for a union, a later layer shows what comes behind it."""
    drive("union first", flags=NO_MISSES)
    with capture() as captured:
        for tokens in (1, 16):
            for layer in range(4):
                profiling.note_union(tokens, 1, layer)
        profiling.note_union(1, 1, 0)
        for segment in ("predict", "promote"):
            for _ in range(Series.LIMIT + 1):
                profiling.note_tprof(f"{segment}_s", 0.5, count_key=f"{segment}_n")
        for tokens in (1, 16):
            profiling.note_union(tokens, 1, 0)
            for layer in range(1, 4):
                profiling.note_tprof("predict_s", 0.5, count_key="predict_n")
                profiling.note_union(tokens, 1, layer)
                profiling.note_tprof("promote_s", 0.5, count_key="promote_n")
    for stage in ("predict", "promote"):
        decode, prefill = (
            captured.value("moe.prefetch.duration", phase=phase, stage=stage) for phase in ("decode", "prefill")
        )
        assert (Series.LIMIT + 1 + 3, 3) == (decode.count, prefill.count), stage


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("layers", [(3,), (3, 4)])
def test_seconds_are_put_away_every_192_unions(drive, waits, layers):
    """At the end of that pass and not before, whether unions wait for their misses or not, in whatever layer."""
    drive("union first", flags="miss" if waits else NO_MISSES)
    with capture() as captured:
        counts = []
        for number in range(192):
            counts.append(captured.value("moe.prefetch.duration", phase="decode", stage="predict").count)
            profiling.note_tprof("predict_s", 0.5, count_key="predict_n")
            profiling.note_union(1, 1, layers[number % len(layers)])
            if waits:
                profiling.note_miss_attrib({1}, None, {1}, True)
        assert [0] * 192 == counts
        assert 192 == captured.value("moe.prefetch.duration", phase="decode", stage="predict").count


@pytest.mark.parametrize("order", ["union first", "promote first"])
def test_a_thousand_passes(drive, start, order):
    """The dicts equal the reference's exactly, and the last scrape's counters equal the dicts."""
    runtime = drive(order, layers=6)
    runtime.forward(1, "decode")  # before the start: in the dicts, in no metric
    before = dicts_of(profiling)
    runtime.expected.clear()
    telemetry = start(recorder=mt.recorder, num_layers=6)
    for number in range(1000):
        kind = "prefill" if number % 10 < 3 else "verify" if number % 2 else "decode"
        runtime.forward(PASSES[kind], phase_of(kind))
        if number == 500:
            assert dicts_of(runtime.reference) == dicts_of(profiling)
    stopping = threading.Thread(target=telemetry.stop, args=(20,))
    stopping.start()
    while type(profiling.PROF) is not Plain:  # what waited is put away by then
        pass
    text = scrape(telemetry)
    stopping.join()
    assert dicts_of(runtime.reference) == dicts_of(profiling)
    assert runtime.reference.UNION_PROF == profiling.UNION_PROF
    assert runtime.reference.UNION_SAMPLES.keys() == profiling.UNION_SAMPLES.keys()
    for seq, layers in runtime.reference.UNION_SAMPLES.items():
        assert {layer: sorted(sizes) for layer, sizes in layers.items()} == profiling.UNION_SAMPLES[seq]
    assert +runtime.expected == recorded(telemetry.snapshot())
    _equal_the_dicts(samples(text), before)
    wanted = {key: value for key, value in snapshot_samples(telemetry.snapshot()).items() if key[0].startswith("moe_")}
    scraped = samples(text)
    assert wanted == {key: scraped[key] for key in wanted}


def _equal_the_dicts(scraped: dict[Any, float], before: dict[str, Any]) -> None:
    """Held against the dicts themselves, as they rose since the start."""

    def risen(name: str, key: str) -> float:
        return getattr(profiling, name)[key] - before[name][key]

    def total(name: str, **labels: str) -> float:
        return sum(
            value
            for (found, pairs), value in scraped.items()
            if found == name and labels.items() <= dict(pairs).items()
        )

    lookups = "moe_expert_lookups_total"
    for entry, outcome in (("resident_hit", "hit"), ("miss_B", "miss_unpredicted")):
        everything = {"resident_hit": "resident_hit", "miss_B": "miss_B_unpredicted"}[entry]
        assert risen("MISS_ATTRIB", f"dec_{entry}") == total(lookups, phase="decode", outcome=outcome)
        assert risen("MISS_ATTRIB", everything) == total(lookups, outcome=outcome)
    for split in ("timing", "evicted"):
        assert risen("MISS_ATTRIB", f"dec_miss_A_{split}") == total(lookups, phase="decode", outcome=f"miss_{split}")
    assert risen("MISS_ATTRIB", "routed") == total(lookups)
    assert risen("MISS_ATTRIB", "n") == total("moe_layer_calls_total")
    assert risen("MISS_ATTRIB", "dec_n") == total("moe_layer_calls_total", phase="decode")
    recalled = total("moe_predictor_experts_total", outcome="recalled")
    assert risen("PREDICT_RECALL_PROF", "hit") == recalled
    assert risen("PREDICT_RECALL_PROF", "routed") == total("moe_predictor_experts_total")
    assert risen("WINDOW_PROF", "n") == total("moe_prefetch_window_seconds_count")
    assert risen("WINDOW_PROF", "sum_s") == total("moe_prefetch_window_seconds_sum")
    assert risen("PREFETCH_TPROF", "place_experts") == total("moe_prefetch_placed_total")
    for stage in ("predict", "submit", "promote"):
        assert risen("PREFETCH_TPROF", f"{stage}_n") == total("moe_prefetch_duration_seconds_count", stage=stage)
        assert risen("PREFETCH_TPROF", f"{stage}_s") == total("moe_prefetch_duration_seconds_sum", stage=stage)
    for step in ("take", "route", "place"):
        assert risen("PREFETCH_TPROF", f"{step}_s") == total("moe_promote_duration_seconds_sum", step=step)
    for segment in ("route", "pyremap", "fetch", "matmul", "combine"):
        assert risen("PROF", segment) == total("moe_block_duration_seconds_sum", segment=segment)
    assert risen("PROF", "n_calls") == total("moe_block_calls_total")
