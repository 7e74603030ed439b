"""The demo engine as a whole: identical outputs, healthy bands, faults, and what it tells the recorder."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from moe_telemetry import Phase, Recorder, recorder
from moe_telemetry.demo import text as demo_text
from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.demo.engine import Engine
from moe_telemetry.demo.faults import SMALL_POOL
from moe_telemetry.demo.generation import RESPONSE_TOKENS, RunResult, Step
from moe_telemetry.demo.model import KVCache
from moe_telemetry.demo.pool import LayerPool
from moe_telemetry.demo.settings import DemoError, DemoSettings
from moe_telemetry.hooks import HOOKS
from moe_telemetry.live import LiveRecorder
from moe_telemetry.testing import capture

SMALL = ModelConfig(layers=3, experts=32, width=64, hidden=64)
"""Small enough to be quick, with the default's largest union of 16."""

ROUTING = (
    "moe.expert.lookups",
    "moe.layer.calls",
    "moe.layer.experts",
    "moe.layer.overflows",
    "moe.layer.union.max",
    "moe.expert.union",
    "moe.expert.union.max",
    "moe.predictor.experts",
    "moe.predictor.candidates",
    "moe.prefetch.hits",
)
"""What `routed` counts."""

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Calls(list[Call]):
    """What the engine told the recorder, in order, as (hook, args, kwargs)."""

    def of(self, hook: str) -> list[tuple[Any, ...]]:
        """The positional arguments of every call of `hook`."""
        return [args for name, args, _ in self if name == hook]

    def outcomes(self, phase: Phase) -> Counter[str]:
        """Routed experts of `phase` by outcome, expert by expert, and recall's numerator and denominator."""
        counts: Counter[str] = Counter()
        now = None
        for name, args, kwargs in self:
            if name == "forward":
                now = args[1]
            if name != "routed" or now != phase:
                continue
            resident, predicted, ready = (kwargs.get(k) for k in ("resident", "predicted", "ready"))
            for expert in args[1]:
                counts["routed"] += 1
                guessed = predicted is not None and expert in predicted
                counts["recalled"] += guessed
                if expert in resident:
                    counts["hit"] += 1
                    counts["prefetch_hit"] += guessed and expert in ready
                elif not guessed:
                    counts["miss_unpredicted"] += 1
                else:
                    counts["miss_evicted" if expert in ready else "miss_timing"] += 1
        return counts


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Every hook call, as long as the test runs."""
    seen = Calls()

    def keep(name: str) -> Any:
        def hook(self: object, *args: Any, **kwargs: Any) -> None:
            seen.append((name, args, kwargs))

        return hook

    was = type(recorder)
    spy = type("Spy", (was,), {"__slots__": (), **{name: keep(name) for name in HOOKS}})
    recorder.__class__ = spy
    yield seen
    recorder.__class__ = was


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for all tests, so that weights are written once."""
    return tmp_path_factory.mktemp("demo-cache")


def play(
    cache: Path, tokens: int = 110, config: ModelConfig | None = SMALL, **kwargs: Any
) -> tuple[RunResult, list[Step]]:
    """A run of `tokens`, by default on the small model and on a disk that costs nothing."""
    kwargs = {"read_mbps": 100_000.0, **kwargs}
    steps: list[Step] = []
    with Engine(DemoSettings(tokens=tokens, cache_dir=cache, **kwargs), config=config) as engine:
        engine.prepare()
        result = engine.run(threading.Event(), steps.append)
    return result, steps


