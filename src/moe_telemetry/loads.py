"""Tokens by expert of one layer: how evenly routing spreads them, in all and lately."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from operator import add, sub
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .store import Layer

LOAD_WINDOW = 256
"""Layer calls that a layer's load peak looks back on, in whole pieces."""
LOAD_CALLS = 64
"""Layer calls of a piece."""
LOAD_PIECES = 16
"""Pieces that wait for somebody who reads them."""


class ExpertLoad:
    """Tokens by expert of one layer, of the whole run and of its last LOAD_WINDOW calls.

    Several threads may count calls of one layer. They hand in what they have; it is added by one thread at a time, and
    nobody waits for that: what came meanwhile is added by the next.
    """

    __slots__ = ("_adding", "_calls", "_ids", "_new", "_open", "_open_calls", "_pieces", "_total", "_window")

    def __init__(self, experts: int) -> None:
        self._total = [0] * experts
        self._window = [0] * experts
        self._pieces: deque[tuple[int, list[int]]] = deque()  # the window's, (calls, tokens) each
        self._calls = 0
        # Not added yet: (calls, their routed ids), and (calls, tokens by expert).
        self._ids: deque[tuple[int, Iterable[int]]] = deque()
        self._new: deque[tuple[int, list[int]]] = deque()
        self._open = [0] * experts  # a piece that is being filled
        self._open_calls = 0
        self._adding = threading.Lock()

    @property
    def experts(self) -> int:
        """How many there are."""
        return len(self._total)

    @property
    def tokens(self) -> list[int]:
        """Tokens routed to each expert so far."""
        self._add()
        return list(map(add, self._total, self._open))

    def count(self, ids: Iterable[int], calls: int = 1) -> None:
        """Add the routed ids of so many calls; nobody writes to `ids` any more."""
        self._ids.append((calls, ids))
        self._add()

    def add(self, calls: int, tokens: list[int]) -> None:
        """Add what `calls` calls routed to each expert."""
        self._new.append((calls, tokens))
        if len(self._new) > LOAD_PIECES:
            self._add()

    def _add(self) -> None:
        if not self._adding.acquire(blocking=False):
            return
        try:
            while self._ids or self._new:
                if self._ids:
                    calls, ids = self._ids.popleft()
                    for expert in ids:
                        self._open[expert] += 1
                else:
                    calls, tokens = self._new.popleft()
                    self._open = list(map(add, self._open, tokens))
                self._open_calls += calls
                if self._open_calls >= LOAD_CALLS:
                    self._end_piece()
        finally:
            self._adding.release()

    def _end_piece(self) -> None:
        calls, tokens = self._open_calls, self._open
        self._open, self._open_calls = [0] * len(tokens), 0
        self._total = list(map(add, self._total, tokens))
        self._window = list(map(add, self._window, tokens))
        self._pieces.append((calls, tokens))
        self._calls += calls
        while self._calls > LOAD_WINDOW and len(self._pieces) > 1:
            calls, tokens = self._pieces.popleft()
            self._window = list(map(sub, self._window, tokens))
            self._calls -= calls

    def peak(self) -> float | None:
        """The busiest expert's share of the recent tokens times the number of experts; None without a token."""
        self._add()
        recent = list(map(add, self._window, self._open))
        total = sum(recent)
        return max(recent) * len(recent) / total if total else None


def load_of(layer: Layer, experts: int) -> ExpertLoad:
    """The layer's load; begun anew for another model's layer."""
    while (load := layer.load) is None or load.experts != experts:
        made = ExpertLoad(experts)
        if layer.load is load:  # apart from the call: two threads may meet a new layer at once
            layer.load = made
    return load
