"""Every MoE family of mlx_lm under `instrument()`, against a reading of the routing after the fact.

The reference stands below the integration: it keeps what each module with experts is called with, lets the model run,
and reads at the end only what the model has evaluated by itself.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.models import switch_layers
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm_families import EXPERTS, FAMILIES, NOT_RUN, RUN, build, in_mlx_lm
from mlx_lm_tiny import packed_kernels

import moe_telemetry as mt
from moe_telemetry import snapshot
from moe_telemetry.integrations import mlx_lm
from moe_telemetry.series import read
from moe_telemetry.testing import Capture, capture

generate = importlib.import_module("mlx_lm.generate")  # the package's attribute of that name is the function

CHUNK = 4
LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def passes(prompt: int, new: int) -> list[tuple[str, int]]:
    """Phase and length of the passes of a generation: the last prompt token is read by itself, and the last pass is
    one that is thrown away."""
    whole, rest = divmod(prompt - 1, CHUNK)
    read = [CHUNK] * whole + [rest] * bool(rest) + [1]
    return [("prefill", length) for length in read] + [("decode", 1)] * new


class Reference:
    """What every call of one model's modules with experts was given, unread."""

    def __init__(self, model: Any) -> None:
        self.calls: dict[str, list[mx.array]] = defaultdict(list)
        self._paths = {id(module): path for path, module in model.named_modules()}

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Put this in the way of the classes' calls."""
        for kind in (switch_layers.SwitchGLU, switch_layers.SwitchMLP):
            patch.setattr(kind, "__call__", self._keeping(kind.__call__))

    def evaluated(self) -> dict[str, list[bool]]:
        """By module, of which calls the routing was computed: ask before anything reads it."""
        return {path: [_is_leaf(indices) for indices in kept] for path, kept in self.calls.items()}

    def routed(
        self, made: list[tuple[str, int]], evaluated: dict[str, list[bool]]
    ) -> list[tuple[str, int, str, list[int]]]:
        """(phase, tokens per sequence, layer, routed ids) of each call whose routing was computed."""
        return [
            (phase, seq, LAYER_NUMBER.search(path)[1], indices.flatten().tolist())
            for path, kept in self.calls.items()
            for (phase, seq), indices, known in zip(made, kept, evaluated[path], strict=True)
            if known
        ]

    def _keeping(self, original: Any) -> Any:
        def call(module: Any, x: mx.array, indices: mx.array) -> mx.array:
            self.calls[self._paths[id(module)]].append(indices)
            return original(module, x, indices)

        return call


def _is_leaf(array: mx.array) -> bool:
    """Whether the array is drawn without the operation that makes it, as one that was evaluated is."""
    drawn = StringIO()
    mx.export_to_dot(drawn, array)
    return "->" not in drawn.getvalue()


def expected(routed: list[tuple[str, int, str, list[int]]]) -> dict[str, Any]:
    """Everything that telemetry must have counted of these calls."""
    figures: dict[str, Any] = {name: Counter() for name in ("calls", "experts", "tokens")}
    figures |= {name: defaultdict(int) for name in ("layer max", "seq max")}
    figures |= {"unions": Counter(), "histogram": Counter(), "histogram sum": Counter()}
    for phase, seq, layer, ids in routed:
        size = len(set(ids))
        figures["calls"][phase, layer] += 1
        figures["experts"][phase, layer] += size
        figures["layer max"][phase, layer] = max(size, figures["layer max"][phase, layer])
        figures["seq max"][phase, str(seq)] = max(size, figures["seq max"][phase, str(seq)])
        figures["unions"][phase, str(seq), layer, str(size)] += 1
        figures["histogram"][phase, str(seq)] += 1
        figures["histogram sum"][phase, str(seq)] += size
        figures["tokens"] += Counter((layer, expert) for expert in ids)
    peaks: dict[str, float] = {}
    for layer in {layer for _, _, layer, _ in routed}:
        tokens = [figures["tokens"][layer, expert] for expert in range(EXPERTS)]
        peaks[layer] = max(tokens) * EXPERTS / sum(tokens)
    return {**figures, "load peak": peaks, "refused": {}, "hook errors": {}}


