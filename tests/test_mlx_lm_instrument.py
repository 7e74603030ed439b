"""Putting the patches on and taking them off, and how models and their layers are found."""

from __future__ import annotations

import builtins
import copy
import gc
import importlib
import logging
import pkgutil
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx_lm
import mlx_lm.server
import mlx_lm.utils
from mlx import nn
from mlx_lm.models import qwen3_moe, switch_layers
from mlx_lm_tiny import EXPERTS, PROMPT, Witness, durations, generate, lost, routing, save, tiny, tokenizer

import moe_telemetry as mt
from moe_telemetry.integrations import mlx_lm as integration
from moe_telemetry.integrations.mlx_lm.binding import Binding, Place, _layers
from moe_telemetry.settings import ConfigurationError
from moe_telemetry.testing import Capture, capture

PLACES = [
    *((generate, name) for name in ("generate_step", "speculative_generate_step")),
    *((generate.PromptProcessingBatch, name) for name in ("prompt",)),
    *((generate.GenerationBatch, name) for name in ("__init__", "next")),
    *((generate.BatchGenerator, name) for name in ("insert_segments", "_next", "remove")),
    *((switch_layers.SwitchGLU, "__call__"), (switch_layers.SwitchMLP, "__call__"), (qwen3_moe.Model, "__call__")),
    *((mlx_lm.utils, "load_model"),),
    *((mlx_lm.server.ResponseGenerator, name) for name in ("generate", "_tokenize", "_next_request")),
]
"""Everything that is patched once a model of this class is known."""


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """On the CPU every fused function is translated by a C++ compiler first; and no test leaves patches."""
    mx.disable_compile()
    yield
    mx.enable_compile()
    integration.uninstrument()


@pytest.fixture
def captured(recorder: mt.Recorder) -> Iterator[Capture]:
    """Telemetry that runs; the test instruments."""
    with capture(recorder=recorder) as found:
        yield found


def now() -> list[Any]:
    return [vars(owner).get(name) for owner, name in PLACES]


def steps(model: Any, number: int = 4) -> list[int]:
    return [token for token, _ in generate.generate_step(mx.array(PROMPT), model, max_tokens=number)]


def decode_calls(captured: Capture) -> dict[str, float]:
    """Decode layer calls by layer."""
    return {layer: count for (phase, layer), count in routing(captured)[0].items() if phase == "decode"}


# -- on and off ---------------------------------------------------------------------------------------------------


def test_the_originals_come_back(recorder: mt.Recorder) -> None:
    """Every attribute that was replaced is the very same object again, and twice on is as good as once."""
    model, before = tiny(), now()
    assert not integration.instrumented()
    integration.instrument(model, recorder=recorder)
    patched = now()
    assert [] == [place for place, old, new in zip(PLACES, before, patched, strict=True) if old is new]
    integration.instrument(model, recorder=recorder)
    integration.instrument(tiny(), recorder=recorder)
    assert integration.instrumented()
    assert all(old is new for old, new in zip(patched, now(), strict=True))
    integration.uninstrument()
    integration.uninstrument()
    assert all(old is new for old, new in zip(before, now(), strict=True))
    assert not integration.instrumented()


def test_functions_imported_by_name_are_replaced_too(recorder: mt.Recorder, captured: Capture) -> None:
    """A module that has generate_step by another name records as mlx_lm does, and gets the original back."""
    original = generate.generate_step
    script = ModuleType("a_script")
    script.step = original
    sys.modules["a_script"] = script
    try:
        integration.instrument(recorder=recorder)
        assert generate.generate_step is script.step is not original
        assert 3 == len(list(script.step(mx.array(PROMPT), tiny(), max_tokens=3)))
        assert 3 == captured.total("moe.tokens", phase="decode")
        kept = script.step
        integration.uninstrument()
        assert original is script.step
        before = now()
        assert 3 == len(list(kept(mx.array(PROMPT), tiny(), max_tokens=3)))  # an object that still has ours
        assert 3 == captured.total("moe.tokens", phase="decode")
        assert all(old is new for old, new in zip(before, now(), strict=True))
    finally:
        del sys.modules["a_script"]


