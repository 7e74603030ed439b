"""generate_step and speculative_generate_step: which passes read the prompt, what a token took, what a request was.

Both yield one token at a time, and wait for it inside. A prefill chunk is evaluated before the next call of a model.
Only generate_step's last prompt token is not: its pass is done when the first token is, with the pass for the second
under way behind it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from functools import wraps
from time import perf_counter
from typing import Any

from moe_telemetry.hooks import Phase

from .passes import State
from .patches import Function
from .threads import Work

Tokens = Generator[Any, Any, Any]


class Generation:
    """One run of generate_step. A request of its own, from its first resumption to its last token."""

    def __init__(self, state: State, models: list[Any], drafts: list[Any], prompt: int | None) -> None:
        self._state = state
        self._models = models
        self._drafts = drafts
        self._prompt = prompt  # tokens; None if they are not known: then no phases are either
        self._read = 0
        self._chunk: tuple[int, float] | None = None  # length and begin of the prompt's pass that is not done
        self._decoding = 0  # length of the decode pass begun since the last token
        self._arrival, state.thread.arrival = state.thread.arrival, None
        self._began: float | None = None
        self._since = 0.0  # when the time began that the next decode pass is charged with
        self._first: float | None = None
        self._last = 0.0
        self._tokens = 0
        self._outer: Work | None = None

    # -- passes ------------------------------------------------------------------------------------------------

    def is_draft(self, model: object) -> bool:
        return bool(self._drafts) and any(model is draft for draft in self._drafts)

    def begins(self, model: object, sequences: int, length: int, now: float) -> Phase | None:
        if self._prompt is None or not any(model is own for own in self._models):
            return None
        if self._read < self._prompt:
            self._close(now)
            self._read += length
            self._chunk = (length, now)
            return Phase.PREFILL
        self._decoding = length
        return Phase.DECODE

    def _close(self, now: float) -> None:
        """The prompt's last pass has been evaluated."""
        if self._chunk is not None:
            (length, began), self._chunk = self._chunk, None
            self._since = now
            self._state.done(Phase.PREFILL, length, now - began)
            self._state.recorder.tokens(length, Phase.PREFILL)

    # -- what the generator does -------------------------------------------------------------------------------

    def resumed(self) -> None:
        now = perf_counter()
        if self._began is None:
            self._began = now if self._arrival is None else self._arrival
        self._since = now

    def yielded(self, item: Any) -> None:
        now = perf_counter()
        self._evaluated(now)
        self._tokens += 1
        self._state.recorder.tokens(1, Phase.DECODE)
        self._last = now
        if self._first is None:
            self._first = now

    def _evaluated(self, now: float) -> None:
        if self._chunk is not None:
            self._close(now)
        elif self._decoding:
            self._state.done(Phase.DECODE, self._decoding, now - self._since)
        self._decoding = 0
        self._state.abandon()

    def returned(self) -> None:
        """Nothing comes any more: a prompt that was only read, as mlx_lm.cache_prompt does, has been evaluated."""
        if self._chunk is not None:
            self._close(perf_counter())
        self._state.abandon()

    def failed(self) -> None:
        """The model raised: a pass in progress is not one any more."""
        self._state.abandon()

    def ended(self) -> None:
        """It returned, raised or was closed. The time behind the last token is the consumer's, and not counted."""
        if self._began is None:
            return
        end = perf_counter() if self._first is None else self._last
        first = None if self._first is None else self._first - self._began
        self._state.request(first, end - self._began, self._tokens)

    def enter(self) -> None:
        thread = self._state.thread
        self._outer, thread.work = thread.work, self
        self._state.guarded("forward", self.resumed)

    def leave(self, hook: str, tell: Callable[..., None], *args: Any) -> None:
        thread = self._state.thread
        if thread.work is self:  # not so if an interrupt came before it was entered
            thread.work, self._outer = self._outer, None
        self._state.guarded(hook, tell, *args)

    def close(self) -> None:
        thread = self._state.thread
        if thread.work is self:  # an interrupt came in the middle of leaving
            thread.work, self._outer = self._outer, None
        if thread.work is None:
            self._state.abandon()
        self._state.guarded("request", self.ended)


