"""Decode passes packed into one array by the model's own evaluation, as on CUDA: MLX's operations stand in for the
kernel, which needs one; `packed_kernels` in mlx_lm_tiny puts them there."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx_lm
from mlx import nn
from mlx_lm.models import switch_layers
from mlx_lm_tiny import PROMPT, Witness, near, packed_kernels, tiny, tokenizer

import moe_telemetry as mt
from moe_telemetry import adding, counting, following, live, passes, routing, tallies
from moe_telemetry.integrations import mlx_lm as integration
from moe_telemetry.integrations.mlx_lm.binding import Place
from moe_telemetry.integrations.mlx_lm.threads import Places
from moe_telemetry.testing import Capture, capture

LAYERS = 3


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of calls that were packed, in their order."""
    return packed_kernels(monkeypatch)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each pass that was handed over: calls, and whether they were packed."""
    found: list[tuple[int, bool]] = []
    original = passes.Pass.__init__

    def noted(self: passes.Pass, plan: Any, indices: list[mx.array], packed: mx.array | None = None) -> None:
        original(self, plan, indices, packed)
        found.append((len(self), self.packed))

    monkeypatch.setattr(passes.Pass, "__init__", noted)
    return found


def counted(found: Capture) -> tuple[int, int]:
    """Layer calls and distinct experts."""
    found.series()
    return int(found.total("moe.layer.calls")), int(found.total("moe.layer.experts"))


def generation(model: Any, tokens: int = 6, **options: Any) -> list[int]:
    """Ids of a generation."""
    found = mlx_lm.stream_generate(model, tokenizer(), PROMPT, max_tokens=tokens, **options)
    return [response.token for response in found]


def recorded(model: Any, run: Callable[[], Any]) -> tuple[Any, Capture]:
    """What a run gives while it is recorded, and the record."""
    recorder = mt.Recorder()
    integration.instrument(model, recorder=recorder)
    try:
        with capture(recorder=recorder) as found:
            given = run()
            found.series()
            return given, found
    finally:
        integration.uninstrument()


@pytest.mark.parametrize(
    "run",
    [
        generation,
        lambda model: generation(model, draft_model=near(model, 0.02)),
        lambda model: mlx_lm.batch_generate(model, tokenizer(), [PROMPT, PROMPT[:5]], max_tokens=6).texts,
    ],
    ids=["one", "speculative", "batch"],
)
def test_what_is_decoded_is_packed(kernels: list[int], handed: list[tuple[int, bool]], run: Any) -> None:
    """No pass over a prompt; ids and figures are those of a run that packs nothing."""
    model = tiny()
    plain = run(model)
    given, found = recorded(model, lambda: run(model))
    assert plain == given
    assert {LAYERS} == set(kernels)
    assert handed.count((LAYERS, True)) > 3
    assert (LAYERS, False) == handed[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adding, "packing", lambda calls, kind: None)
        _, other = recorded(model, lambda: run(model))
    assert counted(other) == counted(found)
    assert {} == {reason: lost for reason, lost in found.store.lost.items() if lost}


@pytest.mark.usefixtures("kernels")
def test_a_prompt_is_not_packed(handed: list[tuple[int, bool]]) -> None:
    """What it evaluates are its caches: the last router of a chunk would be computed for us alone."""
    model = tiny()
    recorded(model, lambda: generation(model, 5, prefill_step_size=4))
    assert [(LAYERS, False)] * 4 + [(LAYERS, True)] * 5 == handed


def test_the_figures_are_the_models(kernels: list[int]) -> None:
    """Tokens by layer and expert, read from what the modules were called with."""
    model = tiny()
    witness = Witness(model)
    with witness.watching():
        _, found = recorded(model, lambda: generation(model, 40))
    wanted: dict[int, list[int]] = {layer: [0] * 8 for layer in range(LAYERS)}
    dead = [number for number, length in enumerate(witness.lengths) if length > 1][-1]
    for number, layer, indices in witness.calls:
        if (number, layer) != (dead, LAYERS - 1):  # nobody needs the router behind a prompt's last use of it
            for expert in indices.flatten().tolist():  # type: ignore[union-attr]
                wanted[layer][expert] += 1  # type: ignore[index]
    assert wanted == {index: layer.load.tokens for index, layer in found.store.layers.items() if layer.load is not None}


def test_a_pass_that_nobody_evaluates_packs_nothing(kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What packs is computed with the last module's experts, and not by itself."""
    made: list[mx.array] = []
    original = adding.Packing.__call__

    def noted(self: adding.Packing, indices: list[mx.array]) -> Any:
        found = original(self, indices)
        made.append(found[0])  # type: ignore[index]
        return found

    monkeypatch.setattr(adding.Packing, "__call__", noted)
    model = tiny()
    recorded(model, lambda: generation(model, 3))
    packed = made[-1]
    evaluated = passes_of(packed)
    assert evaluated
    indices = [mx.argpartition(mx.random.normal((1, 1, 8)), kth=2)[..., :2] for _ in range(LAYERS)]
    packed, last = adding.Packing(LAYERS, mx.uint32)(indices)  # type: ignore[misc]
    mx.eval(indices)
    assert not passes_of(packed)
    mx.eval(last)
    assert passes_of(packed)
    assert mx.array_equal(last, indices[-1])
    assert [each.flatten().tolist() for each in indices] == packed.tolist()