def test_later_patches_of_others_stay(recorder: mt.Recorder, captured: Capture, monkeypatch: Any) -> None:
    """What somebody has put on top of ours is theirs to take off, and goes on working without us."""
    model, seen = tiny(), []
    integration.instrument(model, recorder=recorder)
    ours = switch_layers.SwitchGLU.__call__

    def theirs(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        seen.append(indices.shape)
        return ours(self, x, indices)

    monkeypatch.setattr(switch_layers.SwitchGLU, "__call__", theirs)
    integration.uninstrument()
    assert theirs is switch_layers.SwitchGLU.__call__
    assert 4 == len(steps(model))
    assert len(seen) > 0
    assert 0 == captured.total("moe.layer.calls")
    for _ in range(3):
        integration.instrument(model, recorder=recorder)
        integration.uninstrument()
    assert theirs is switch_layers.SwitchGLU.__call__


def test_an_inherited_call_is_inherited_again(recorder: mt.Recorder, captured: Capture) -> None:
    """A model class without a call of its own gets one for as long as it is watched."""

    class Derived(qwen3_moe.Model):
        pass

    mx.random.seed(0)
    derived = Derived(tiny().args)
    integration.instrument(derived, recorder=recorder)
    assert "__call__" in vars(Derived)
    with Witness(derived).watching() as witness:
        steps(derived)
    assert len(witness.lengths) == 2 + 4
    assert {"0": 4, "1": 4, "2": 4} == decode_calls(captured)
    integration.uninstrument()
    assert "__call__" not in vars(Derived)


def test_a_hundred_times(recorder: mt.Recorder) -> None:
    """Instrumenting, generating and taking it off again leaves nothing behind: no memory, patch or series."""
    model = tiny(num_hidden_layers=1)
    before = now()
    with capture(recorder=recorder) as found:

        def once() -> None:
            integration.instrument(model, recorder=recorder)
            steps(model, 2)
            mlx_lm.batch_generate(model, words, [PROMPT[:3]], max_tokens=1)
            integration.uninstrument()

        def grown(times: int, measure: Callable[[], int]) -> int:
            gc.collect()
            before = measure()
            for _ in range(times):
                once()
            gc.collect()
            return measure() - before

        words = tokenizer()
        grown(10, int)
        series = set(found.series())
        mx.clear_cache()
        active = mx.get_active_memory()
        assert grown(80, sys.getallocatedblocks) < 40  # less than one object each time
        tracemalloc.start()
        try:
            grown(3, int)
            # A leak shows in each of them; what is new in one is counters past the integers that the interpreter keeps.
            growth = [grown(7, lambda: tracemalloc.get_traced_memory()[0]) for _ in range(4)]
            assert min(growth) < 7 * 200, growth
        finally:
            tracemalloc.stop()
        assert series == set(found.series())
        assert mx.get_active_memory() <= active
        assert 0 == lost(found)
    assert all(old is new for old, new in zip(before, now(), strict=True))


def test_a_version_without_something(recorder: mt.Recorder, captured: Capture, monkeypatch: Any, caplog: Any) -> None:
    """What an mlx_lm does not have is left out with one log line, and the rest is recorded."""
    monkeypatch.delattr(generate, "speculative_generate_step")
    monkeypatch.delattr(generate, "GenerationBatch")
    monkeypatch.delattr(mlx_lm.server, "ResponseGenerator")
    monkeypatch.delattr(switch_layers, "SwitchMLP")
    monkeypatch.setitem(sys.modules, "mlx_lm.utils", None)  # it cannot be imported
    monkeypatch.setattr("moe_telemetry.integrations.mlx_lm.patches._told", set())
    with caplog.at_level(logging.WARNING, "moe_telemetry"):
        for _ in range(2):
            integration.instrument(recorder=recorder)
            steps(tiny())
            integration.uninstrument()
    missing = [record.getMessage().split(":")[0].removeprefix("this mlx_lm has no ") for record in caplog.records]
    assert [
        "mlx_lm.models.switch_layers.SwitchMLP.__call__",
        "mlx_lm.generate.speculative_generate_step",
        "mlx_lm.utils (import of mlx_lm.utils halted; None in sys.modules)",
        *("mlx_lm.generate.GenerationBatch.__init__", "mlx_lm.generate.GenerationBatch.next"),
        *(f"mlx_lm.server.ResponseGenerator.{name}" for name in ("generate", "_tokenize", "_next_request")),
    ] == missing
    assert {"0": 8, "1": 8, "2": 8} == decode_calls(captured)


def test_without_mlx_lm() -> None:
    """Without mlx_lm one sentence says so; importing the integration needs neither it nor mlx."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('mlx_lm', 'mlx')))\n"
        "from moe_telemetry.integrations import mlx_lm\n"
        "mlx_lm.uninstrument()\n"
        "try:\n"
        "    mlx_lm.instrument()\n"
        "except ImportError as error:\n"
        "    print(str(error).splitlines() == [str(error)], error)\n"
        "print(mlx_lm.instrumented())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    first, last = done.stdout.splitlines()
    assert first.startswith("True moe_telemetry.integrations.mlx_lm needs mlx_lm")
    assert "pip install mlx-lm" in first
    assert "False" == last


def test_only_a_recorder_is_one() -> None:
    """Anything else is a ConfigurationError, and nothing is patched."""
    before = now()
    with pytest.raises(ConfigurationError):
        integration.instrument(recorder=builtins)  # type: ignore[arg-type]
    assert before == now()


def test_threads_that_put_on_and_take_off(recorder: mt.Recorder) -> None:
    """While others instrument and uninstrument, a generation says what it says; in the end all is as before."""
    model, before = tiny(), now()
    plain, errors, stop = steps(model), [], threading.Event()

    def switch() -> None:
        try:
            while not stop.is_set():
                integration.instrument(model, recorder=recorder)
                integration.uninstrument()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=switch) for _ in range(3)]
    with capture(recorder=recorder):
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert plain == steps(model)
        stop.set()
        for thread in threads:
            thread.join()
    assert [] == errors
    integration.uninstrument()
    assert all(old is new for old, new in zip(before, now(), strict=True))


@pytest.mark.parametrize(
    "where",
    [
        *("passes.State._begin", "passes.State._hand_over", "passes.State.abandon", "batches._Step.returned"),
        *("generation.Generation.enter", "generation.Generation.leave", "generation.Generation.yielded"),
    ],
)
def test_an_interrupt_in_ours(recorder: mt.Recorder, monkeypatch: Any, where: str) -> None:
    """Ctrl-C while a hook is at work leaves the thread as a pass leaves it: what comes next counts as ever."""
    models = [tiny()]

    def run() -> None:
        steps(models[0])
        mlx_lm.batch_generate(models[0], tokenizer(), [PROMPT], max_tokens=3)

    with capture(recorder=recorder) as found:
        integration.instrument(models[0], recorder=recorder)
        run()
        path = f"moe_telemetry.integrations.mlx_lm.{where}"
        with monkeypatch.context() as patch:
            original = pkgutil.resolve_name(path)
            interrupts = iter([False, False, True])

            def interrupted(*args: Any) -> Any:
                if next(interrupts, False):
                    raise KeyboardInterrupt
                return original(*args)

            patch.setattr(path, interrupted)
            with pytest.raises(KeyboardInterrupt):
                run()
        assert {} == found.store.active
        before = found.total("moe.tokens"), decode_calls(found)
        run()
        assert before[0] + 2 * 11 + 4 + 3 == found.total("moe.tokens")
        assert {layer: calls + 4 + 3 for layer, calls in before[1].items()} == decode_calls(found)
        alive = weakref.ref(models.pop())
        gc.collect()
        assert alive() is None


class Interrupts:
    """Raises at the entry of the `at`th function of the integration that is called in the with-block: there and at its
    calls the interpreter looks for signals."""

    def __init__(self, at: int) -> None:
        self._left = at
        self._before = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: Any, event: str, argument: object) -> None:
        if "integrations/mlx_lm" in frame.f_code.co_filename.replace("\\", "/"):
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt

    @property
    def came(self) -> bool:
        return self._left <= 0


@pytest.mark.parametrize("way", ["alone", "generation", "batch"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some come in a finalizer
def test_an_interrupt_at_any_call_of_ours(recorder: mt.Recorder, captured: Capture, way: str) -> None:
    """No pass seems to be in progress behind it, and what comes next counts as ever."""
    model, words = tiny(num_hidden_layers=1), tokenizer()
    integration.instrument(model, recorder=recorder)

    def run() -> None:
        if way == "alone":
            mx.eval(model(mx.array([[1, 2]])))
        elif way == "generation":
            steps(model, 1)
        else:
            mlx_lm.batch_generate(model, words, [PROMPT[:3]], max_tokens=1)

    def calls() -> dict[Any, int]:
        captured.store.drain()
        return {key: row.layers[0].unknown for key, row in captured.store.rows.items() if row.layers}

    def counted() -> dict[Any, int]:
        before = calls()
        run()
        return {key: count - before[key] for key, count in calls().items()}

    run()
    plain, number, interrupts = counted(), 0, Interrupts(0)
    while interrupts.came:
        number += 1
        interrupts = Interrupts(number)
        with suppress(KeyboardInterrupt), interrupts:
            run()
        assert {} == captured.store.active, number
        assert plain == counted(), number
    assert number > 8


def test_taken_off_in_the_middle_of_a_pass(recorder: mt.Recorder, captured: Capture, monkeypatch: Any) -> None:
    """A pass that another thread's uninstrument() meets does not seem to run for ever."""
    model = tiny()
    integration.instrument(model, recorder=recorder)
    call = type(model.layers[1]).__call__

    def taking_off(*args: Any, **kwargs: Any) -> Any:
        assert {"decode"} == {phase for phase, _ in captured.store.active.values()}
        threading.Thread(target=integration.uninstrument).start()
        while integration.instrumented():
            time.sleep(0.001)
        return call(*args, **kwargs)

    tokens = generate.generate_step(mx.array(PROMPT), model, max_tokens=4)
    next(tokens)
    monkeypatch.setattr(type(model.layers[1]), "__call__", taking_off)
    next(tokens)
    assert {} == captured.store.active


@pytest.mark.parametrize("on", [False, True])
def test_telemetry_that_begins_in_the_middle_of_a_pass(recorder: mt.Recorder, monkeypatch: Any, on: bool) -> None:
    """What is left of that pass has no phase in it, and counts nowhere; the next one counts."""
    model, found = tiny(), []
    integration.instrument(model, recorder=recorder)
    call = type(model.layers[1]).__call__
    with ExitStack() as telemetry:
        if on:
            telemetry.enter_context(capture(recorder=recorder))

        def beginning(*args: Any, **kwargs: Any) -> Any:
            if not found:
                found.append(telemetry.enter_context(capture(recorder=recorder)))
            return call(*args, **kwargs)

        monkeypatch.setattr(type(model.layers[1]), "__call__", beginning)
        mx.eval(model(mx.array([PROMPT])))
        assert {} == routing(found[0])[0]
        mx.eval(model(mx.array([PROMPT])))
        assert {("prefill", layer): 1 for layer in "012"} == routing(found[0])[0]
        assert 0 == lost(found[0])


def test_a_pass_in_the_middle_of_another_threads(recorder: mt.Recorder, captured: Capture, monkeypatch: Any) -> None:
    """Whichever is begun first, each layer is counted with its own pass, before, within and behind the other."""
    model = tiny()
    integration.instrument(model, recorder=recorder)
    plain = steps(model)
    once = decode_calls(captured)
    call, others = type(model.layers[1]).__call__, []

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        if not others:
            others.append(threading.Thread(target=lambda: others.append(steps(model))))
            others[0].start()
            others[0].join()
        return call(*args, **kwargs)

    tokens = generate.generate_step(mx.array(PROMPT), model, max_tokens=4)
    found = [next(tokens)[0]]
    monkeypatch.setattr(type(model.layers[1]), "__call__", meanwhile)
    found += [token for token, _ in tokens]
    assert [plain, plain] == [found, others[1]]
    captured.store.drain_orphans()
    assert {layer: 3 * calls for layer, calls in once.items()} == decode_calls(captured)
    assert 0 == lost(captured)


def test_a_model_bound_anew_in_the_middle_of_a_look_up(
    recorder: mt.Recorder, captured: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was looked up before does not stay: by another thread, a layer's place may have become known meanwhile."""
    model = tiny()
    integration.instrument(model, recorder=recorder)
    original, outdated = Binding.place, []

    def place(binding: Binding, switch: Any) -> Any:
        found = original(binding, switch)
        if not outdated:
            outdated.append(found)
            binding.bind(model)
            return Place(found.ref, 9, found.experts)
        return found

    monkeypatch.setattr(Binding, "place", place)
    for _ in range(3):
        mx.eval(model(mx.array([[1]])))
    assert {"9": 1, "0": 2, "1": 3, "2": 3} == decode_calls(captured)


def test_a_draft_in_the_middle_of_another_threads_pass(
    recorder: mt.Recorder, captured: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a runtime's own modules, too: it is no pass, and the other thread's is none less."""
    model, draft = tiny(), tiny()
    block = draft.layers[0].mlp
    block.switch_mlp, before = Derived(32, 16, EXPERTS), block.switch_mlp
    block.switch_mlp.update(before.parameters())
    integration.instrument(model, recorder=recorder)

    def speculate() -> list[int]:
        found = generate.speculative_generate_step(mx.array(PROMPT), model, draft, max_tokens=4, num_draft_tokens=1)
        return [token for token, _, _ in found]

    plain, once = (steps(model), speculate()), decode_calls(captured)
    call, others = type(model.layers[1]).__call__, []

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        if not others:
            others.append(threading.Thread(target=lambda: others.append(speculate())))
            others[0].start()
            others[0].join()
        return call(*args, **kwargs)

    monkeypatch.setattr(type(model.layers[1]), "__call__", meanwhile)
    assert plain == (steps(model), others[1])
    captured.store.drain_orphans()
    assert {layer: 2 * calls for layer, calls in once.items()} == decode_calls(captured)
    assert 0 == lost(captured)


# -- models and layers --------------------------------------------------------------------------------------------


def test_layers_exist_before_their_first_event(captured: Capture, recorder: mt.Recorder, tmp_path: Path) -> None:
    """A model that is loaded, or known when telemetry starts, has its layers' counters at 0 (D9)."""
    integration.instrument(recorder=recorder)
    model, _ = mlx_lm.load(str(save(tmp_path / "model", num_hidden_layers=2)))
    assert {"0", "1"} == {dict(labels)["layer"] for name, labels in captured.series() if name == "moe.layer.calls"}
    integration.uninstrument()
    integration.instrument(model)  # the recorder of the process, which is off
    with capture() as later:
        assert 0 == later.value("moe.layer.calls", phase="decode", layer="1", residency="unknown")


def test_a_loaded_model_is_known(captured: Capture, recorder: mt.Recorder, tmp_path: Path) -> None:
    """Called directly, a pass of few tokens is decode; its tokens are nobody's answer and not counted."""
    integration.instrument(recorder=recorder)
    model, _ = mlx_lm.load(str(save(tmp_path / "model")))
    mx.eval(model(mx.array([PROMPT[:2]])))
    mx.eval(model(mx.array([PROMPT, PROMPT])))
    calls, _ = routing(captured)
    assert {(phase, layer): 1 for phase in ("decode", "prefill") for layer in "012"} == calls
    assert {"2", "11"} == {
        dict(labels)["seq"]
        for (name, labels), value in captured.series().items()
        if name == "moe.expert.union" and sum(value.counts)
    }
    assert 0 == captured.total("moe.tokens")
    assert {} == captured.store.active


@pytest.mark.parametrize("told", [True, False])
def test_a_model_loaded_before(captured: Capture, recorder: mt.Recorder, told: bool) -> None:
    """It is known when it is named, and otherwise when it generates."""
    model = tiny()
    integration.instrument(model if told else None, recorder=recorder)
    with Witness(model).watching() as witness:
        steps(model)
    assert witness.routing(["prefill"] * 2 + ["decode"] * 4, dead=(0,)) == routing(captured)


def test_a_model_that_nobody_named(captured: Capture, recorder: mt.Recorder, caplog: Any) -> None:
    """Neither loaded, named nor run by mlx_lm: its layers are unknown, and one line says what to do."""
    model = tiny()
    integration.instrument(recorder=recorder)
    for _ in range(2):
        mx.eval(model(mx.array([[1]])))
    assert {"none": 6} == decode_calls(captured)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "instrument(model=...)" in line


def test_a_copied_model(captured: Capture, recorder: mt.Recorder) -> None:
    """A copy's modules are others, and are found when it is first called, without mlx_lm's generation, too."""
    model = tiny()
    integration.instrument(model, recorder=recorder)
    other = copy.deepcopy(model)
    mx.eval(other(mx.array([[1]])))
    assert {"0": 1, "1": 1, "2": 1} == decode_calls(captured)
    steps(copy.deepcopy(other))
    assert {"0": 5, "1": 5, "2": 5} == decode_calls(captured)


class Around(nn.Module):
    """A runtime's module around a SwitchGLU, called as that is."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return self.inner(x, indices)


class Derived(switch_layers.SwitchGLU):
    """A runtime's own SwitchGLU, which goes on to its base."""

    def __call__(self, x: mx.array, inds: mx.array) -> mx.array:
        return super().__call__(x, indices=inds)


class StandIn(switch_layers.SwitchGLU):
    """One that holds another and computes something of its own."""

    def __init__(self, inner: Any) -> None:
        nn.Module.__init__(self)
        self.inner = inner

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return 0.5 * self.inner(x, indices) + 0.5 * self.inner(x, indices)


@pytest.mark.parametrize("kind", [Around, Derived, StandIn])
@pytest.mark.parametrize("before", [True, False])
def test_a_wrapped_module(captured: Capture, recorder: mt.Recorder, kind: type, before: bool) -> None:
    """A SwitchGLU that a runtime wraps, derives or replaces in a known model is seen once, in its layer."""
    model = tiny()
    plain = steps(model)
    if not before:
        integration.instrument(model, recorder=recorder)
    block = model.layers[1].mlp
    if kind is Derived:
        block.switch_mlp = Derived(32, 16, EXPERTS)
        block.switch_mlp.update(tiny().layers[1].mlp.switch_mlp.parameters())
    else:
        block.switch_mlp = kind(block.switch_mlp)
    if before:
        integration.instrument(model, recorder=recorder)
    assert plain == steps(model)
    assert {"0": 4, "1": 4, "2": 4} == decode_calls(captured)
    assert 0 == lost(captured)


def test_a_parameter_of_another_name(captured: Capture, recorder: mt.Recorder) -> None:
    """Handed over by its name."""
    module = Derived(32, 16, EXPERTS)
    integration.instrument(tiny(), recorder=recorder)
    mx.eval(module(mx.zeros((1, 1, 32)), inds=mx.array([[[1, 2]]])))
    assert {"none": 1} == decode_calls(captured)
    assert 0 == lost(captured)


class Opaque(switch_layers.SwitchGLU):
    """One that holds its weights where nobody finds them."""

    def __init__(self, inner: Any) -> None:
        nn.Module.__init__(self)
        self.compute = partial(type(inner).__call__, inner)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return self.compute(x, indices)


def test_a_module_whose_experts_nobody_knows(recorder: mt.Recorder) -> None:
    """It is left out, and the other layers have their own routing."""
    model = tiny()

    def found() -> dict[str, Any]:
        with capture(recorder=recorder) as each:
            assert 4 == len(steps(model))
            assert 0 == lost(each)
            routed = {layer: experts for (_, layer), experts in routing(each)[1].items()}
            tokens = {str(index): layer.load.tokens for index, layer in each.store.layers.items() if layer.load}
            return {layer: (routed[layer], tokens[layer]) for layer in tokens}

    integration.instrument(model, recorder=recorder)
    plain = found()
    assert {"0", "1", "2"} == set(plain)
    model.layers[0].mlp.switch_mlp = Opaque(model.layers[0].mlp.switch_mlp)
    integration.uninstrument()
    integration.instrument(model, recorder=recorder)
    assert {layer: plain[layer] for layer in "12"} == found()


def test_an_object_around_a_model(captured: Capture, recorder: mt.Recorder) -> None:
    """What is no module but holds one, as a runtime's wrapper does, generates with the phases of its model."""
    model = tiny()

    class Wrapper:
        def __init__(self) -> None:
            self.wrapped = model
            self.layers = model.layers

        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            return self.wrapped(*args, **kwargs)

    integration.instrument(recorder=recorder)
    steps(Wrapper())
    assert {"0": 4, "1": 4, "2": 4} == decode_calls(captured)
    assert 11 == captured.total("moe.tokens", phase="prefill")


def test_a_model_around_a_model(captured: Capture, recorder: mt.Recorder) -> None:
    """Of a model inside another, both known, the outermost call is the pass."""

    class Outer(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.language_model = inner

        @property
        def layers(self) -> list[Any]:
            return self.language_model.layers

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return self.language_model(inputs[:, -1:] if inputs.shape[1] > 1 else inputs, cache=cache)

    inner = tiny()
    integration.instrument(inner, recorder=recorder)
    steps(Outer(inner))
    assert {"0": 4, "1": 4, "2": 4} == decode_calls(captured)
    assert {("prefill", "10"): 1, ("prefill", "1"): 1, ("decode", "1"): 3} == durations(captured)


def test_two_models_of_a_class(captured: Capture, recorder: mt.Recorder) -> None:
    """Each has its layers, whatever the other's are."""
    one, other = tiny(mlp_only_layers=[0]), tiny(seed=2, num_hidden_layers=5)
    integration.instrument(recorder=recorder)
    steps(one)
    steps(other)
    assert {"0": 4, "1": 8, "2": 8, "3": 4, "4": 4} == decode_calls(captured)
    for _ in range(2):  # nothing is bound any more
        steps(one)
        steps(other)
    assert {"0": 12, "1": 24, "2": 24, "3": 12, "4": 12} == decode_calls(captured)


def test_layers_exist_in_each_telemetry(captured: Capture, recorder: mt.Recorder) -> None:
    """At 0 behind the first pass of any model, also where another telemetry goes on behind it."""
    one, other = tiny(num_hidden_layers=5), tiny(num_hidden_layers=1)
    for model in (one, other):
        integration.instrument(model, recorder=recorder)
    mx.eval(other(mx.array([[1]])))
    with capture(recorder=recorder) as inner:
        mx.eval(other(mx.array([[1]])))
        assert 0 == inner.value("moe.layer.calls", phase="decode", layer="4", residency="unknown")
    assert 1 == captured.value("moe.layer.calls", phase="decode", layer="0", residency="unknown")


def test_a_version_with_other_parameters(captured: Capture, recorder: mt.Recorder, monkeypatch: Any) -> None:
    """Whatever a SwitchGLU takes beside its input and the indices arrives."""
    original = switch_layers.SwitchGLU.__call__

    def call(self: Any, x: mx.array, inds: mx.array, *, scale: float = 1.0) -> mx.array:
        return scale * original(self, x, inds)

    monkeypatch.setattr(switch_layers.SwitchGLU, "__call__", call)
    model = tiny()
    integration.instrument(model, recorder=recorder)
    steps(model)
    assert {"0": 4, "1": 4, "2": 4} == decode_calls(captured)
    module, x, indices = model.layers[0].mlp.switch_mlp, mx.ones((1, 1, 32)), mx.array([[[1, 2]]])
    assert (2 * module(x, indices)).tolist() == module(x, inds=indices, scale=2.0).tolist()
    assert 6 == decode_calls(captured)["0"]
    integration.uninstrument()  # before the original comes back


def test_an_unloaded_model_is_freed(captured: Capture, recorder: mt.Recorder) -> None:
    """Nothing of ours keeps a model, its modules or its arrays."""
    integration.instrument(recorder=recorder)
    steps(tiny())  # what stays for good of a first time
    gc.collect()
    mx.clear_cache()
    memory = mx.get_active_memory()
    model = tiny(seed=5)
    draft = tiny(seed=6)
    steps(model)
    list(generate.speculative_generate_step(mx.array(PROMPT), model, draft, max_tokens=4))
    alive = [weakref.ref(model), weakref.ref(draft), weakref.ref(model.layers[0].mlp.switch_mlp)]
    del model, draft
    gc.collect()
    assert [None] * 3 == [ref() for ref in alive]
    mx.clear_cache()
    assert mx.get_active_memory() <= memory


def test_transformed_functions(captured: Capture, recorder: mt.Recorder) -> None:
    """Inside mx.compile and mx.grad a model computes what it does without telemetry; tracers stay in there."""
    model = tiny()
    block = model.layers[0].mlp
    x = mx.random.normal((1, 5, 32))

    def loss(weight: mx.array) -> mx.array:
        kept, block.gate.weight = block.gate.weight, weight
        try:
            return model(mx.array([PROMPT])).sum()
        finally:
            block.gate.weight = kept

    def outputs() -> list[Any]:
        gradient = mx.grad(loss)(block.gate.weight).tolist()
        mx.enable_compile()
        compiled = mx.compile(block)
        found = [gradient, compiled(x).tolist(), compiled(x + 1).tolist()]
        mx.disable_compile()
        return found

    plain = outputs()
    integration.instrument(model, recorder=recorder)
    assert plain == outputs()
    assert 0 == lost(captured) - captured.total("moe.telemetry.dropped", reason="unevaluated")
    steps(model)
    assert 4 <= decode_calls(captured)["1"]


def test_where_a_layer_number_stands() -> None:
    """The first index of a path is the decoder layer's; lists that collide have one that is the decoder."""
    main = [("model", "layers", number, "mlp", "switch_mlp") for number in range(1, 4)]
    assert [1, 2, 3] == _layers(main)
    assert [2, 2] == _layers([("layers", 2, "mlp", "experts", 0), ("layers", 2, "mlp", "experts", 1)])
    assert [7] == _layers([("h", "7", "ffn")])
    assert [None] == _layers([("mlp", "switch_mlp")])
    assert [None, 1, 2, 3] == _layers([("mtp", "layers", 1, "mlp"), *main])
    assert [1, 2, 3, 9] == _layers([*main, ("mtp", 9, "mlp")])


def test_importing_is_cheap() -> None:
    """The integration loads mlx_lm, mlx and the SDK no sooner than it is put on."""
    code = (
        "import sys, moe_telemetry.integrations.mlx_lm\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'mlx', 'mlx_lm', 'opentelemetry', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "[]\n" == done.stdout


def test_the_module_is_shadowed_by_its_function() -> None:
    """The name mlx_lm.generate is a function: the module is found by its full name only."""
    assert mlx_lm.generate is not importlib.import_module("mlx_lm.generate")
