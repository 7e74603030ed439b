"""The shape of the demo's model, and what follows from it alone."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass

FORMAT_VERSION = 1
"""Raised whenever the bytes of a blob would differ for the same configuration and seed."""

FLOAT_BYTES = 4


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer over bytes with a routed MLP in every layer.

    An expert is a gated MLP: ``w_in`` (width, 2 * hidden), gate and value side by side, and ``w_out``
    (hidden, width), float32, stored one behind the other. `residual_scale` is the size of what attention and
    experts add, against a residual stream whose rms is about 1: below 1, as in a trained model, a layer's input
    resembles the next one's, which is what a predictor lives on, and depth does not blow the stream up.
    """

    layers: int = 12
    experts: int = 64
    top_k: int = 4
    width: int = 128
    hidden: int = 256
    heads: int = 4
    vocab: int = 256
    prefill_chunk: int = 4
    verify_tokens: int = 3
    residual_scale: float = 0.5

    @property
    def w_in_size(self) -> int:
        """Elements of an expert's ``w_in``."""
        return self.width * 2 * self.hidden

    @property
    def w_out_size(self) -> int:
        """Elements of an expert's ``w_out``."""
        return self.hidden * self.width

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert on disk and in a slot."""
        return (self.w_in_size + self.w_out_size) * FLOAT_BYTES

    @property
    def blob_bytes(self) -> int:
        """Bytes of one layer's blob."""
        return self.experts * self.expert_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all blobs."""
        return self.layers * self.blob_bytes

    @property
    def largest_union(self) -> int:
        """The most distinct experts one pass can need in one layer."""
        return min(self.experts, self.top_k * max(self.prefill_chunk, self.verify_tokens))

    def key(self, seed: int) -> str:
        """A name for the weights that this configuration and `seed` give."""
        text = repr((FORMAT_VERSION, seed, *astuple(self)))
        return f"moe-{self.layers}x{self.experts}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
