"""Putting the patches on and taking them off; binding models where they are loaded."""

from __future__ import annotations

import importlib
import threading
from functools import wraps
from types import ModuleType
from typing import Any

from moe_telemetry import hooks, recording
from moe_telemetry.hooks import Recorder
from moe_telemetry.store import Store

from .batches import Batches
from .binding import Binding
from .generation import Generation, Speculation, watch_generation
from .passes import OFF, State
from .patches import Function, tell_missing
from .serving import Arrivals

_lock = threading.RLock()


class _Current:
    """What is put on now. `following`: a start of telemetry tells this module, once in a process."""

    state: State | None = None
    following = False


_current = _Current()


def instrument(model: Any = None, recorder: Recorder = hooks.recorder) -> None:
    """Let mlx_lm tell `recorder` what it does, before or after models are loaded. A second call changes nothing.

    `model` is one that is loaded already and called without mlx_lm's generation: others are found when they are
    loaded or generate. What this version of mlx_lm does not have is left out, with one log line.

    Raises:
        ImportError: mlx_lm cannot be imported.
        ConfigurationError: `recorder` is none.
    """
    recording.check(recorder)
    with _lock:
        if _current.state is None:
            _current.state = _put_on(recorder)
        state = _current.state
        state.recorder = recorder
        if model is not None:
            state.guarded("forward", state.bind, model)
        if state.on:
            state.guarded("forward", state.declare, recorder._store)
        if not _current.following:
            _current.following = True
            recording.follow(_started)


def uninstrument() -> None:
    """Put mlx_lm's own functions back, and count what is outstanding of the calling thread's routing."""
    with _lock:
        state, _current.state = _current.state, None
        if state is not None:
            state.drain()
            state.recorder = OFF
            state.patches.restore()


def instrumented() -> bool:
    """Whether mlx_lm is instrumented now."""
    return _current.state is not None


def _started(store: Store | None) -> None:
    """Telemetry was started behind `instrument`: the layers are known to it from the start (D9)."""
    state = _current.state
    if store is not None and state is not None and state.recorder is hooks.recorder:
        state.guarded("forward", state.declare, store)


def _put_on(recorder: Recorder) -> State:
    try:
        importlib.import_module("mlx_lm")
        module = importlib.import_module("mlx.nn").Module
    except ImportError as error:
        raise ImportError(
            f"moe_telemetry.integrations.mlx_lm needs mlx_lm, which cannot be imported ({error}): pip install mlx-lm"
        ) from error
    layers = _part("mlx_lm.models.switch_layers")
    switches = tuple(filter(None, (getattr(layers, name, None) for name in ("SwitchGLU", "SwitchMLP"))))
    state = State(recorder, Binding(module, switches))
    replace = state.patches.replace
    try:
        replace(layers, "SwitchGLU.__call__", state.watch_switch)
        replace(layers, "SwitchMLP.__call__", state.watch_switch)
        generate = _part("mlx_lm.generate")
        replace(generate, "generate_step", watch_generation(state, Generation))
        replace(generate, "speculative_generate_step", watch_generation(state, Speculation))
        replace(_part("mlx_lm.utils"), "load_model", _watch_loading(state))
        Batches(state).watch(generate)
        Arrivals(state).watch(_part("mlx_lm.server"))
        state.patches.spread()
    except BaseException:
        state.patches.restore()
        raise
    return state


def _part(name: str) -> ModuleType | None:
    """A module of mlx_lm; `import_module`, since mlx_lm.generate as an attribute is the function of that name."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        tell_missing(f"{name} ({error})")
        return None


def _watch_loading(state: State) -> Any:
    def make(original: Function) -> Function:
        @wraps(original)
        def load_model(*args: Any, **kwargs: Any) -> Any:
            loaded = original(*args, **kwargs)
            if state.recorder is not OFF:
                state.guarded("forward", lambda: state.bind(loaded[0]))
            return loaded

        return load_model

    return make