@pytest.fixture(scope="session")
def reference(cache: Path) -> RunResult:
    """The small model with every expert resident and nothing predicted."""
    return play(cache, slots=SMALL.experts, prefetch=False)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 16},
        {"slots": 23},
        {"slots": 32},
        {"slots": 16, "prefetch": False},
        {"slots": 16, "read_mbps": 200.0},
        {"slots": 16, "fault": "small-pool", "fault_after": 0.0, "fault_for": 1e6},
        {"slots": 16, "fault": "bad-predictor", "fault_after": 0.0, "fault_for": 1e6},
        {"slots": 16, "fault": "small-pool", "fault_after": 0.2, "fault_for": 0.2},
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_outputs_do_not_depend_on_what_is_resident(cache: Path, reference: RunResult, settings: dict[str, Any]) -> None:
    """Bytes and logits are those of an all-resident run, whatever the pool, the prefetch or the fault."""
    result, _ = play(cache, **settings)
    assert (reference.digest, reference.final_logits) == (result.digest, result.final_logits)


def test_outputs_do_not_depend_on_the_recorder(cache: Path, reference: RunResult, calls: Calls) -> None:
    """A recorder that listens changes nothing."""
    result, _ = play(cache)
    assert (reference.digest, reference.final_logits) == (result.digest, result.final_logits)
    assert calls


