"""BatchGenerator: chunks of several prompts, decode steps of several sequences, and the requests among them.

A batch yields what it has waited for with the pass for the next tokens already under way: a step lasts as long as its
call, and the pass over the last prompt tokens, which nobody waits for where it is made, has no duration of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from functools import wraps
from time import perf_counter
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from moe_telemetry.hooks import Phase

from .passes import State
from .patches import Function, argument


class _BatchWork:
    """Passes of one call on a batch."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.began = perf_counter()

    def is_draft(self, model: object) -> bool:
        return False

    def run(self, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the original with its passes known as these."""
        thread = self._state.thread
        outer, thread.work = thread.work, self
        try:
            result = original(*args, **kwargs)
            self._state.guarded("tokens", self.returned, result)
            return result
        finally:
            thread.work = outer
            if thread.store is not None:  # `abandon`, at which an interrupt would leave it
                thread.store.active.pop(thread.ident, None)
                thread.store = None

    def begins(self, model: object, sequences: int, length: int, now: float) -> Phase | None:
        raise NotImplementedError

    def returned(self, result: Any) -> None:
        """What the call says, once it has come back."""
        raise NotImplementedError


class _Prompts(_BatchWork):
    """PromptProcessingBatch.prompt: chunks of prompts padded on the right to one length, each evaluated at once."""

    def __init__(self, state: State, lengths: list[int]) -> None:
        super().__init__(state)
        self._lengths = lengths
        self._read = 0
        self._chunk: tuple[int, int, float] | None = None  # length, tokens that are not padding, begin

    def begins(self, model: object, sequences: int, length: int, now: float) -> Phase | None:
        self._close(now)
        tokens = sum(min(max(prompt - self._read, 0), length) for prompt in self._lengths)
        self._read += length
        self._chunk = (length, tokens, now)
        return Phase.PREFILL

    def returned(self, result: Any) -> None:
        self._close(perf_counter())

    def _close(self, now: float) -> None:
        if self._chunk is not None:
            (length, tokens, began), self._chunk = self._chunk, None
            self._state.done(Phase.PREFILL, length, now - began)
            self._state.recorder.tokens(tokens, Phase.PREFILL)


class _LastPromptTokens(_BatchWork):
    """GenerationBatch.__init__: the last token of each prompt."""

    _tokens = 0

    def begins(self, model: object, sequences: int, length: int, now: float) -> Phase | None:
        self._tokens += sequences * length
        return Phase.PREFILL

    def returned(self, result: Any) -> None:
        if self._tokens:
            self._state.recorder.tokens(self._tokens, Phase.PREFILL)


class _Step(_BatchWork):
    """GenerationBatch.next: a token for each sequence."""

    _length = 0

    def begins(self, model: object, sequences: int, length: int, now: float) -> Phase | None:
        self._length = length
        return Phase.DECODE

    def returned(self, result: Any) -> None:
        if self._length:
            self._state.done(Phase.DECODE, self._length, perf_counter() - self.began)
        self._state.recorder.tokens(len(result), Phase.DECODE)


class _Request:
    __slots__ = ("began", "first", "tokens")

    def __init__(self, began: float) -> None:
        self.began = began
        self.first: float | None = None
        self.tokens = 0


class Batches:
    """The patches of BatchGenerator and its batches, and the requests that are under way."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._requests: MutableMapping[Any, dict[int, _Request]] = WeakKeyDictionary()

    def watch(self, module: ModuleType | None) -> None:
        """Patch the classes of mlx_lm.generate."""
        replace = self._state.patches.replace
        replace(module, "PromptProcessingBatch.prompt", self._prompt)
        replace(module, "GenerationBatch.__init__", self._init)
        replace(module, "GenerationBatch.next", self._next_of_batch)
        replace(module, "BatchGenerator.insert_segments", self._insert)
        replace(module, "BatchGenerator._next", self._next)
        replace(module, "BatchGenerator.remove", self._remove)

    # -- batches -----------------------------------------------------------------------------------------------

    def _prompt(self, original: Function) -> Function:
        state, tokens = self._state, argument(original, "tokens", 0)

        def work(batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _BatchWork:
            state.know(batch.model)
            return _Prompts(state, [len(prompt) for prompt in tokens(args, kwargs)])

        return self._working(original, work)

    def _init(self, original: Function) -> Function:
        return self._working(original, lambda *_: _LastPromptTokens(self._state))

    def _next_of_batch(self, original: Function) -> Function:
        state = self._state

        def work(batch: Any, *_: Any) -> _BatchWork:
            state.know(batch.model)
            return _Step(state)

        return self._working(original, work)

    def _working(self, original: Function, work: Callable[..., _BatchWork]) -> Function:
        state = self._state

        @wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            passes = state.guarded("forward", work, self, args, kwargs) if state.on else None
            return original(self, *args, **kwargs) if passes is None else passes.run(original, (self, *args), kwargs)

        return call

    # -- requests ----------------------------------------------------------------------------------------------

    def _insert(self, original: Function) -> Function:
        state, begin = self._state, self._begin

        @wraps(original)
        def insert_segments(self: Any, *args: Any, **kwargs: Any) -> Any:
            arrival, state.thread.arrival = state.thread.arrival, None
            now = perf_counter() if arrival is None else arrival
            uids = original(self, *args, **kwargs)
            state.guarded("request", lambda: state.bind(self.model))
            if state.on:
                state.guarded("request", begin, self, uids, now)
            return uids

        return insert_segments

    def _begin(self, generator: Any, uids: Iterable[int], now: float) -> None:
        self._requests.setdefault(generator, {}).update({uid: _Request(now) for uid in uids})

    def _next(self, original: Function) -> Function:
        state, follow, under_way = self._state, self._follow, self._requests

        @wraps(original)
        def _next(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if state.on:
                state.guarded("request", follow, self, result)
            elif under_way:  # those that end now would never be found again
                under_way.pop(self, None)
            return result

        return _next

    def _follow(self, generator: Any, result: tuple[Any, Any]) -> None:
        requests = self._requests.get(generator)
        if not requests:
            return
        now = perf_counter()
        for response in result[1]:
            request = requests.get(response.uid)
            if request is None:
                continue
            request.tokens += 1
            if request.first is None:
                request.first = now
            if response.finish_reason is not None:
                del requests[response.uid]
                first, duration = request.first - request.began, now - request.began
                self._state.request(first, duration, request.tokens, idle=not requests)

    def _remove(self, original: Function) -> Function:
        state, forget, uids = self._state, self._forget, argument(original, "uids", 0)

        @wraps(original)
        def remove(self: Any, *args: Any, **kwargs: Any) -> Any:
            removed = state.guarded("request", uids, args, kwargs)
            result = original(self, *args, **kwargs)
            state.guarded("request", forget, self, removed)
            return result

        return remove

    def _forget(self, generator: Any, uids: Any) -> None:
        """Requests that were given up are not recorded: nobody waits for their end."""
        requests = self._requests.get(generator)
        if requests:
            for uid in uids:
                requests.pop(uid, None)
            if not requests:
                self._state.idle()
