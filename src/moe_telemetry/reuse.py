"""How many lookups a pool of any size would have hit, from the routing alone: reuse distances of each layer, live.

The pool is one that reads on demand and evicts the least recently used (LRU), and it meets a forward pass as a whole:
all experts that a layer needs are looked up first, then all of them are touched. Such pools of all sizes nest, the
smaller in the larger, so that one order of the experts by their last use stands for them all (Mattson's stack): an
expert's depth in it is the smallest pool that misses it, and counts by depth give the hits of every size at once.

Within a set the order is that of the uses before it: who was used more recently stays ahead, and those that were never
used before come last, by id. That is all a pool needs to be told for its hits to be reproduced to the integer, a union
larger than the pool included, of which it keeps the first ones.

Hooks hand over a copy of what they have. The work is done when somebody collects, or a little at a time by who hands
over when too much waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass
from itertools import zip_longest
from numbers import Integral
from typing import TYPE_CHECKING, Any

from . import catalog

if TYPE_CHECKING:
    from .routing_trace import RoutingTrace

MODES = ("sample", "all", "off")
"""Which layers are followed: one of LAYER_SHARE, all, none."""
LAYER_SHARE = 4
MAX_EXPERTS = 512
"""Experts of a layer; one that has more is left out from then on."""
MAX_WAITING = 16_384
"""Calls that wait for their turn, some 3 MiB in decode."""
LARGE = 64
"""Experts of a call above which it counts for its size, too."""
MAX_LARGE = 1 << 19
"""Experts of such calls that wait, 4 MiB."""
ROOM_CALLS = 32
"""Calls that one who hands over simulates at most."""
HANDOVER_CALLS = 4
"""Calls simulated between two handovers of the interpreter lock, some 25 us: a decode step that comes back from kernels
many times waits as long each time."""
WAIT_SECONDS = 1.0
"""How long a collection waits for another one."""


class Feed:
    """The calls of one layer in passes of one phase: `distances[depth]` are lookups that a pool of more than `depth`
    slots would have hit, and `first` those of experts that had not been used before. `head` begins its lines in a
    routing trace."""

    __slots__ = ("distances", "first", "head", "known", "stack", "waiting")

    def __init__(self, stack: LayerStack, known: set[int], head: str) -> None:
        self.stack = stack
        self.head = head
        self.known = known  # the layer's ids that have been looked at
        self.waiting = stack.curves.waiting
        self.distances: list[int] = []
        self.first = 0

    def hand_over(self, experts: Set[int]) -> None:
        """Take a call's experts, as they are now: the set may be changed by its owner later."""
        try:
            if not experts <= self.known and not self.stack.meet(experts):
                return
            waiting = self.waiting
            waiting.append([self, *experts])
            if len(waiting) > MAX_WAITING or len(experts) > LARGE:
                self.stack.curves.make_room(len(experts))
        except Exception:  # of an id that compares as it likes; what else the call says counts nevertheless
            self.stack.leave_out()

    def hand_over_rows(self, rows: list[list[int]]) -> None:
        """`hand_over` for many calls: a row of distinct ids each, filled up with -1, which no id is."""
        met = set().union(*rows)
        if len(met) > LARGE or not met <= self.known:  # -1 is never known
            for row in rows:
                if routed := set(row) - {-1}:
                    self.hand_over(routed)
            return
        for begin in range(0, len(rows), ROOM_CALLS):  # as many as there is room made for at a time
            self.waiting.extend([[self, *row] for row in rows[begin : begin + ROOM_CALLS]])
            if len(self.waiting) > MAX_WAITING:
                self.stack.curves.make_room(len(met))


class LayerStack:
    """One layer's experts by their last use, the latest first.

    The order is a string with a character for each expert: finding and cutting are the interpreter's quickest there.
    """

    __slots__ = ("_order", "_signs", "curves", "feeds", "left_out")

    def __init__(self, curves: PoolCurves, layer: int) -> None:
        self.curves = curves
        known: set[int] = set()
        self.feeds = {phase: Feed(self, known, f"[{layer},{at}") for at, phase in enumerate(catalog.PHASES)}
        self.left_out = 0  # calls
        self._order = ""
        self._signs: dict[int, str] = {}

    def meet(self, experts: Collection[int]) -> bool:
        """Take note of experts that are new; False where the call is left out, and so are all behind it."""
        if not self.left_out and all(isinstance(expert, Integral) for expert in experts):  # a lazy one is none
            known = self.feeds[catalog.PHASES[0]].known
            known.update(map(int, experts))
            if len(known) <= MAX_EXPERTS:
                return True
        self.leave_out()
        return False

    def leave_out(self) -> None:
        """Take no call any more, this one included."""
        self.left_out += 1
        for feed in self.feeds.values():
            feed.known = set()  # each call meets something new from now on

    def take(self, feed: Feed, experts: Collection[int]) -> None:
        """Look a call's experts up, then touch them."""
        order, distances = self._order, feed.distances
        before = len(order)
        try:
            signs = [*map(self._signs.__getitem__, experts)]
        except KeyError:
            order += self._name(experts)
            signs = [self._signs[expert] for expert in experts]
        if len(distances) < before:
            distances.extend([0] * (before - len(distances)))
        depths = sorted(map(order.index, signs))
        touched, untouched, end = [], [], 0
        for depth in depths:
            if depth < before:
                distances[depth] += 1
            else:
                feed.first += 1
            touched.append(order[depth])
            untouched.append(order[end:depth])
            end = depth + 1
        self._order = "".join((*touched, *untouched, order[end:]))

    def _name(self, experts: Collection[int]) -> str:
        """Signs for those experts that have none, in the order of their ids."""
        new = sorted(set(experts).difference(self._signs))
        for expert in new:
            self._signs[expert] = chr(len(self._signs))
        return "".join(self._signs[expert] for expert in new)


