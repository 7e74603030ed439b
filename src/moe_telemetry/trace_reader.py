"""A routing trace read back (routing_trace.py): the calls of one run by layer, two bytes for each expert of a call."""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from .catalog import PHASES
from .reports import ReportError
from .reuse import MAX_EXPERTS
from .routing_trace import BEGIN, VERSION
from .settings import MAX_LAYERS
from .values import MAX_LAYER

MAX_LINE = 1 << 20
"""Bytes; a call of 512 experts has some 2 KiB."""
GZIP = b"\x1f\x8b"


@dataclass
class LayerCalls:
    """The calls of a layer in their order: call n has the phase `PHASES[phases[n]]`, and its experts stand in `experts`
    up to `ends[n]`, as places in `ids`."""

    phases: bytearray = field(default_factory=bytearray)
    ends: array[int] = field(default_factory=lambda: array("Q"))
    experts: array[int] = field(default_factory=lambda: array("H"))
    ids: list[int] = field(default_factory=list)
    _places: dict[int, int] = field(default_factory=dict)

    def add(self, phase: int, experts: list[int]) -> None:
        """Append a call."""
        places = self._places
        try:
            self.experts.extend(map(places.__getitem__, experts))
        except KeyError:
            del self.experts[self.ends[-1] if self.ends else 0 :]
            for expert in experts:
                if expert not in places:
                    places[expert] = len(self.ids)
                    self.ids.append(expert)
            self.experts.extend(map(places.__getitem__, experts))
        self.phases.append(phase)
        self.ends.append(len(self.experts))

    def calls(self) -> Iterator[tuple[int, array[int]]]:
        """Phase and experts of each call, as places."""
        begin = 0
        for phase, end in zip(self.phases, self.ends, strict=True):
            yield phase, self.experts[begin:end]
            begin = end


@dataclass
class RecordedRun:
    """A run of a trace: what the line says with which it begins, its calls by layer, `end` as the trace has it or None
    where the run goes on or was killed, how many lines could not be read, and how many runs the file has."""

    run: dict[str, Any]
    layers: dict[int, LayerCalls]
    end: dict[str, Any] | None
    unreadable: int
    runs: int


def read(path: str, run: str | None = None) -> RecordedRun:
    """The last run in a file, which may have been compressed with gzip, or the one of that name.

    Raises:
        ReportError: it cannot be read, is no trace, or has no such run.
    """
    try:
        with _opened(path) as file:
            begins = [(number, begin) for number, line in _lines(file) if (begin := _begin(line)) is not None]
        if not begins:
            raise ReportError(f"{path} is no routing trace")
        wanted = [(number, begin) for number, begin in begins if run in (None, begin["run"])]
        if not wanted:
            raise ReportError(f"{path} is of another run than the snapshot: {begins[-1][1]['run']}, not {run}")
        first, begin = wanted[-1]
        if begin["routing_trace"] != VERSION or begin.get("phases") != list(PHASES):
            raise ReportError(f"{path} has the format {begin['routing_trace']!r}, this version reads {VERSION}")
        found = RecordedRun(begin, {}, None, 0, len(begins))
        with _opened(path) as file:
            for number, line in _lines(file):
                if number > first and (found.end is not None or _begin(line) is not None):
                    break
                if number > first:
                    _take(found, line, path)
    except (OSError, EOFError, ValueError) as error:
        if isinstance(error, ReportError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ReportError(f"cannot read {path}: {' '.join(str(reason).split())}") from error
    return found


def _opened(path: str) -> IO[bytes]:
    with Path(path).open("rb") as file:
        compressed = file.read(len(GZIP)) == GZIP
    return cast("IO[bytes]", gzip.open(path)) if compressed else Path(path).open("rb")


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Numbered; what is longer than a line can be comes in pieces, which are none."""
    number = 0
    while line := file.readline(MAX_LINE):
        yield number, line
        number += 1


def _begin(line: bytes) -> dict[str, Any] | None:
    """What a run begins with, if this is it."""
    if not line.startswith(BEGIN):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found.get("run"), str) else None


def _take(found: RecordedRun, line: bytes, path: str) -> None:
    """A call, or the end; what is neither, as half a line of a run that was killed, is counted."""
    call = _call(line)
    if call is not None:
        layer, phase, *experts = call
        calls = found.layers.get(layer)
        if calls is None:
            if len(found.layers) == MAX_LAYERS:
                raise ReportError(f"{path} is damaged: it has more than {MAX_LAYERS} layers")
            calls = found.layers[layer] = LayerCalls()
        calls.add(phase, experts)
        if len(calls.ids) > MAX_EXPERTS:
            raise ReportError(f"{path} is damaged: layer {layer} has more than {MAX_EXPERTS} experts")
    elif (end := _end(line)) is not None:
        found.end = end
    elif line.strip():
        found.unreadable += 1


def _call(line: bytes) -> list[int] | None:
    """What JSON would read, of a list of whole numbers, in half the time."""
    line = line.rstrip()
    if not (line.startswith(b"[") and line.endswith(b"]")):
        return None
    try:
        found = [*map(int, line[1:-1].split(b","))]
    except ValueError:
        return None
    if len(found) < 2 or not 0 <= found[0] <= MAX_LAYER or not 0 <= found[1] < len(PHASES):
        return None
    return found if len({*found[2:]}) == len(found) - 2 else None


def _end(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    end = record.get("end") if isinstance(record, dict) else None
    return end if isinstance(end, dict) else None
