"""Records that a hook did not take: counted by reason, and told in one log line a minute."""

from __future__ import annotations

import time
from contextlib import suppress

from .catalog import LOST_REASONS
from .hooks import Recorder
from .store import Store, logger
from .values import Refused

LOG_INTERVAL = 60.0
"""Seconds between two log lines about lost records."""


def lose(recorder: Recorder, hook: str, error: Exception) -> None:
    """Count a record that was not taken, and say so at most once in LOG_INTERVAL."""
    with suppress(Exception):
        lost(recorder._store, hook, error)


def lost(store: Store, hook: str, error: Exception, records: int = 1) -> None:
    """`lose`, where the store is known."""
    with suppress(Exception):  # a message that cannot be formatted or logged must not reach the caller either
        reason = _reason(hook, error)
        if reason == "error" and hook in store.hook_errors:
            store.hook_errors[hook] += 1
        store.lost[reason] += records
        now = time.monotonic()
        if now - store.logged_at >= LOG_INTERVAL:
            store.logged_at = now
            lost = sum(store.lost.values())
            detail = error.kind if isinstance(error, Refused) else _described(error)
            logger.warning("%s() dropped a record: %s (%s); %d dropped so far", hook, reason, detail, lost)


class losing:
    """A with-block of which an Exception counts as a lost record."""

    __slots__ = ("_hook", "_store")

    def __init__(self, store: Store, hook: str) -> None:
        self._store = store
        self._hook = hook

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        lost(self._store, self._hook, error)
        return True


def _reason(hook: str, error: Exception) -> str:
    """One of LOST_REASONS, whatever a caller's own code has raised: our own exception with another reason, too."""
    try:
        if isinstance(error, Refused):
            return LOST_REASONS[LOST_REASONS.index(error.reason)]
        if isinstance(error, (KeyError, TypeError)) and hook in _LABELLED:
            return "unknown_label"  # not in the table, or unhashable
    except Exception:
        return "error"
    return "error"


_LABELLED = frozenset(("prefetch", "promote", "block", "read", "prefetch_dropped", "degraded"))
"""Hooks that find their cell by a label; they read no iterable, whose own KeyError would be another matter."""


def _described(error: Exception) -> str:
    """The error for a log line. Only text is formatted: the repr of a lazy array evaluates it."""
    told = ", ".join(part if isinstance(part, str) else type(part).__name__ for part in error.args)
    return f"{type(error).__name__}: {told}"[:200]