def passes_of(array: mx.array) -> bool:
    """Whether an array has been computed."""
    from moe_telemetry import pending

    return not pending._graph(array)


@pytest.mark.parametrize("broken", ["an error", "another size"])
def test_what_cannot_be_packed(kernels: list[int], monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """The pass goes on with its own indices, and is counted without being packed."""

    def failing(self: adding.Packing, indices: list[mx.array]) -> None:
        if broken == "an error":
            raise RuntimeError("no memory")

    model = tiny()
    plain = generation(model, 12)
    monkeypatch.setattr(adding.Packing, "__call__", failing)
    given, found = recorded(model, lambda: generation(model, 12))
    assert plain == given
    errors = found.store.hook_errors["routed_array"]
    assert (errors > 5) == (broken == "an error")
    assert 12 * LAYERS == found.total("moe.layer.calls", phase="decode")


@pytest.mark.usefixtures("kernels")
def test_sizes_that_differ_are_not_packed() -> None:
    """A kernel would read beyond the smaller array, and one of another type not be compiled, in the model's hands."""
    packing = adding.Packing(2, mx.uint32)
    small, large = mx.zeros((1, 1, 2), dtype=mx.uint32), mx.zeros((1, 1, 4), dtype=mx.uint32)
    assert packing([large, small]) is None
    assert packing([mx.zeros((adding.MAX_PACKED + 1,), dtype=mx.uint32)] * 2) is None
    assert packing([mx.zeros((0,), dtype=mx.uint32)] * 2) is None
    assert packing([mx.zeros((1, 1, 2), dtype=mx.int32)] * 2) is None
    assert packing([small, small]) is not None


@pytest.mark.usefixtures("kernels")
def test_types_that_differ_are_not_packed() -> None:
    """There is a kernel for calls of one type only."""
    switches = [nn.Identity(), nn.Identity()]
    places = [Place(weakref.ref(switch), layer, 8) for layer, switch in enumerate(switches)]
    one, other = (mx.zeros((1, 1, 2), dtype=kind) for kind in (mx.uint32, mx.int32))
    assert Places(0, switches, places, [one, other]).packing is None
    assert Places(0, switches, places, [one, one]).packing is not None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dead", [2, 3])
def test_each_packed_pass_is_looked_at(dead: int) -> None:
    """One of four that nobody evaluates counts nothing, nor is it a loss; the others do."""
    recorder = mt.Recorder()
    with capture(recorder=recorder) as found:
        recorder.forward(1)
        for number in range(passes.PATIENCE):
            indices = [mx.array([[[1, 2]]], dtype=mx.uint32) + 0 for _ in range(2)]
            packed = mx.stack(indices).reshape(2, -1)
            live.routed_pass(recorder, (0, 1), (8, 8), indices, packed)
            if number != dead:
                mx.eval(packed)
        assert 2 * (passes.PATIENCE - 1) == found.total("moe.layer.calls")
        assert 0 == sum(found.store.lost.values())


@pytest.mark.parametrize("ahead", [False, True])
def test_a_call_more(kernels: list[int], handed: list[tuple[int, bool]], ahead: bool) -> None:
    """A pass with one call more than the one before is counted as a whole, not as what was packed of it."""
    model = tiny()
    extra = model.layers[0 if ahead else -1].mlp
    original = type(model).__call__
    calls: list[int] = []

    def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if ahead and len(calls) % 4 == 0:
            mx.eval(extra(mx.zeros((1, 1, 32))))
        given = original(self, *args, **kwargs)
        if not ahead and len(calls) % 4 == 0:
            mx.eval(extra(mx.zeros((1, 1, 32))))
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "__call__", twice)
        _, found = recorded(model, lambda: generation(model, 14))
    assert (LAYERS + 1, False) in handed
    assert (LAYERS, True) in handed
    whole = sum(number for number, _ in handed)
    assert whole - 1 == found.total("moe.layer.calls")  # but for the prompt's dead router
    assert 0 == sum(found.store.hook_errors.values())


