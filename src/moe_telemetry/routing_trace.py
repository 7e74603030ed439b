"""The routing of a run in a file, call by call, from which the hits of pools with other policies are found out later.

A line is a JSON value: an object where a run begins (`routing_trace` is the format's version) and where it ends
(`end`), and between them, for each call in its order, `[layer, phase, expert, ...]`; `phase` is a place in the first
object's `phases`.

The layers are those whose pool curve is followed, and a call comes when it is simulated (reuse.py): hooks do nothing
for it. One thread simulates what waits and writes, once a second, so that no other ever waits for a disk. What a file
holds of a run is its exact beginning: the first call that finds no room or no disk ends it, and all from then on are
counted.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .catalog import PHASES

if TYPE_CHECKING:
    from .reuse import PoolCurves

logger = logging.getLogger("moe_telemetry")

VERSION = 1
BEGIN = b'{"routing_trace": '
"""How the line begins with which a run does."""
END_BYTES = 256
"""Of the limit, kept for the line that ends a run."""
MAX_BACKLOG = 4 << 20
"""Bytes of lines that wait for the disk."""
WRITE_SECONDS = 1.0
END_SECONDS = 5.0
"""How long a stop waits for the last lines to be written."""
REASONS = {
    "full": "the file has no room for more",
    "disk": "it could not be written to",
    "behind": "the disk was too slow",
    "id": "an expert's id could not be written",
    "cut": "it was stopped in the middle of a call",
}
"""Why calls are left out."""


class TraceError(ValueError):
    """There can be no trace in that file; the message is why."""


class RoutingTrace:
    """A trace that is being written; `calls` and `left_out` are the numbers so far, `why` is one of REASONS or ""."""

    def __init__(self, path: Path, limit: int, run: dict[str, Any], curves: PoolCurves) -> None:
        """Open the file, or go on behind the runs that are in it already; it takes `limit` bytes in all.

        Raises:
            TraceError: it cannot be written to, or is another file. It is as it was then.
        """
        self.calls = 0
        self.why = ""
        self._path = path
        self._curves = curves
        self._refused = self._failed = 0  # calls; by who simulates, and by who writes
        self._closed = self._broken = self._told = False
        self._texts: dict[int, str] = {}
        self._waiting: deque[str] = deque()
        self._put = 0  # bytes of lines that were taken
        self._written = 0  # of these
        self._file, size = _opened(path)
        self._room = limit - size - END_BYTES
        head = json.dumps({"routing_trace": VERSION, **run, "layers": curves.mode, "phases": PHASES}) + "\n"
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # a run that ended in the middle of a line
            head = "\n" + head
        self._room -= len(head)
        if self._room < 0:
            self.why = "full"
            self._tell()
        else:
            self._write(head)
        self._begun = not self.why
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe-telemetry-trace", daemon=True)

    @property
    def left_out(self) -> int:
        """Calls that are not in the file."""
        return self._refused + self._failed

    def start(self) -> None:
        """Write what is simulated from now on."""
        self._curves.trace = self
        self._thread.start()

    def add(self, head: str, experts: Collection[int]) -> None:
        """Take a call; for one thread at a time, the one that simulates."""
        if self.why or self._closed:
            self._refused += 1
            return
        try:
            texts = self._texts
            try:
                line = f"{head}{''.join(map(texts.__getitem__, experts))}]\n"
            except KeyError:
                texts.update((int(expert), f",{int(expert)}") for expert in experts)
                line = f"{head}{''.join(map(texts.__getitem__, experts))}]\n"
            size = self._put + len(line)
            if size > self._room:
                self.why = self.why or "full"
            elif size - self._written > MAX_BACKLOG:
                self.why = self.why or "behind"
            else:
                self._put = size
                self._waiting.append(line)
                return
        except Exception:  # of an id that is a number, and hashes or prints as it likes
            self.why = "id"
        self._refused += 1

    def close(self) -> None:
        """Write what is left and the line that ends the run, and close the file; a second call does nothing."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread.ident is None:  # a start that failed
            self._last()
        elif self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)
            if self._thread.is_alive():
                logger.warning("the routing trace %s has no end yet: a thread waits for the disk", self._path)

    def abandon(self) -> None:
        """In a forked child: the file is the parent's, and locked as long as somebody has it open."""
        self._closed = True
        with suppress(OSError):
            os.close(self._file)

    # -- the thread that writes -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending.wait(WRITE_SECONDS):
            self._curves.collect()
            self._drain()
            if self.why and not self._told:
                self._tell()
        self._last()

    def _last(self) -> None:
        self._curves.collect()
        self._closed = True
        self._drain()
        left_out = self.left_out + len(self._curves.waiting)
        why = self.why or ("cut" if left_out else None)
        end = {"calls": self.calls, "left_out": left_out, "why": why, "layers": self._curves.seen}
        if self._begun:
            # Behind an error the last line may be half a one.
            self._write(("\n" if self._broken else "") + json.dumps({"end": end}) + "\n")
        if why is not None and left_out:
            logger.warning("the routing trace %s lacks the last %d calls: %s", self._path, left_out, REASONS[why])
        with suppress(OSError):
            os.close(self._file)

    def _drain(self) -> None:
        """Write the lines that wait; behind an error they are lost."""
        lines = []
        while self._waiting:
            lines.append(self._waiting.popleft())
        text = "".join(lines)
        number = 0 if self._broken else self._write(text)
        failed = len(lines) - number
        self.calls += number
        self._failed += failed
        self._written += len(text)

    def _write(self, text: str) -> int:
        """How many lines could be written whole."""
        data = memoryview(text.encode())
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError:
            self._broken = True
            self.why = "disk"
        return text.count("\n", 0, done)  # ASCII, as JSON is by default

    def _tell(self) -> None:
        self._told = True
        logger.warning(
            "the routing trace %s ends here, further calls are only counted: %s", self._path, REASONS[self.why]
        )


def _opened(path: Path) -> tuple[int, int]:
    """A file to append to that nobody else does, and its size."""
    try:
        # Others of this machine need not know what a text was routed to.
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o600)
    except OSError as error:
        raise TraceError(str(error.strerror)) from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise TraceError("it is no file")
        if found.st_size and os.pread(file, len(BEGIN), 0) != BEGIN:
            raise TraceError("there is a file that is no routing trace")
        _lock(file)
    except BaseException:
        os.close(file)
        raise
    return file, found.st_size


def _lock(file: int) -> None:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TraceError("another run writes to it") from error
    except (ImportError, OSError):  # a system or a file system without locks
        pass