def test_device_routing_counts_what_routed_would(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of `routed_array` are those of `routed` in the same passes, whatever the timing, also of a pool that
    shrinks and grows before they are read."""
    other = Recorder()
    originals = {name: getattr(LiveRecorder, name) for name in ("forward", "pool", "routed_array")}

    def in_both(name: str) -> Any:
        def hook(self: LiveRecorder, *args: Any, **kwargs: Any) -> None:
            for each in (self, other):
                originals[name](each, *args, **kwargs)

        return hook

    def route_in_both(self: LiveRecorder, layer: int, indices: Any, experts: int, **sets: Any) -> None:
        originals["routed_array"](self, layer, indices, experts, **sets)
        other.routed(layer, set(np.asarray(indices).ravel().tolist()), **sets)

    for name in ("forward", "pool"):
        monkeypatch.setattr(LiveRecorder, name, in_both(name))
    monkeypatch.setattr(LiveRecorder, "routed_array", route_in_both)
    fault = {"fault": "small-pool", "fault_after": 0.1, "fault_for": 0.2}
    with capture(locked=False) as device, capture(locked=False, recorder=other) as plain:
        play(cache, device_routing=True, read_mbps=200.0, **fault)
        found, expected = device.series(), plain.series()
    assert 0 < plain.total("moe.layer.overflows") < plain.total("moe.layer.calls")
    assert 0 < plain.total("moe.prefetch.hits")
    for name in ROUTING:
        one, two = ({key: value for key, value in all_.items() if key[0] == name} for all_ in (expected, found))
        assert one
        assert one == two
    assert 0 == device.total("moe.telemetry.dropped") == plain.total("moe.telemetry.dropped")


def test_another_seed_gives_other_outputs(cache: Path, reference: RunResult) -> None:
    """The weights, and with them the digest, follow from the seed."""
    assert reference.digest != play(cache, seed=1)[0].digest


def test_verify_passes_predict_what_single_tokens_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the trimmed cache leads on as if nothing had been speculated."""
    _, with_drafts = play(cache)
    monkeypatch.setattr(demo_text, "DRAFT_CONFIDENCE", 2.0)
    _, without = play(cache)
    assert len(with_drafts) < len(without)
    left, right = (b"".join(s.predicted for s in steps) for steps in (with_drafts, without))
    # A matmul of three rows may round otherwise than one of a single row, which could turn an argmax.
    assert sum(a != b for a, b in zip(left, right, strict=True)) <= 1


def test_the_context_holds_the_accepted_tokens_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each pass every layer's cache is as long as the request's text so far, and a new request starts at 0."""
    lengths: list[int] = []
    extend = KVCache.extend

    def spy(self: KVCache, keys: Any, values: Any) -> Any:
        lengths.append(0 if self.keys is None else self.keys.shape[2])
        return extend(self, keys, values)

    monkeypatch.setattr(KVCache, "extend", spy)
    _, steps = play(cache)
    expected, so_far = [], 0
    for before, step in zip([None, *steps], steps, strict=False):
        if step.phase is Phase.PREFILL and (before is None or before.phase is Phase.DECODE):
            so_far = 0
        expected += [so_far] * SMALL.layers
        so_far += step.tokens
    assert expected == lengths


@pytest.mark.alone
def test_default_run_is_quick(cache: Path) -> None:
    """The default demo decodes at least 15 tokens a second."""
    result, _ = play(cache, tokens=60, config=None, read_mbps=DemoSettings().read_mbps)
    assert result.decoded / result.seconds[Phase.DECODE] >= 15


def test_default_run_is_healthy(cache: Path, calls: Calls) -> None:
    """300 tokens of the default demo lie in the bands that the monitoring is tuned to, with every outcome present."""
    play(cache, tokens=300, config=None, read_mbps=DemoSettings().read_mbps)
    decode = calls.outcomes(Phase.DECODE)
    assert 0.80 <= decode["hit"] / decode["routed"] <= 0.97
    assert 0.5 <= decode["recalled"] / decode["routed"] <= 0.9
    for outcome in ("hit", "prefetch_hit", "miss_timing", "miss_evicted", "miss_unpredicted"):
        assert decode[outcome] > 0, outcome
        assert calls.outcomes(Phase.PREFILL)[outcome] > 0, outcome
    proposed, accepted = (sum(column) for column in zip(*calls.of("speculation"), strict=True))
    assert 0.2 <= accepted / proposed <= 0.95

    every = {"predict", "submit", "promote"}, {"take", "route", "place"}
    assert every == ({a[0] for a in calls.of("prefetch")}, {a[0] for a in calls.of("promote")})
    assert {"route", "pyremap", "fetch", "matmul", "combine"} == {a[0] for a in calls.of("block")}
    assert {"demand", "prefetch"} == {a[0] for a in calls.of("read")}
    assert {"budget", "no_slot", "unused"} <= {a[0] for a in calls.of("prefetch_dropped")}


def test_passes_come_in_the_three_shapes(cache: Path, calls: Calls) -> None:
    """Prefill in chunks of 4, decode in passes of 1 and 3; a pass of 1 routes to exactly top-k experts."""
    play(cache)
    shapes = Counter(calls.of("forward"))
    assert {(4, Phase.PREFILL), (1, Phase.DECODE), (3, Phase.DECODE)} == set(shapes)
    assert min(shapes.values()) >= 5
    tokens = 0
    for name, args, _ in calls:
        tokens = args[0] if name == "forward" else tokens
        if name == "routed":
            assert SMALL.top_k <= len(args[1]) <= tokens * SMALL.top_k


def test_every_layer_reports_once_a_pass(cache: Path, calls: Calls) -> None:
    """Each pass has one routed, one block call per layer, between forward and forward_done."""
    play(cache, tokens=5)
    passes = len(calls.of("forward"))
    assert passes == len(calls.of("forward_done"))
    assert passes == Counter(a[0] for a in calls.of("routed"))[0]
    assert passes * SMALL.layers == len(calls.of("routed")) == len(calls.of("block_call"))


def test_hooks_get_plain_numbers_and_sets(cache: Path, calls: Calls) -> None:
    """Nothing lazy or of NumPy leaves the thread that computes."""
    play(cache, tokens=20)
    plain = (int, float, str, Phase, type(None))
    for name, args, kwargs in calls:
        for value in (*args, *kwargs.values()):
            items = value if isinstance(value, set) else [value]
            assert all(type(item) in plain for item in items), (name, value)


def test_the_pool_reported_is_the_pool_kept(cache: Path, calls: Calls) -> None:
    """Capacity is declared at load; residents never exceed it, and what came in minus what was evicted is there."""
    with Engine(DemoSettings(tokens=60, cache_dir=cache), config=SMALL) as engine:
        engine.prepare()
        declared = {args[0]: kwargs for name, args, kwargs in calls if name == "pool"}
        assert {layer: {"capacity": 16, "resident": 0} for layer in engine.layer_ids} == declared
        engine.run(threading.Event())
    assert all(len(kwargs["resident"]) <= 16 for name, _, kwargs in calls if name == "routed")
    last = {args[0]: kwargs["resident"] for name, args, kwargs in calls if name == "pool"}
    assert last == dict.fromkeys(engine.layer_ids, 16)
    evicted = sum(n for _, n in calls.of("evicted"))
    misses = sum(calls.outcomes(p)["routed"] - calls.outcomes(p)["hit"] for p in Phase)
    assert misses + sum(n for (n,) in calls.of("placed")) == evicted + sum(last.values())


def test_a_placed_prefetch_is_wasted_only_if_never_used(calls: Calls) -> None:
    """Eviction counts the bytes of a prefetched expert that no pass used, once, and of no other."""
    pool = LayerPool(SMALL, 0, 2)
    for expert in (0, 1):
        pool.insert(expert, ())
        pool.unused.add(expert)
    pool.use({0})
    pool.insert(2, {0})
    pool.insert(3, {2})
    assert [("unused", 1, SMALL.expert_bytes)] == calls.of("prefetch_dropped")
    assert [(0, 1), (0, 1)] == calls.of("evicted")


def test_every_prefetch_read_is_accounted_for(cache: Path, calls: Calls) -> None:
    """A prefetched expert is placed, dropped with its bytes, or taken late by the pass that needed it."""
    play(cache, read_mbps=100.0, tokens=200)
    read = sum(1 for source, *_ in calls.of("read") if source == "prefetch")
    placed = sum(n for (n,) in calls.of("placed"))
    refused, unused = (
        sum(sum(nbytes[:1]) for why, _, *nbytes in calls.of("prefetch_dropped") if why == reason) / SMALL.expert_bytes
        for reason in ("no_slot", "unused")
    )
    misses = sum(calls.outcomes(p)["routed"] - calls.outcomes(p)["hit"] for p in Phase)
    late = misses - sum(1 for source, *_ in calls.of("read") if source == "demand")
    assert late > 0
    # Unused are those given up under way and, placed before, those evicted before any use.
    assert 0 <= read - (placed + refused + late) <= unused


def test_a_run_ends_at_exactly_the_tokens_asked_for(cache: Path, calls: Calls, tmp_path: Path) -> None:
    """Verify passes whose drafts are always right do not overshoot; recorded, returned and step tokens agree."""
    sure = tmp_path / "text"
    sure.write_bytes(b"ab" * 50)
    for tokens in (1, 2, 4, 5, RESPONSE_TOKENS + 2):
        calls.clear()
        result, steps = play(cache, tokens=tokens, text=sure)
        assert tokens == result.decoded == sum(s.tokens for s in steps if s.phase is Phase.DECODE)
        assert tokens == sum(n for n, phase in calls.of("tokens") if phase == Phase.DECODE)
        assert tokens == sum(output for _, _, output in calls.of("request"))
        assert result.prefilled == sum(n for n, phase in calls.of("tokens") if phase == Phase.PREFILL)


def test_decode_follows_the_text(cache: Path, tmp_path: Path) -> None:
    """The bytes of the steps, prompt and decode together, are the text, over and over."""
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox, 0123456789 times.\n")
    _, steps = play(cache, text=text, tokens=120)
    seen = b"".join(step.text for step in steps)
    assert (text.read_bytes() * 10)[: len(seen)] == seen
    assert all(len(step.text) == len(step.predicted) == step.tokens for step in steps)


def test_no_hook_is_called_once_a_run_has_returned(cache: Path, calls: Calls) -> None:
    """A snapshot taken after the run is final, although the reader may have been in the middle of something."""
    wrong = {"fault": "bad-predictor", "fault_after": 0.0, "fault_for": 1e6}
    with Engine(DemoSettings(tokens=7, cache_dir=cache, read_mbps=2.0, **wrong), config=SMALL) as engine:
        engine.prepare()
        engine.run(threading.Event())
        final = len(calls)
        time.sleep(0.1)
    assert final == len(calls)


def test_stop_ends_a_run_and_close_the_thread(cache: Path) -> None:
    """A run without a token limit ends soon after stop is set, and close leaves no thread behind, twice."""
    before = set(threading.enumerate())
    stop = threading.Event()
    steps: list[Step] = []
    engine = Engine(DemoSettings(cache_dir=cache, read_mbps=1.0), config=SMALL)
    engine.prepare()
    assert set(threading.enumerate()) > before
    threading.Timer(0.3, stop.set).start()
    result = engine.run(stop, steps.append)
    assert result.prefilled == sum(s.tokens for s in steps if s.phase is Phase.PREFILL)
    engine.close()
    engine.close()
    assert before >= {t for t in threading.enumerate() if not isinstance(t, threading.Timer)}


@pytest.mark.alone
def test_slow_disk_makes_reads_slow_and_prefetches_late(cache: Path, calls: Calls) -> None:
    """The fault's reads take many times longer, misses become timing misses, and it ends when it should."""
    play(cache, read_mbps=200.0)
    healthy, calm = calls.outcomes(Phase.DECODE), [s for source, _, s, *_ in calls.of("read") if source == "demand"]
    calls.clear()
    play(cache, read_mbps=200.0, fault="slow-disk", fault_after=0.0, fault_for=1e6)
    slow, held = calls.outcomes(Phase.DECODE), [s for source, _, s, *_ in calls.of("read") if source == "demand"]
    assert sum(held) / len(held) > 5 * sum(calm) / len(calm)
    assert slow["miss_timing"] > 2 * healthy["miss_timing"]
    assert slow["hit"] < healthy["hit"]


def test_bad_predictor_loses_recall(cache: Path, calls: Calls) -> None:
    """The fault's predictions are about as good as chance, while the router's choices stay what they were."""
    play(cache)
    good = calls.outcomes(Phase.DECODE)
    calls.clear()
    play(cache, fault="bad-predictor", fault_after=0.0, fault_for=1e6)
    bad = calls.outcomes(Phase.DECODE)
    assert good["routed"] == bad["routed"]
    assert bad["recalled"] < 0.5 * good["recalled"]


def test_small_pool_shrinks_and_comes_back(cache: Path, calls: Calls) -> None:
    """The fault's capacity is declared, lies below the unions that arrive, and is restored after its time."""
    seen = []
    with Engine(
        DemoSettings(tokens=250, cache_dir=cache, fault="small-pool", fault_after=0.1, fault_for=0.2), config=SMALL
    ) as engine:
        engine.prepare()
        engine.run(threading.Event(), lambda step: seen.append(engine.fault_active))
    capacities = [kw["capacity"] for name, args, kw in calls if name == "pool" and args == (0,) and "capacity" in kw]
    assert capacities == [16, SMALL_POOL, 16]
    assert [on for i, on in enumerate(seen) if i == 0 or on != seen[i - 1]] == [False, True, False]


def test_run_before_prepare_is_refused(cache: Path) -> None:
    """An engine that has not been prepared says so."""
    with Engine(DemoSettings(cache_dir=cache)) as engine, pytest.raises(RuntimeError, match="prepare"):
        engine.run(threading.Event())


def test_a_cache_cut_short_while_in_use_is_one_line(tmp_path: Path) -> None:
    """A blob that shrinks under a running demo ends it with a DemoError, from whichever thread meets it."""
    with Engine(DemoSettings(cache_dir=tmp_path, tokens=50), config=SMALL) as engine:
        engine.prepare()
        for blob in tmp_path.glob("*/layer-*.bin"):
            with blob.open("r+b") as file:
                file.truncate(0)
        with pytest.raises(DemoError, match="cache was changed"):
            engine.run(threading.Event())


def test_description_names_the_sizes(cache: Path) -> None:
    """One line says what runs."""
    with Engine(DemoSettings(cache_dir=cache, slots=20, read_mbps=250)) as engine:
        assert "\n" not in engine.description
        for part in ("12 layers", "64 experts", "top-4", "width 128", "302 MB", "20 slots", "250 MB/s"):
            assert part in engine.description