class Speculation(Generation):
    """One run of speculative_generate_step. Verify passes are decode; the first reads the last prompt token, too."""

    def __init__(self, state: State, models: list[Any], drafts: list[Any], prompt: int | None) -> None:
        super().__init__(state, models, drafts, prompt)
        self._proposed: int | None = None  # by the verify pass of which not all is known yet
        self._accepted = 0

    def begins(self, model: object, sequences: int, length: int, now: float) -> Phase | None:
        self._close(now)
        if self.is_draft(model) or self._prompt is None or not any(model is own for own in self._models):
            return None
        if self._read + length < self._prompt:
            self._read += length
            self._chunk = (length, now)
            return Phase.PREFILL
        self._decoding = length
        self._proposed = length - max(1, self._prompt - self._read)
        self._accepted = 0
        return Phase.DECODE

    def _evaluated(self, now: float) -> None:
        verified = self._decoding
        super()._evaluated(now)
        if verified and self._prompt is not None and self._read < self._prompt:
            self._state.recorder.tokens(self._prompt - self._read, Phase.PREFILL)
            self._read = self._prompt

    def yielded(self, item: Any) -> None:
        super().yielded(item)
        if self._proposed is None:
            return
        if item[2]:
            self._accepted += 1
        else:  # the model's own token: it has stopped accepting
            self._settle(self._proposed)

    def ended(self) -> None:
        """Closed in the middle of accepted drafts, nobody knows what became of the others."""
        if self._proposed is not None and self._accepted:
            self._state.guarded("speculation", self._settle, self._accepted)
        super().ended()

    def _settle(self, proposed: int) -> None:
        accepted, self._accepted, self._proposed = self._accepted, 0, None
        if proposed:
            self._state.recorder.speculation(proposed, accepted)


def watch_generation(state: State, kind: type[Generation] = Generation) -> Callable[[Function], Function]:
    """What makes of generate_step (or with Speculation, speculative_generate_step) one that is recorded."""

    def make(original: Function) -> Function:
        @wraps(original)
        def generate_step(*args: Any, **kwargs: Any) -> Tokens:
            tokens: Tokens = original(*args, **kwargs)
            told = state.guarded("request", _arguments, original, args, kwargs) or {}
            generation = state.guarded("request", _generation, state, kind, told)
            return tokens if generation is None or not state.on else _watched(tokens, generation)

        return generate_step

    return make


def _arguments(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return inspect.signature(original).bind(*args, **kwargs).arguments


def _generation(state: State, kind: type[Generation], told: dict[str, Any]) -> Generation:
    models = state.bind(told.get("model"))
    drafts = state.bind(told["draft_model"], drafts=True) if "draft_model" in told else []
    prompt: int | None = None
    read = told.get("input_embeddings")
    if read is None:
        read = told.get("prompt")
    if any(draft is model for draft in drafts for model in models):
        drafts = []  # nobody can tell the calls of the one from the other's
    elif read is not None:
        prompt = len(read)
    return kind(state, models, drafts, prompt)


def _watched(tokens: Tokens, generation: Generation) -> Tokens:
    """Run a generator as it stands: what is sent, thrown and returned goes through."""
    sent: Any = None
    thrown: BaseException | None = None
    try:
        while True:
            try:
                generation.enter()
                item = tokens.send(sent) if thrown is None else tokens.throw(thrown)
            except StopIteration as stop:
                generation.leave("forward", generation.returned)
                return stop.value
            except BaseException:
                generation.leave("forward", generation.failed)
                raise
            else:
                generation.leave("tokens", generation.yielded, item)
            finally:
                thrown = None  # its traceback has this frame
            try:
                sent = yield item
            except GeneratorExit:
                raise
            except BaseException as error:
                sent, thrown = None, error
            item = None  # no array lives longer than it would
    finally:
        try:
            tokens.close()
        finally:
            generation.close()
