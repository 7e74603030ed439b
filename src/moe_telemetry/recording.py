"""Switching a recorder on and off, and between the variants of the live hooks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from . import hooks
from .hooks import HOOKS, Recorder
from .live import LiveRecorder, ThreadedRecorder
from .store import Store

_lock = threading.RLock()
"""Re-entrant: a signal handler may call a hook while its thread is in one."""


def _locked(name: str) -> Callable[..., None]:
    hook = getattr(LiveRecorder, name)

    @wraps(hook)
    def record(*args: Any, **kwargs: Any) -> None:
        with _lock:
            hook(*args, **kwargs)

    return record


class LockedRecorder(ThreadedRecorder):
    """The hooks on an interpreter without a global lock: increments are not atomic there (design D13)."""

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


def renew_lock() -> None:
    """In a forked child: the lock may have been held by a thread that does not exist here."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
