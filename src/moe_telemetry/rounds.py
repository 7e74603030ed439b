"""Replies made for many at once: fifty clients that scrape together cost two collections and not fifty."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Reply = TypeVar("Reply")

REST = 4.0
"""A round is followed by so many times its CPU time without one: making replies takes a fifth of a processor at most,
however many ask, and the inference keeps the interpreter lock."""
REST_PER_ASKER = 0.001
"""Seconds of rest more for each one who shared it, since each answer has to be parsed for and sent."""
REST_MOST = 0.25
"""Seconds: whoever asks alone shall not notice."""


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
            rest = min(REST * (time.thread_time() - begin) + REST_PER_ASKER * (mine.askers - 1), REST_MOST)
            with self._changed:
                mine.done, self._making = True, False
                self._rests_until = time.monotonic() + rest
                self._changed.notify_all()
