"""A qwen3_moe with random weights, and the ways in which routing_gpu.py runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import qwen3_moe
from mlx_lm.models.switch_layers import SwitchGLU

import moe_telemetry as mt
from moe_telemetry.catalog import LAYER_CALLS
from moe_telemetry.integrations import mlx_lm as integration


class Recording:
    """Telemetry and the instrumented model for one run; `layer_calls` is what the last one recorded, by phase."""

    def __init__(self, model: Module) -> None:
        self.model = model
        self.layer_calls: dict[str, int] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with mt.start(model="random qwen3_moe", runtime="mlx_lm", port=0) as telemetry, instrumented(self.model):
            yield
        self.layer_calls = {"prefill": 0, "decode": 0}
        for series in telemetry.snapshot()["metrics"].get(LAYER_CALLS.name, {"series": ()})["series"]:
            self.layer_calls[series["labels"]["phase"]] += series["value"]


@contextmanager
def instrumented(model: Module) -> Iterator[None]:
    """mlx_lm with our hooks in it."""
    integration.instrument(model=model)
    try:
        yield
    finally:
        integration.uninstrument()


@contextmanager
def tolist() -> Iterator[None]:
    """The synchronous form: the ids are on the host before the layer goes on."""
    original = SwitchGLU.__call__
    SwitchGLU.__call__ = tolist_call(original)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SwitchGLU.__call__ = original  # type: ignore[method-assign]


def tolist_call(original: Callable[..., mx.array]) -> Callable[[SwitchGLU, mx.array, mx.array], mx.array]:
    """A `__call__` that reads the ids first."""

    def reading(self: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        indices.tolist()
        return original(self, x, indices)

    return reading


def build(options: argparse.Namespace) -> Module:
    """The model, its weights made on the device a layer at a time."""
    mx.random.seed(0)
    model = qwen3_moe.Model(
        qwen3_moe.ModelArgs(
            model_type="qwen3_moe",
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            intermediate_size=options.moe_intermediate,
            num_attention_heads=options.heads,
            num_experts=options.experts,
            num_experts_per_tok=options.top_k,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=options.moe_intermediate,
            rms_norm_eps=1e-6,
            vocab_size=options.vocab,
            num_key_value_heads=options.kv_heads,
            head_dim=options.head_dim,
            rope_theta=1e6,
            tie_word_embeddings=False,
            max_position_embeddings=40960,
            norm_topk_prob=True,
        )
    )
    model.set_dtype(mx.bfloat16 if on_gpu() else mx.float32)  # gathered matrix products on a CPU take no other
    if options.quantize:
        quantize(model, group_size=64, bits=4, class_predicate=partial(_quantized, model.quant_predicate))
    for layer in model.layers:
        mx.eval(layer.parameters())
        mx.clear_cache()
    mx.eval(model.parameters())
    model.eval()
    return model


def _quantized(predicate: Callable[[str, Module], Any], path: str, module: Module) -> Any:
    return hasattr(module, "to_quantized") and predicate(path, module)


def on_gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)