def counted(captured: Capture) -> dict[str, Any]:
    """The same of what was recorded, without series that are 0."""
    captured.series()  # waits for what is outstanding
    found = snapshot.build(captured.store, read(captured.store))

    def values(name: str, *labels: str, field: str = "value", **fixed: str) -> dict[Any, float]:
        series = found["metrics"].get(name, {"series": []})["series"]
        rows = [(each["labels"], each[field]) for each in series if fixed.items() <= each["labels"].items()]
        kept = {tuple(at[label] for label in labels): value for at, value in rows if value}
        return {key[0] if len(labels) == 1 else key: value for key, value in kept.items()}

    return {
        "calls": values("moe.layer.calls", "phase", "layer", residency="unknown"),
        "experts": values("moe.layer.experts", "phase", "layer"),
        "tokens": {
            (layer, expert): number
            for layer, tokens in found["experts"].items()
            for expert, number in enumerate(tokens)
            if number
        },
        "layer max": values("moe.layer.union.max", "phase", "layer"),
        "seq max": values("moe.expert.union.max", "phase", "seq"),
        "unions": {
            (phase, seq, layer, size): calls
            for phase, by_seq in found["unions"].items()
            for seq, unions in by_seq.items()
            for layer, sizes in unions["layers"].items()
            for size, calls in sizes.items()
        },
        "histogram": values("moe.expert.union", "phase", "seq", field="count"),
        "histogram sum": values("moe.expert.union", "phase", "seq", field="sum"),
        "load peak": values("moe.expert.load.peak", "layer"),
        "refused": values("moe.telemetry.dropped", "reason"),
        "hook errors": values("moe.telemetry.hook.errors", "hook"),
    }


@pytest.fixture
def quick_cpu() -> Iterator[None]:
    """On the CPU each fused function is translated by a C++ compiler first: minutes for all families."""
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()
    yield
    mx.enable_compile()


def tokens_of(model: Any, prompt: int, new: int) -> list[int]:
    """A generation, sampled: the same one for the same model in each call."""
    mx.random.seed(7)
    steps = generate.generate_step(
        mx.arange(1, prompt + 1) % 64,
        model,
        max_tokens=new,
        prefill_step_size=CHUNK,
        prompt_cache=make_prompt_cache(model),
        sampler=mx.random.categorical,
    )
    return [int(token) for token, _ in steps]


def check(family: str, recorder: mt.Recorder, prompt: int = 7, new: int = 5) -> None:
    """Run the family without and with telemetry; fail where a figure, a token or what is evaluated differs."""
    mx.random.seed(0)
    model = build(family)
    plain, reference = Reference(model), Reference(model)
    with pytest.MonkeyPatch.context() as patch:
        plain.watch(patch)
        tokens = tokens_of(model, prompt, new)
    evaluated = plain.evaluated()
    with pytest.MonkeyPatch.context() as patch, capture(recorder=recorder) as captured:
        reference.watch(patch)
        mlx_lm.instrument(recorder=recorder)
        try:
            assert tokens == tokens_of(model, prompt, new)
        finally:
            mlx_lm.uninstrument()
        found = counted(captured)
    assert evaluated == reference.evaluated()
    wanted = expected(reference.routed(passes(prompt, new), evaluated))
    assert wanted == found
    # The figures above can only tell layers, experts and dead calls apart where they differ.
    layers = {layer for layer, _ in wanted["tokens"]}
    shares = {tuple(wanted["tokens"][layer, expert] for expert in range(EXPERTS)) for layer in layers}
    assert 2 <= len(layers) == len(shares)
    assert {True, False} == {known for calls in evaluated.values() for known in calls}


@pytest.mark.parametrize("family", RUN)
@pytest.mark.usefixtures("quick_cpu")
def test_family(family: str, recorder: mt.Recorder) -> None:
    """Each call counts once, in its layer, with its union and its tokens by expert; nothing else is evaluated."""
    check(family, recorder)


@pytest.mark.parametrize("family", RUN)
@pytest.mark.usefixtures("quick_cpu")
def test_family_packed(family: str, recorder: mt.Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where passes are counted as on CUDA; each family's decode is packed."""
    packed = packed_kernels(monkeypatch)
    check(family, recorder)
    assert packed


@pytest.mark.parametrize("family", ["gemma4_text", "nemotron_h", "olmoe", "qwen3_moe"])
@pytest.mark.usefixtures("quick_cpu")
def test_long(family: str, recorder: mt.Recorder) -> None:
    """So it is over many passes, which are reduced some at a time while the model goes on."""
    check(family, recorder, prompt=50, new=40)


def test_compiled(recorder: mt.Recorder) -> None:
    """So it is where the router is a compiled function; of those this family has the fewest to compile."""
    check("mistral4", recorder)


def test_every_family_is_listed() -> None:
    """The families run here and those that cannot be, with a reason, are all that mlx_lm has."""
    assert in_mlx_lm() == set(FAMILIES) | set(NOT_RUN)
    assert set(FAMILIES) == set(RUN) | set(NOT_RUN)
    assert all(NOT_RUN.values())
    assert len(RUN) >= 30
