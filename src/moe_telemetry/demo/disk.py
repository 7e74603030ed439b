"""A disk of a known bandwidth: real reads, held back until a device that slow would have delivered."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

_STOP_CHECK_SECONDS = 0.05


class SimulatedDisk:
    """One device that serves demand and prefetch reads, one behind the other.

    The page cache hands over an expert in tens of microseconds, so every prefetch would be early and a miss would
    cost nothing. Each read therefore books its time on the device and returns when that is over.
    """

    def __init__(self, mbps: float) -> None:
        self.bytes_per_second = mbps * 1e6
        self.slowdown = 1.0
        self.stop = threading.Event()
        """The run's own: once set, nobody wants the pace any more and waits end."""
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._free_at = 0.0

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> float:
        """Fill `buffers` from `offset` on and return the seconds it took."""
        began = time.perf_counter()
        nbytes = sum(buffer.nbytes for buffer in buffers)
        with self._lock:
            due = max(began, self._free_at) + nbytes * self.slowdown / self.bytes_per_second
            self._free_at = due
        if os.preadv(fd, buffers, offset) != nbytes:
            raise OSError(f"an expert blob ended before byte {offset + nbytes}: the cache was changed while in use")
        while (wait := due - time.perf_counter()) > 0 and not self.stop.is_set():
            if self.closing.wait(min(wait, _STOP_CHECK_SECONDS)):
                break
        return time.perf_counter() - began
