"""Switching a recorder on and off, and between the variants of the live hooks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from . import hooks
from .hooks import HOOKS, Recorder
from .live import LiveRecorder, ThreadedRecorder
from .settings import ConfigurationError
from .store import Store

_lock = threading.RLock()
"""Re-entrant: a signal handler may call a hook while its thread is in one."""
_feeding = threading.RLock()
"""Held while `_feeds` and what its recorders write to change together; re-entrant for the same reason."""


def _locked(name: str) -> Callable[..., None]:
    hook = getattr(LiveRecorder, name)

    @wraps(hook)
    def record(*args: Any, **kwargs: Any) -> None:
        with _lock:
            hook(*args, **kwargs)

    return record


class LockedRecorder(ThreadedRecorder):
    """The hooks on an interpreter without a global lock: increments are not atomic there."""

    __slots__ = ()


for _name in HOOKS:
    setattr(LockedRecorder, _name, _locked(_name))


def hook_lock() -> threading.RLock:
    """The lock that hooks hold where an interpreter has none of its own; another one in a forked child."""
    return _lock


def needs_lock() -> bool:
    """Whether threads of this interpreter run Python code at the same time."""
    enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return not enabled()


def attach(recorder: Recorder, store: Store, locked: bool | None = None) -> None:
    """Turn the recorder on, writing to `store`; `locked` overrides the choice of the variant."""
    with _lock:
        if type(recorder) is LiveRecorder:
            recorder._store.latest = recorder._row  # where the telemetry that loses the recorder goes on later
        variant: type[LiveRecorder] = ThreadedRecorder if store.by_thread else LiveRecorder
        if needs_lock() if locked is None else locked:
            variant = LockedRecorder
            store.lock = _lock
        recorder.__class__ = Recorder  # off for a moment: no event may find one telemetry's row, another's store
        recorder._store = store
        recorder._row = store.latest
        recorder.__class__ = variant
    _tell_followers(recorder)


def detach(recorder: Recorder) -> None:
    """Turn the recorder off."""
    with _lock:
        recorder.__class__ = Recorder
    _tell_followers(recorder)


def drain(recorder: Recorder) -> None:
    """Count what `routed_array` holds back of the calling thread's passes, waiting for the device."""
    if type(recorder) is not Recorder:
        recorder._store.drain()


@dataclass(frozen=True, eq=False)
class _Feed:
    recorder: Recorder
    store: Store
    locked: bool | None


_feeds: list[_Feed] = []
"""Whoever wants to be written to, the latest last: a recorder writes to the last one that has it."""


def check(recorder: object) -> None:
    """ConfigurationError for what is no recorder, or of a class of its own, which cannot be swapped."""
    if type(recorder) not in (Recorder, LiveRecorder, ThreadedRecorder, LockedRecorder):
        kind = "its subclass " if isinstance(recorder, Recorder) else ""
        raise ConfigurationError(f"recorder must be a moe_telemetry.Recorder, not {kind}{type(recorder).__name__}")


def feed(recorder: Recorder, store: Store, locked: bool | None = None) -> Callable[[], None]:
    """Let the recorder write to `store` until the function returned is called.

    Then it goes on writing to the latest store that is still to be fed, if it wrote to this one; or is off.
    """
    check(recorder)
    this = _Feed(recorder, store, locked)
    with _feeding:
        attach(recorder, store, locked)
        _feeds.append(this)

    def end() -> None:
        with _feeding:
            if this not in _feeds:
                return
            before = _latest(recorder)
            _feeds.remove(this)
            latest = _latest(recorder)
            if latest is None:
                detach(recorder)
            elif before is this:
                attach(recorder, latest.store, latest.locked)

    return end


def _latest(recorder: Recorder) -> _Feed | None:
    return next((feed for feed in reversed(_feeds) if feed.recorder is recorder), None)


def abandon() -> None:
    """In a forked child: nothing is fed any more. What the device still has stays there: MLX's threads are gone."""
    for each in _feeds:
        detach(each.recorder)
        each.store.routers.clear()
        each.store.orphans.clear()
    _feeds.clear()


_followers: list[Callable[[Store | None], None]] = []


def follow(follower: Callable[[Store | None], None]) -> None:
    """Tell `follower` of the store that the global recorder writes to, now and at every change; None: off."""
    _followers.append(follower)
    follower(_store_of(hooks.recorder))


def _tell_followers(recorder: Recorder) -> None:
    if recorder is hooks.recorder:
        for follower in _followers:
            follower(_store_of(recorder))


def _store_of(recorder: Recorder) -> Store | None:
    return None if type(recorder) is Recorder else recorder._store


def _renew_locks() -> None:
    """In a forked child: the locks may have been held by a thread that does not exist here."""
    global _lock, _feeding
    _lock, _feeding = threading.RLock(), threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