def test_passes_outside_of_a_generation_are_not_packed(kernels: list[int], handed: list[tuple[int, bool]]) -> None:
    """Who makes them may take a gradient, or never ask for the logits."""
    model = tiny()

    def run() -> None:
        for _ in range(6):
            mx.eval(model(mx.array([[1]])))

    recorded(model, run)
    assert [(LAYERS, False)] * 6 == handed


@pytest.mark.parametrize("wrong", ["raises", "is wrong", "is right"])
def test_a_kernel_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """In the middle of a model's graph its error would be the model's."""

    def kernel(calls: int) -> Any:
        def run(inputs: list[mx.array], **_: Any) -> list[mx.array]:
            if wrong == "raises":
                raise RuntimeError("cannot be compiled")
            packed = mx.stack([array.reshape(-1) for array in inputs[:-1]])
            return [packed + 1 if wrong == "is wrong" else packed]

        return run

    monkeypatch.setattr(counting, "on_cuda", lambda: True)
    monkeypatch.setattr(counting, "_broken", False)
    monkeypatch.setattr(adding, "_packing", kernel)
    adding.packing.cache_clear()
    try:
        found = adding.packing(3, mx.uint32)
        assert (wrong == "is right") == (found is not None)
        assert (wrong != "raises") == counting.has_kernels()
        assert adding.packing(counting.KERNEL_INPUTS[-1] + 1, mx.uint32) is None
    finally:
        adding.packing.cache_clear()


def test_packed_and_single_arrays_add_up_alike() -> None:
    """With layers that were not called, ids that are none, and layers that are followed."""
    experts, called, number = 8, 3, 5
    indices = [mx.random.randint(0, experts + (at == 4), (1, 1, 4)).astype(mx.int32) for at in range(called * number)]
    indices[4] = mx.array([[[0, 1, 2, experts]]], dtype=mx.int32)
    packed = [
        mx.stack([array.reshape(-1) for array in indices[at : at + called]]) for at in range(0, len(indices), called)
    ]
    before = adding.nothing(called + 1, experts, 4)
    one = adding.add_passes(before, indices, called, experts, (1, 3))
    other = adding.add_passes(before, packed, called, experts, (1, 3), packed=True)
    assert mx.array_equal(one[0], other[0])
    assert mx.array_equal(one[1], other[1])  # type: ignore[arg-type]
    rows: list[list[int]] = one[0].tolist()  # type: ignore[assignment]
    assert [0] * len(rows[-1]) == rows[-1]
    assert [0, 1, 0] == [row[experts] for row in rows[:called]]  # calls with an id that is none
    for layer in range(called):
        mine = [indices[at].flatten().tolist() for at in range(layer, len(indices), called)]
        valid = [ids for ids in mine if max(ids) < experts]  # type: ignore[type-var]
        assert [sum(ids.count(expert) for ids in valid) for expert in range(experts)] == rows[layer][:experts]  # type: ignore[union-attr]
        assert [sum(len(set(ids)) == size for ids in valid) for size in range(5)] == rows[layer][experts + 1 :]  # type: ignore[arg-type]
    sets: list[list[list[int]]] = one[1].tolist()  # type: ignore[union-attr,assignment]
    for at, (row,) in enumerate(sets):
        ids = indices[at * called + 1].flatten().tolist()
        assert (set(ids) if max(ids) < experts else set()) == set(row) - {-1}  # type: ignore[arg-type,type-var]


