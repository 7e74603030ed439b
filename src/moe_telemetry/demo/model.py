"""The resident part of the transformer: embedding, attention, norms, gates and head, with weights from the seed.

Shapes: T tokens of one sequence, width D, heads H, head dimension d, E experts, k of them per token.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_flatten

from .config import FORMAT_VERSION, ModelConfig

GATE_BIAS = 1.1
"""Spread of the experts' mean logits, which makes some experts hot.

The decode hit rate at 16 slots follows it: 0.82 at 0.6, 0.90 at 1.1, 0.94 at 1.5.
"""
GATE_GAIN = 1.5
"""Spread of one expert's logit over tokens."""


class KVCache:
    """Keys and values of one layer, (1, H, tokens, d) each."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.length = 0

    def extend(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a pass' keys and values, (1, H, T, d), and return all."""
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values, self.length = keys, values, keys.shape[2]
        return keys, values

    def trim(self, tokens: int) -> None:
        """Forget the newest `tokens`: the drafts that a verify pass rejected."""
        if tokens and self.keys is not None and self.values is not None:
            self.length -= tokens
            self.keys, self.values = self.keys[:, :, : self.length], self.values[:, :, : self.length]


class Attention(Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads = config.heads
        self.scale = float((config.width // config.heads) ** -0.5)
        self.qkv = Linear(config.width, 3 * config.width, bias=False)
        self.out = Linear(config.width, config.width, bias=False)
        self.rope = RoPE(config.width // config.heads)

    def __call__(self, x: mx.array, cache: KVCache) -> mx.array:
        """(T, D) to (T, D); `cache` grows by T."""
        tokens, width = x.shape
        split = self.qkv(x).reshape(1, tokens, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        offset = cache.length
        keys, values = cache.extend(self.rope(split[1], offset=offset), split[2])
        y = mx.fast.scaled_dot_product_attention(
            self.rope(split[0], offset=offset),
            keys,
            values,
            scale=self.scale,
            mask="causal" if tokens > 1 else None,
        )
        out: mx.array = self.out(y.transpose(0, 2, 1, 3).reshape(tokens, width))
        return out


class Layer(Module):
    """Attention, and the norm and gate of the routed MLP whose experts live on disk."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.top_k = config.top_k
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.width)
        self.gate = Linear(config.width, config.experts)

    def attend(self, h: mx.array, cache: KVCache) -> mx.array:
        """The residual stream after attention, (T, D)."""
        return h + self.attention(self.attention_norm(h), cache)

    def choose(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The k experts per token for the normed stream `x` (T, D): ids (T, k) ascending by logit, logits (T, k)."""
        logits = self.gate(x)
        ids = mx.argsort(logits, axis=-1)[:, -self.top_k :]
        return ids, mx.take_along_axis(logits, ids, axis=-1)


class ResidentModel(Module):
    """All that stays in memory, about 4 MB at the default configuration."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding = Embedding(config.vocab, config.width)
        self.layers = [Layer(config) for _ in range(config.layers)]
        self.norm = RMSNorm(config.width)
        self.head = Linear(config.width, config.vocab, bias=False)
        self._draw_weights(config, seed)

    def _draw_weights(self, config: ModelConfig, seed: int) -> None:
        """Draw every weight but the norms' ones, in order of name."""
        random = np.random.default_rng([seed, FORMAT_VERSION])
        scales = {
            "embedding.weight": 1.0,
            "attention.out.weight": config.residual_scale * config.width**-0.5,
            "gate.weight": GATE_GAIN * config.width**-0.5,
            "gate.bias": GATE_BIAS,
        }
        drawn: list[tuple[str, mx.array]] = []
        parameters = self.parameters()  # type: ignore[no-untyped-call]
        for name, old in sorted(dict(tree_flatten(parameters)).items()):
            if "norm" in name:
                continue
            scale = next((s for suffix, s in scales.items() if name.endswith(suffix)), config.width**-0.5)
            drawn.append((name, mx.array(random.standard_normal(old.shape, dtype=np.float32) * np.float32(scale))))
        self.load_weights(drawn, strict=False)
        mx.eval([weights for _, weights in drawn])

    def logits(self, h: mx.array) -> mx.array:
        """Next-byte logits (T, vocab) of the stream (T, D)."""
        out: mx.array = self.head(self.norm(h))
        return out
