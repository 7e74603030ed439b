"""A disk of a known bandwidth: real reads, held back until a device that slow would have delivered."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

_STOP_CHECK_SECONDS = 0.05


class SimulatedDisk:
    """One device whose bandwidth demand and prefetch reads share, demand first.

    The page cache hands over an expert in tens of microseconds, so every prefetch would be early and a miss would
    cost nothing. Each read therefore books its time on the device and returns when that is over. A demand read
    waits for no prefetch: it pushes the one under way back by its own duration.
    """

    def __init__(self, mbps: float) -> None:
        self.bytes_per_second = mbps * 1e6
        self.slowdown = 1.0
        self.stop = threading.Event()
        """The run's own: once set, nobody wants the pace any more and waits end."""
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._demand_due = 0.0
        self._prefetch_due = 0.0

    def read_demand(self, fd: int, buffers: Sequence[memoryview], offset: int) -> float:
        """Fill `buffers` from `offset` on and return the seconds it took."""
        began = time.perf_counter()
        cost = self._cost(buffers)
        with self._lock:
            self._demand_due = max(began, self._demand_due) + cost
            self._prefetch_due = max(began, self._prefetch_due) + cost
        _read_all(fd, buffers, offset)
        self._sleep(self._demand_due - time.perf_counter())
        return time.perf_counter() - began

    def read_prefetch(self, fd: int, buffers: Sequence[memoryview], offset: int) -> float:
        """The same for a prefetch, which makes way for demand reads."""
        began = time.perf_counter()
        with self._lock:
            self._prefetch_due = max(began, self._prefetch_due) + self._cost(buffers)
        _read_all(fd, buffers, offset)
        # A demand read may have moved the due time while this slept.
        while (wait := self._prefetch_due - time.perf_counter()) > 0 and self._sleep(wait):
            pass
        return time.perf_counter() - began

    def _cost(self, buffers: Sequence[memoryview]) -> float:
        return sum(buffer.nbytes for buffer in buffers) * self.slowdown / self.bytes_per_second

    def _sleep(self, seconds: float) -> bool:
        """Sleep; False if the run was stopped or the engine closed meanwhile."""
        until = time.perf_counter() + seconds
        while not self.stop.is_set():
            wait = until - time.perf_counter()
            if wait <= 0:
                return True
            if self.closing.wait(min(wait, _STOP_CHECK_SECONDS)):
                break
        return False


def _read_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    nbytes = sum(buffer.nbytes for buffer in buffers)
    if os.preadv(fd, buffers, offset) != nbytes:
        raise OSError(f"an expert blob ended before byte {offset + nbytes}: the cache was changed while in use")
