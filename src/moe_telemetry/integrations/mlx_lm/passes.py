"""Where a forward pass begins: the outermost call of a model on its thread; and the routing inside it.

A model's call builds a lazy graph and returns before anything is computed, so its own duration says nothing. What a
pass is for, and when it is done, is known to the work that makes it (generation, batches); a call outside of any work
is a pass whose phase follows from its length, without a duration.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import perf_counter
from typing import Any, TypeVar

from moe_telemetry import recording
from moe_telemetry.hooks import Phase, Recorder
from moe_telemetry.live import routed_pass
from moe_telemetry.losses import lose
from moe_telemetry.store import Store

from .binding import Binding
from .patches import Function, Patches, argument
from .threads import UNSEEN, Open, Places, Thread, shape_of

T = TypeVar("T")

OFF = Recorder()
"""In the place of the recorder once the patches are taken off: what still calls them does nothing."""


class State:
    """What the patched functions share."""

    def __init__(self, recorder: Recorder, binding: Binding) -> None:
        self.recorder = recorder
        self.binding = binding
        self.patches = Patches()
        self.thread = Thread()
        self.open: Open | None = None
        """A pass that is recorded, of some thread: what is thread-local takes longer to find, in each layer."""
        self._declared: Callable[[], Store | None] = _nothing

    @property
    def on(self) -> bool:
        """Whether anything is recorded now."""
        return type(self.recorder) is not Recorder

    def guarded(self, hook: str, function: Callable[..., T], *args: Any) -> T | None:
        """Call what is ours in the middle of what is theirs: its Exception is counted with the hook's, and ends."""
        try:
            return function(*args)
        except Exception as error:
            lose(self.recorder, hook, error)
            return None

    # -- models ------------------------------------------------------------------------------------------------

    def bind(self, given: object, drafts: bool = False) -> list[Any]:
        """Make the model known, and its passes seen; the modules that are called for one come back."""
        tops = self.binding.tops(given)
        for model in tops:
            if not self.binding.knows(model):
                self.binding.bind(model, drafts)
                if hasattr(type(model), "__call__"):  # noqa: B004  # a model that is never called itself has none
                    self.patches.replace_in(type(model), "__call__", self.watch_model)
                if self.on:
                    self.binding.declare(self.recorder._store)
        for kind in self.binding.subclasses():
            self.patches.replace_in(kind, "__call__", self.watch_subclass)
        return tops

    def know(self, model: object) -> None:
        """`bind` where it comes with every pass."""
        if not self.binding.knows(model):
            self.bind(model)

    def declare(self, store: Store) -> None:
        """Make all layers known to a telemetry that has not seen them."""
        if self._declared() is not store:
            self._declared = weakref.ref(store)
            self.binding.declare(store)

    # -- passes ------------------------------------------------------------------------------------------------

    def watch_model(self, original: Function) -> Function:
        """A model class' `__call__` that tells of passes."""
        state, thread = self, self.thread

        @wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if thread.open is not None:
                return original(self, *args, **kwargs)
            if type(state.recorder) is Recorder:
                thread.open = UNSEEN
                try:
                    return original(self, *args, **kwargs)
                finally:
                    thread.open = None
            now = thread.open = Open()
            try:
                # A pass that could not be begun has no phase, and its routing nothing to count in.
                if state.guarded("forward", state._begin, now, self, args, kwargs):
                    now.calls, now.store = [], thread.store
                    now.called = now.calls.append
                    if state.open is None:
                        state.open = now
                return original(self, *args, **kwargs)
            finally:
                # All of it before any call: where one is, an interrupt may be raised, and leave the rest as it stood.
                thread.open = None
                if state.open is now:
                    state.open = None
                if thread.work is None and thread.store is not None:  # `abandon`, at which an interrupt would leave it
                    thread.store.active.pop(now.ident, None)
                    thread.store = None
                if now.calls:
                    state.guarded("routed_array", state._hand_over, self, now)

        return __call__

    def _begin(self, opened: Open, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell the work and the recorder of a pass; whether it is one that is recorded."""
        now = perf_counter()
        self.know(model)
        self.declare(self.recorder._store)
        work = self.thread.work
        sequences, length = shape_of(args, kwargs)
        phase = None if work is None else work.begins(model, sequences, length, now)
        if work is not None and work.is_draft(model):
            return False
        self.select(phase, length)
        if phase == "decode" and (places := self.thread.places) is not None:
            opened.packing, opened.last = places.packing, places.last()
        return True

    def select(self, phase: Phase | None, length: int) -> None:
        """Begin a pass, or make one the latest again, for what is recorded next."""
        recorder = self.recorder
        self.thread.store = getattr(recorder, "_store", None)
        recorder.forward(length, phase)
        self.thread.selected = (phase, length)

    def done(self, phase: Phase, length: int, seconds: float) -> None:
        """End a pass, though another may have begun behind it, or another telemetry meanwhile."""
        if not self.on:
            return
        if self.thread.selected != (phase, length) or self.thread.store is not self.recorder._store:
            self.abandon()
            self.select(phase, length)
        self.recorder.forward_done(seconds)

    def abandon(self) -> None:
        """No pass is in progress on this thread any more, and how long the last one took is not known.

        It ends where it began, though the patches may be off by now, or another telemetry on.
        """
        store, self.thread.store = self.thread.store, None
        if store is not None:
            store.active.pop(self.thread.ident, None)

    # -- requests ----------------------------------------------------------------------------------------------

    def request(self, first: float | None, duration: float, tokens: int, idle: bool = True) -> None:
        """Record a request that has ended; `idle`: no other is under way on this thread."""
        thread = self.thread
        thread.owes = idle and thread.looks
        self.recorder.request(first, duration, tokens, idle=idle and not thread.looks)

    def idle(self) -> None:
        """Nothing is under way on this thread any more."""
        if self.thread.looks:
            self.thread.owes = True
        else:
            self.drain()

    def looking(self) -> None:
        """The thread looks for a request. A pass that is still computed belongs to no answer, and the next one's would
        wait for it as well."""
        self.thread.looks = True
        if self.thread.owes:
            self.thread.owes = False
            self.drain()

    def drain(self) -> None:
        """Have all routing of this thread counted that the device still has."""
        self.guarded("routed_array", recording.drain, self.recorder)

    # -- routing -----------------------------------------------------------------------------------------------

    def watch_switch(self, original: Function) -> Function:
        """`__call__` of SwitchGLU or SwitchMLP that hands the routing on."""
        if [*inspect.signature(original).parameters][1:] != ["x", "indices"]:
            return self.watch_subclass(original)
        state = self

        @wraps(original)
        def __call__(self: Any, x: Any, indices: Any) -> Any:  # *args would cost half as much again
            now = state.open
            if now is not None and now.ident == get_ident():
                now.called(self)
                now.kept(indices)
                if self is now.last:
                    packed = state.guarded("routed_array", state._pack, now)
                    indices = indices if packed is None else packed
            elif type(state.recorder) is not Recorder:
                state.guarded("routed_array", state._routed, self, indices)
            return original(self, x, indices)

        return __call__

    def watch_subclass(self, original: Function) -> Function:
        """The same for a class with a `__call__` of its own, of other parameters perhaps. It may call its base's, or
        that of a module that it stands for: one call is seen once."""
        state, thread, indices = self, self.thread, argument(original, "indices", 1)

        @wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(state.recorder) is Recorder:
                return original(self, *args, **kwargs)
            state.guarded("routed_array", lambda: state._routed(self, indices(args, kwargs)))
            outer, thread.routed = thread.routed, True
            mine = state.open is not None and state.open is thread.open
            if mine:
                state.open = None
            try:
                return original(self, *args, **kwargs)
            finally:
                thread.routed = outer
                if mine and state.open is None:
                    state.open = thread.open

        return __call__

    def _pack(self, now: Open) -> Any:
        """The last call's indices, of the same values: who computes them packs the whole pass' as well. None to go on
        with those.

        So only where mlx_lm's own generation makes the pass, which evaluates what it decodes, and takes no gradient.
        """
        if now.packing is None or len(now.indices) != now.packing.calls:
            return None
        found = now.packing(now.indices)
        if found is None:
            return None
        now.packed, indices = found
        return indices

    def _hand_over(self, model: Any, done: Open) -> None:
        """Record the routing of a pass."""
        if type(self.recorder) is Recorder or self.recorder._store is not done.store:
            return
        switches, indices = done.calls or (), done.indices
        places = self.thread.places
        version = self.binding.version  # before the look-up: what is bound meanwhile makes it one of before
        if places is None or places.version != version or places.ids != list(map(id, switches)):
            found = [self.binding.place(switch) or self.binding.find(switch, model) for switch in switches]
            places = self.thread.places = Places(version, switches, found, indices)
        packed = done.packed if done.packing is not None and len(switches) == done.packing.calls else None
        if places.kept is not None:
            indices, packed = [indices[at] for at in places.kept], None
        if places.experts:
            routed_pass(self.recorder, places.layers, places.experts, indices, packed)

    def _routed(self, switch: Any, indices: Any) -> None:
        now = self.thread.open
        if self.thread.routed:
            return
        if now is not None:
            if now.calls is not None:
                now.calls.append(switch)
                now.indices.append(indices)
            return
        place = self.binding.place(switch) or self.binding.find(switch, None)
        if place.experts:
            self.recorder.routed_array(place.layer, indices, place.experts)


def _nothing() -> None:
    return None