@pytest.mark.parametrize("packed", [False, True])
def test_more_passes_than_a_kernel_takes_go_in_several_launches(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole passes in each, whatever the number of calls; MLX's operations stand in for the kernel."""
    experts, called, number, followed = 8, 5, 401, (1, 3)
    launches: list[int] = []

    def kernel(most: int) -> Any:
        def run(inputs: list[mx.array], template: list[tuple[str, Any]], **_: Any) -> tuple[mx.array, mx.array | None]:
            *ids, before, slots, numbers = inputs
            size, of_launch, calls, asked, width = (int(number) for number in numbers.tolist())  # type: ignore[union-attr,arg-type]
            assert (most, 2, calls, len(followed), 2) == (len(ids), size, called, asked, width)
            assert [-1, 0, -1, 1, -1] == slots.tolist()
            launches.append(of_launch)
            mine = [call for each in ids[:of_launch] for call in each] if packed else ids[: of_launch * calls]
            return adding._by_operations(before, mine, calls, experts, followed)

        return run

    indices = [mx.random.randint(0, experts, (2,)).astype(mx.int32) for _ in range(called * number)]
    before = adding.nothing(called, experts, 2)
    counts, sets = adding._by_operations(before, indices, called, experts, followed)
    monkeypatch.setattr(adding, "_kernel", kernel)
    monkeypatch.setattr(counting, "has_kernels", lambda: True)
    monkeypatch.setattr(counting, "_by_kernel", counting._by_scatter)
    rows = [mx.stack(indices[at : at + called]) for at in range(0, len(indices), called)]
    given = adding.add_passes(before, rows if packed else indices, called, experts, followed, packed)
    assert ([384, 17] if packed else [76] * 5 + [21]) == launches
    assert mx.array_equal(counts, given[0])
    assert mx.array_equal(sets, given[1])  # type: ignore[arg-type]


def test_a_stop_of_another_thread_tells_of_what_was_not_looked_at(kernels: list[int]) -> None:
    """Packed passes are looked at four at a time: at most so many are told as lost, none is counted twice."""
    model = tiny()
    recorder = mt.Recorder()
    integration.instrument(model, recorder=recorder)
    try:
        with capture(recorder=recorder) as found:
            ready, done = threading.Event(), threading.Event()

            def run() -> None:
                with mx.stream(mx.new_stream(mx.default_device())):
                    steps = mlx_lm.stream_generate(model, tokenizer(), PROMPT, max_tokens=60)
                    for _ in range(41):
                        next(steps)
                    ready.set()
                    done.wait(30)
                    steps.close()

            thread = threading.Thread(target=run)
            thread.start()
            assert ready.wait(30)
            found.store.end()
            done.set()
            thread.join()
            calls = int(found.total("moe.layer.calls", phase="decode"))
    finally:
        integration.uninstrument()
    assert (41 - 2 * passes.PATIENCE) * LAYERS <= calls <= 41 * LAYERS
    assert routing.FORWARDS % passes.PATIENCE == 0


def test_the_class_is_as_it_was() -> None:
    """Nothing of it stays when the patches are taken off."""
    before = switch_layers.SwitchGLU.__call__
    model = tiny()
    recorded(model, lambda: generation(model, 2))
    assert before is switch_layers.SwitchGLU.__call__


@pytest.mark.usefixtures("kernels")
def test_a_model_that_was_packed_is_freed() -> None:
    """What the thread remembers of its last pass holds no module."""
    model = tiny()
    recorder = mt.Recorder()
    integration.instrument(model, recorder=recorder)
    try:
        with capture(recorder=recorder) as found:
            generation(model, 4)
            found.series()
            gone = weakref.ref(model.layers[-1].mlp.switch_mlp)
            del model
            gc.collect()
            assert gone() is None
    finally:
        integration.uninstrument()


@pytest.mark.usefixtures("kernels")
def test_sets_of_layers_that_were_called_and_that_were_not() -> None:
    """A tally of passes with and without its last layer, which is followed: every set is handed on, in its pass."""
    with capture(pool_curve="all") as found:
        plan = passes.Plan(found.store.row("decode", 1), (0, 1, 2), 8)
        kept: dict[tallies.Key, tallies.Tally] = {}
        for number, called in enumerate((3, 2, 3, 2)):
            each = passes.Pass(plan, [mx.array([[[number, 7]]], dtype=mx.uint32)] * called)
            each.number = number
            tallies.Tally.add(kept, [each])
        (tally,) = kept.values()
        handed: list[tuple[tuple[int, ...], list[list[int]]]] = []

        class Noting(following.Followed):
            def add_rows(self, numbers: tuple[int, ...], cells: Any, rows: list[list[int]]) -> None:
                handed.append((numbers, [sorted(row) for row in rows]))

        tally.joined().count(found.store, Noting())
    assert [((1, 3), [[1, 7], [3, 7]])] * 2 + [((0, 2), [[0, 7], [2, 7]])] * 3 == handed
