"""Tiny mlx_lm models and a tokenizer for them, and a witness of what they route, independent of the integration."""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3_moe, switch_layers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe_telemetry import adding, counting
from moe_telemetry.testing import Capture

generate = importlib.import_module("mlx_lm.generate")  # as an attribute of the package it is the function

EXPERTS = 8
VOCABULARY = 64
SPECIAL = ("<unk>", "</s>", "<user>", "<assistant>")
EOS = SPECIAL.index("</s>")
PROMPT = [5, 9, 14, 20, 33, 41, 7, 8, 50, 60, 12]
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
}


def tiny(seed: int = 0, **fields: Any) -> Any:
    """A model of three layers, each with 8 experts of which 2 are taken; `fields` change its configuration."""
    mx.random.seed(seed)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict({**CONFIG, **fields}))
    model.eval()
    mx.eval(model.parameters())
    return model


def near(model: Any, noise: float, seed: int = 1) -> Any:
    """A copy whose weights differ a little: as a draft model it is right now and then."""
    mx.random.seed(seed)
    other = copy.deepcopy(model)
    other.update(tree_map(lambda weight: weight + noise * mx.random.normal(weight.shape), model.parameters()))
    mx.eval(other.parameters())
    return other


def tokenizer(eos: bool = False) -> TokenizerWrapper:
    """A word for each id, "w4" to "w63"; without `eos` no token ends a text."""
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), VOCABULARY))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = (
        "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    wrapped = TokenizerWrapper(fast)
    if not eos:
        wrapped._eos_token_ids.clear()
    return wrapped


def save(folder: Path, **fields: Any) -> Path:
    """A folder that mlx_lm loads: configuration, weights, tokenizer."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": EOS, **fields}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tiny(**fields).parameters())))
    tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def packed_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have routing counted as on CUDA, packed passes included, by MLX's own operations; the list that comes back gets
    the number of calls of each pass that is packed."""
    made: list[int] = []

    def kernel(calls: int) -> Any:
        def run(inputs: list[mx.array], **_: Any) -> list[mx.array]:
            assert len(inputs) == calls + 1, "as the kernel is called"
            made.append(calls)
            return [mx.stack([array.reshape(-1) for array in inputs[:-1]])]

        return run

    monkeypatch.setattr(counting, "on_cuda", lambda: True)
    monkeypatch.setattr(counting, "_broken", True)
    monkeypatch.setattr(adding, "_packing", kernel)
    monkeypatch.setattr(adding, "packing", adding.Packing)
    return made


class Witness:
    """What every SwitchGLU of a model was called with, and every call of the model, in order, unread."""

    def __init__(self, model: Any) -> None:
        self.lengths: list[int] = []
        self.calls: list[tuple[int, int, mx.array]] = []  # number of the pass, layer, routed ids
        self._model = model
        self._layers = {id(layer.mlp.switch_mlp): number for number, layer in enumerate(model.layers)}

    @contextmanager
    def watching(self) -> Iterator[Witness]:
        """Stand in the way of the calls, below whatever is put on top inside the with-block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self._model), "__call__", self._passing(type(self._model).__call__))
            patch.setattr(switch_layers.SwitchGLU, "__call__", self._routing(switch_layers.SwitchGLU.__call__))
            yield self

    def _passing(self, original: Any) -> Any:
        def call(model: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            if model is self._model:
                self.lengths.append(inputs.shape[1])
            return original(model, inputs, *args, **kwargs)

        return call

    def _routing(self, original: Any) -> Any:
        def call(module: Any, x: mx.array, indices: mx.array) -> mx.array:
            if id(module) in self._layers:
                self.calls.append((len(self.lengths) - 1, self._layers[id(module)], indices))
            return original(module, x, indices)

        return call

    def routing(self, phases: Sequence[str], dead: Sequence[int] = ()) -> tuple[Counter[Any], Counter[Any]]:
        """Layer calls by (phase, layer) and union sizes summed by the same, given the phase of each pass.

        `dead` are passes of which only the cache is used, so that the last layer's routing was never computed.
        """
        assert len(phases) == len(self.lengths)
        calls: Counter[Any] = Counter()
        experts: Counter[Any] = Counter()
        last = max(self._layers.values())
        for number, layer, indices in self.calls:
            if not (number in dead and layer == last):
                calls[phases[number], str(layer)] += 1
                experts[phases[number], str(layer)] += len(set(indices.flatten().tolist()))
        return calls, experts


def routing(captured: Capture) -> tuple[dict[Any, float], dict[Any, float]]:
    """The same two of what telemetry recorded, without what is 0."""
    series = captured.series()
    calls: dict[Any, float] = {}
    experts: dict[Any, float] = {}
    for (name, pairs), value in series.items():
        labels = dict(pairs)
        if name == "moe.layer.calls" and value and labels["residency"] == "unknown":
            calls[labels["phase"], labels["layer"]] = value
        if name == "moe.layer.experts" and value:
            experts[labels["phase"], labels["layer"]] = value
    return calls, experts


def durations(captured: Capture) -> dict[tuple[str, str], int]:
    """Number of forward durations by phase and sequence length."""
    found = {}
    for (name, pairs), value in captured.series().items():
        if name == "moe.forward.duration" and sum(value.counts):
            labels = dict(pairs)
            found[labels["phase"], labels["seq"]] = sum(value.counts)
    return found


def seen(captured: Capture, name: str) -> tuple[int, float]:
    """Count and sum of a histogram over all its series."""
    found = [value for (each, _), value in captured.series().items() if each == name]
    return sum(sum(value.counts) for value in found), sum(value.sum for value in found)


def lost(captured: Capture) -> float:
    """Records that telemetry did not take."""
    return captured.total("moe.telemetry.dropped")
