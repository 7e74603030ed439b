"""Scrapes each endpoint in a thread of its own, at an interval, whatever becomes of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from moe_telemetry.client import ClientError

from .scrape import Reader, Scrape

Outcome = Scrape | ClientError
Read = Callable[[], Scrape]
Answer = TypeVar("Answer")


def attempt(read: Callable[[], Answer]) -> Answer | ClientError:
    """An answer, or why there is none; raises no Exception."""
    try:
        return read()
    except ClientError as error:
        return error
    except Exception as error:  # a fault of ours must not end the watching
        return ClientError(f"{type(error).__name__}: {error}"[:200])


class Poller:
    """Hands each outcome to `take(number of the endpoint, outcome)`, which is called in that endpoint's thread."""

    def __init__(
        self,
        bases: Sequence[str],
        interval: float,
        take: Callable[[int, Outcome], object],
        reader: Callable[[str], Read] = Reader,
    ) -> None:
        self._readers = [reader(base) for base in bases]
        self._interval = interval
        self._take = take
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin; the first scrapes are at once."""
        for number, read in enumerate(self._readers):
            # Daemons: quitting does not wait for an endpoint that keeps its answer back.
            threading.Thread(target=self._poll, args=(number, read), name=f"top-{number}", daemon=True).start()

    def stop(self) -> None:
        """End after the scrapes in progress, whose outcomes are dropped."""
        self._ended.set()

    def _poll(self, number: int, read: Read) -> None:
        due = time.monotonic()
        while not self._ended.is_set():
            outcome = attempt(read)
            if self._ended.is_set():
                return
            self._take(number, outcome)
            # Behind a late answer the next interval is a short one, but never so short that its rates mean nothing.
            due = max(due + self._interval, time.monotonic() + self._interval / 2)
            self._ended.wait(due - time.monotonic())
