"""The background reader: one thread that brings predicted experts from disk into staging memory.

It touches no MLX array (those belong to the thread that computes), only bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum

from moe_telemetry import Phase
from moe_telemetry import recorder as rec

from .blobs import ExpertBlobs
from .disk import SimulatedDisk


class State(Enum):
    """Where a submitted read is."""

    QUEUED = "queued"
    READING = "reading"
    DONE = "done"
    DROPPED = "dropped"


class Ticket:
    """One submitted read. Its fields change under the reader's lock only."""

    __slots__ = ("buffer", "expert", "layer", "phase", "state", "submitted", "wanted")

    def __init__(self, layer: int, expert: int, phase: Phase) -> None:
        self.layer = layer
        self.expert = expert
        self.phase = phase
        self.submitted = time.perf_counter()
        self.state = State.QUEUED
        self.wanted = True
        self.buffer: memoryview | None = None


class PrefetchReader:
    """A bounded queue, a bounded set of staging buffers and the thread between them."""

    def __init__(self, blobs: ExpertBlobs, disk: SimulatedDisk, expert_bytes: int, depth: int, staging: int) -> None:
        self._blobs = blobs
        self._disk = disk
        self._depth = depth
        self._expert_bytes = expert_bytes
        self._buffers = [memoryview(bytearray(expert_bytes)) for _ in range(staging)]
        self._queue: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._busy = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="demo-prefetch-reader", daemon=True)
        self._thread.start()

    def submit(self, layer: int, expert: int, phase: Phase) -> Ticket | None:
        """Queue a read; None if the queue is full."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if len(self._queue) >= self._depth:
                return None
            ticket = Ticket(layer, expert, phase)
            self._queue.append(ticket)
            self._changed.notify_all()
        return ticket

    def is_done(self, ticket: Ticket) -> bool:
        """Whether the read has finished and its bytes wait in staging."""
        return ticket.state is State.DONE

    def wait(self, ticket: Ticket) -> bool:
        """Wait for a read under way and return True; a read that has not begun is withdrawn: False."""
        with self._changed:
            if ticket.state is State.QUEUED:
                self._withdraw(ticket)
            self._changed.wait_for(lambda: ticket.state is not State.READING)
            if self._error is not None:
                raise self._error
            return ticket.state is State.DONE

    def deliver(self, ticket: Ticket, place: Sequence[memoryview]) -> None:
        """Copy a finished read into the buffers of `place`, if any, and give its staging memory back."""
        if ticket.buffer is not None:
            start = 0
            for part in place:
                part[:] = ticket.buffer[start : start + part.nbytes]
                start += part.nbytes
        with self._changed:
            self._recycle(ticket)

    def abandon(self, ticket: Ticket) -> None:
        """Nobody wants this read any more: withdraw it, or drop what it has read or will have read."""
        with self._changed:
            ticket.wanted = False
            if ticket.state is State.QUEUED:
                self._withdraw(ticket)
            if ticket.state is not State.DONE:
                return
            self._recycle(ticket)
        rec.prefetch_dropped("unused", 1, self._expert_bytes, ticket.phase)

    def drain(self) -> None:
        """Wait until nothing is queued or under way, and everything read so far has been recorded."""
        with self._changed:
            self._changed.wait_for(lambda: (not self._busy and not self._queue) or self._closing)

    def close(self) -> None:
        """End the thread; again is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._disk.closing.set()
        self._thread.join()

    def _withdraw(self, ticket: Ticket) -> None:
        self._queue.remove(ticket)
        ticket.state = State.DROPPED

    def _recycle(self, ticket: Ticket) -> None:
        if ticket.buffer is not None:
            self._buffers.append(ticket.buffer)
            ticket.buffer = None
            self._changed.notify_all()

    def _next(self) -> tuple[Ticket, memoryview] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (self._queue and self._buffers))
            if self._closing:
                return None
            ticket = self._queue.popleft()
            ticket.state = State.READING
            self._busy = True
            return ticket, self._buffers.pop()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            ticket, buffer = job
            try:
                self._read(ticket, buffer)
            except OSError as error:
                with self._changed:
                    self._error = error
                    for failed in (ticket, *self._queue):
                        failed.state = State.DROPPED
                    self._queue.clear()
                return
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _read(self, ticket: Ticket, buffer: memoryview) -> None:
        fd, offset = self._blobs.locate(ticket.layer, ticket.expert)
        seconds = self._disk.read_prefetch(fd, [buffer], offset)
        rec.read("prefetch", buffer.nbytes, seconds, ticket.phase)
        with self._changed:
            ticket.buffer = buffer
            ticket.state = State.DONE
            if not ticket.wanted:
                self._recycle(ticket)
            wanted = ticket.wanted
            self._changed.notify_all()
        if not wanted:
            rec.prefetch_dropped("unused", 1, buffer.nbytes, ticket.phase)
