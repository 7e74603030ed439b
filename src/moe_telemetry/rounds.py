"""Replies made for many at once: fifty clients that scrape together cost two collections and not fifty."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Reply = TypeVar("Reply")

SHARE = 0.1
"""Of a processor that making replies may take for long, however many ask: the inference needs the interpreter lock."""
BURST = 0.05
"""Seconds of processor time that may be taken at once: who asks now and then never waits."""
PER_ASKER = 0.0005
"""Seconds counted for each further one who shares a reply, who has to be listened and answered to."""
REST_MOST = 0.3
"""Seconds of rest between two replies: who asks when one has just begun waits for the rest and for two replies."""


class _Round(Generic[Reply]):
    def __init__(self) -> None:
        self.wanted: dict[Hashable, Callable[[], Reply]] = {}
        self.made: dict[Hashable, Reply] = {}
        self.askers = 0
        self.done = False


class Rounds(Generic[Reply]):
    """Whoever asks while a round is being made gets a reply of the next one.

    So a reply holds everything that was recorded before it was asked for, and no two are made at a time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: _Round[Reply] = _Round()
        self._making = False
        self._taken = 0.0  # processor time, of which SHARE is forgotten in each second
        self._at = time.monotonic()
        self._rests_until = 0.0

    def ask(self, key: Hashable, make: Callable[[], Reply], seconds: float) -> Reply:
        """The reply of that key: `make` is called once a round and key, in the thread of one of those who ask.

        Raises:
            TimeoutError: the round did not come within `seconds`, or ended without this reply.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            mine = self._next
            mine.wanted.setdefault(key, make)
            mine.askers += 1
            leads = self._wait(mine, deadline)
        if leads:
            self._make(mine)
        if key not in mine.made:
            raise TimeoutError("the round did not make this reply")
        return mine.made[key]

    def _wait(self, mine: _Round[Reply], deadline: float) -> bool:
        """Until the round is done; True when the caller is to make it."""
        while not mine.done:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError("the round before did not end")
            until = deadline
            if mine is self._next and not self._making:
                if now >= self._rests_until:
                    self._next, self._making = _Round(), True
                    return True
                until = min(deadline, self._rests_until)
            self._changed.wait(until - now)
        return False

    def _make(self, mine: _Round[Reply]) -> None:
        begin = time.thread_time()
        try:
            for key, make in mine.wanted.items():
                mine.made[key] = make()
        finally:
            cost = time.thread_time() - begin + PER_ASKER * (mine.askers - 1)
            with self._changed:
                now = time.monotonic()
                left = max(0.0, self._taken - SHARE * (now - self._at))
                self._taken, self._at = min(left + cost, BURST + SHARE * REST_MOST), now
                self._rests_until = now + max(0.0, self._taken - BURST) / SHARE
                mine.done, self._making = True, False
                self._changed.notify_all()
