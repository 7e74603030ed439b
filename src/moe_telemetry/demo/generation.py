"""Requests over a text: prefill in chunks, then single-token decode and verify passes, each pass on the recorder."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from moe_telemetry import Phase
from moe_telemetry import recorder as rec

from .config import ModelConfig
from .faults import Fault
from .model import KVCache, ResidentModel
from .moe import StreamedExperts
from .prefetch import Prefetcher
from .text import BigramDraft, LoopedText

PROMPT_TOKENS = 48
RESPONSE_TOKENS = 96
"""Decoded tokens of a request. The context is dropped behind it and a new prompt begins: the KV cache is bounded."""


@dataclass(frozen=True)
class Step:
    """One forward pass: the `tokens` of `text` it accepted, and what the model predicted behind each."""

    phase: Phase
    tokens: int
    seconds: float
    text: bytes
    predicted: bytes


@dataclass
class RunResult:
    """What a run did. `digest` is of every output byte, `final_logits` of the last decoded token's logits."""

    decoded: int = 0
    prefilled: int = 0
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    digest: str = ""
    final_logits: str = ""


class Generation:
    """Follows the text: the next input is the text's next byte, whatever the model predicted.

    Free-running greedy decode of a random model soon repeats one byte, and with it one set of experts. For the same
    reason a draft is accepted as far as it agrees with the text, not with the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: ResidentModel,
        experts: StreamedExperts,
        prefetcher: Prefetcher | None,
        fault: Fault,
        text: LoopedText,
        draft: BigramDraft,
    ) -> None:
        self._config = config
        self._model = model
        self._experts = experts
        self._prefetcher = prefetcher
        self._fault = fault
        self._text = text
        self._draft = draft
        self._caches: list[KVCache] = []

    def run(self, tokens: int | None, stop: threading.Event, on_step: Callable[[Step], None]) -> RunResult:
        """Serve requests until `tokens` are decoded or `stop` is set."""
        self._result = RunResult()
        self._digest = hashlib.sha256()
        self._last = b""
        self._on_step = on_step
        while not stop.is_set() and (tokens is None or self._result.decoded < tokens):
            left = RESPONSE_TOKENS if tokens is None else min(RESPONSE_TOKENS, tokens - self._result.decoded)
            self._serve(left, stop)
        self._result.digest = self._digest.hexdigest()
        self._result.final_logits = hashlib.sha256(self._last).hexdigest()
        return self._result

    def _serve(self, response: int, stop: threading.Event) -> None:
        """One request: a prompt, then `response` decoded tokens. A request cut short by `stop` is not recorded."""
        began = time.perf_counter()
        self._caches = [KVCache() for _ in range(self._config.layers)]
        for start in range(0, PROMPT_TOKENS, self._config.prefill_chunk):
            if stop.is_set():
                return
            self._prefill(min(self._config.prefill_chunk, PROMPT_TOKENS - start))
        first: float | None = None
        done = 0
        while done < response:
            if stop.is_set():
                return
            done += self._decode(response - done)
            if first is None:
                first = time.perf_counter() - began
        rec.request(first, time.perf_counter() - began, response)

    def _prefill(self, tokens: int) -> None:
        chunk = self._text.peek(tokens)
        seconds, logits = self._forward(chunk, Phase.PREFILL)
        rec.tokens(tokens, Phase.PREFILL)
        self._result.prefilled += tokens
        self._emit(Phase.PREFILL, chunk, logits, seconds)

    def _decode(self, at_most: int) -> int:
        """One pass over the text's next byte and, where the draft is sure, the bytes it proposes behind it."""
        proposed: list[int] = []
        if at_most >= self._config.verify_tokens:
            proposed = self._draft.propose(self._text.peek(1)[0], self._config.verify_tokens - 1)
        actual = self._text.peek(1 + len(proposed))
        seconds, logits = self._forward([actual[0], *proposed], Phase.DECODE)
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == actual[accepted + 1]:
            accepted += 1
        if proposed:
            for cache in self._caches:
                cache.trim(len(proposed) - accepted)
            rec.speculation(len(proposed), accepted)
        emitted = 1 + accepted
        rec.tokens(emitted, Phase.DECODE)
        self._result.decoded += emitted
        self._last = logits[emitted - 1].tobytes()
        self._emit(Phase.DECODE, actual[:emitted], logits, seconds)
        return emitted

    def _emit(self, phase: Phase, text: Sequence[int], logits: np.ndarray, seconds: float) -> None:
        """Account for a pass whose first ``len(text)`` rows of `logits` count."""
        predicted = bytes(logits[: len(text)].argmax(axis=-1).tolist())
        self._digest.update(predicted)
        self._text.advance(len(text))
        self._result.seconds[phase] += seconds
        self._on_step(Step(phase, len(text), seconds, bytes(text), predicted))

    def _forward(self, tokens: Sequence[int], phase: Phase) -> tuple[float, np.ndarray]:
        """A pass over `tokens`; its seconds and logits (T, vocab)."""
        self._fault.tick()
        rec.forward(len(tokens), phase)
        began = time.perf_counter()
        h = self._model.embedding(mx.array(list(tokens), dtype=mx.uint32))
        mx.eval(h)
        for layer, block in enumerate(self._model.layers):
            if self._prefetcher is not None:
                self._prefetcher.look_ahead(layer, h, phase)
            h = block.attend(h, self._caches[layer])
            mx.eval(h)
            h = self._experts(layer, h)
        logits = self._model.logits(h)
        mx.eval(logits)
        seconds = time.perf_counter() - began
        rec.forward_done(seconds)
        return seconds, np.array(logits)
