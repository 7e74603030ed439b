"""mlx_lm.server: a request begins when it is put on the queue of the generating thread, and waits there.

The queue hands on what the handler made, and `_tokenize` gets it right before the generation begins, on its thread:
there the time of arrival is left for the generation to find. Between answers the thread looks at the queue: there the
routing is counted that the device still has, which no answer then waits for.
"""

from __future__ import annotations

import weakref
from functools import wraps
from time import perf_counter
from types import ModuleType
from typing import Any

from .binding import weakly
from .passes import State
from .patches import Function, argument


class _Arrival:
    __slots__ = ("at", "ref")

    def __init__(self, ref: weakref.ref[Any], at: float) -> None:
        self.ref = ref
        self.at = at


class Arrivals:
    """When the requests came in that wait in a queue, by the identity of their arguments."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._waiting: dict[int, _Arrival] = {}

    def watch(self, module: ModuleType | None) -> None:
        """Patch the class of mlx_lm.server."""
        self._state.patches.replace(module, "ResponseGenerator.generate", self._generate)
        self._state.patches.replace(module, "ResponseGenerator._tokenize", self._tokenize)
        self._state.patches.replace(module, "ResponseGenerator._next_request", self._next_request)

    def _generate(self, original: Function) -> Function:
        state, arrived, arguments = self._state, self._arrived, argument(original, "generation_args", 1)

        @wraps(original)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            if state.on:
                state.guarded("request", arrived, arguments, args, kwargs)
            return original(self, *args, **kwargs)

        return generate

    def _next_request(self, original: Function) -> Function:
        state = self._state

        @wraps(original)
        def _next_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            state.guarded("request", state.looking)
            return original(self, *args, **kwargs)

        return _next_request

    def _arrived(self, arguments: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made = arguments(args, kwargs)
        self._waiting[id(made)] = _Arrival(weakly(made, self._waiting), perf_counter())

    def _tokenize(self, original: Function) -> Function:
        state, taken, arguments = self._state, self._taken, argument(original, "args", 2)

        @wraps(original)
        def _tokenize(self: Any, *args: Any, **kwargs: Any) -> Any:
            state.thread.arrival = None
            arrival = state.guarded("request", taken, arguments, args, kwargs)
            result = original(self, *args, **kwargs)
            state.thread.arrival = arrival
            return result

        return _tokenize

    def _taken(self, arguments: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        made = arguments(args, kwargs)
        arrival = self._waiting.pop(id(made), None)
        return arrival.at if arrival is not None and arrival.ref() is made else None