@dataclass(frozen=True)
class Curve:
    """Lookups of a phase, and `distances`: the first n of them sum to the hits of a pool of n slots."""

    lookups: int
    distances: tuple[int, ...]

    def at(self, slots: int) -> int:
        """Hits of a pool of so many slots."""
        return sum(self.distances[:slots])


class PoolCurves:
    """The curves of all layers that are followed.

    `waiting` holds [feed, *ids] in the order of the calls. Of large ones `put` and `taken` count the ids that came and
    went, since the difference is to be bounded. `trace` is told of each call behind its simulation.
    """

    def __init__(self, mode: str = MODES[0]) -> None:
        self.mode = mode
        self.waiting: deque[list[Any]] = deque()
        self.put = self.taken = 0
        self.lost = 0  # calls that were handed over in vain
        self.trace: RoutingTrace | None = None
        self._layers: dict[int, LayerStack | None] = {}
        # Held by the one who simulates. A hook does not wait for it, nor a collection for long: a signal handler's may
        # have come in the middle of its own thread's.
        self._lock = threading.Lock()

    def feed(self, layer: int, phase: str) -> Feed | None:
        """Where calls of a layer are handed over; None for one that is not followed. `layer` is a store's index."""
        if layer < 0 or self.mode == "off":  # no layer, or several under one index
            return None
        if layer not in self._layers:
            # One of each LAYER_SHARE in a row, and not the first, which is often unlike the others.
            followed = self.mode == "all" or len(self._layers) % LAYER_SHARE == 1
            self._layers.setdefault(layer, LayerStack(self, layer) if followed else None)
        stack = self._layers[layer]
        return None if stack is None else stack.feeds[phase]

    @property
    def seen(self) -> int:
        """Layers that have come, followed or not."""
        return len(self._layers)

    def followed(self) -> Iterator[tuple[int, LayerStack]]:
        """Layers that are followed, by index."""
        for index, stack in sorted(self._layers.copy().items()):
            if stack is not None:
                yield index, stack

    def make_room(self, number: int) -> None:
        """Behind a call of so many experts: if too much waits, simulate some, unless somebody else is at it."""
        if number > LARGE:
            self.put += number
        if not self._too_many(1):
            return
        if not self._lock.acquire(blocking=False):
            while self._too_many(2):  # who simulates is not let on: rather lose the oldest
                self._next()
                self.lost += 1
            return
        try:
            for _ in range(ROOM_CALLS):
                self._simulate()
                if not self._too_many(1):
                    break
        finally:
            self._lock.release()

    def _too_many(self, times: int) -> bool:
        return len(self.waiting) > times * MAX_WAITING or self.put - self.taken > times * MAX_LARGE

    def collect(self) -> None:
        """Simulate what has been handed over so far; what another one is simulating is done behind it, too."""
        if not (self.waiting or self._lock.locked()) or not self._lock.acquire(timeout=WAIT_SECONDS):
            return
        try:
            for number in range(len(self.waiting)):
                if number % HANDOVER_CALLS == HANDOVER_CALLS - 1:
                    time.sleep(0)
                if not self.waiting:  # a hook that could not wait has taken the last
                    break
                self._simulate()
        finally:
            self._lock.release()

    def _simulate(self) -> None:
        try:
            feed, *experts = self._next()
            feed.stack.take(feed, experts)
        except Exception:  # of an id that is a number, and hashes or compares as it likes
            self.lost += 1
            return
        if self.trace is not None:
            self.trace.add(feed.head, experts)

    def _next(self) -> list[Any]:
        call = self.waiting.popleft()
        number = len(call) - 1
        if number > LARGE:
            self.taken += number
        return call


def curve_of(feed: Feed) -> Curve:
    """A feed's counts as they are now."""
    distances = tuple(feed.distances)
    return Curve(feed.first + sum(distances), distances)


def summed(curves: Collection[Curve]) -> Curve:
    """Of layers that all have pools of the same size."""
    distances = tuple(map(sum, zip_longest(*(curve.distances for curve in curves), fillvalue=0)))
    return Curve(sum(curve.lookups for curve in curves), distances)
