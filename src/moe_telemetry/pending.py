"""Passes of which it is not known yet whether the model evaluates them, and how that is found out: an array that has
been computed, or is being computed, has no graph behind it any more.

To be used by the thread alone that evaluates them: to walk a graph that another one takes apart is to crash.
"""

from __future__ import annotations

from contextlib import suppress
from io import StringIO

import mlx.core as mx

from .losses import lost
from .reduction import Unit
from .store import Store
from .values import Refused

MAX_PENDING = 1024
"""Calls kept that nobody has evaluated yet."""
MAX_GRAPH = 4_000_000
"""Characters that a graph nobody has evaluated may draw (some 20 passes): what walks it goes down one frame a node."""

_HOOK = "routed_array"


class Pending:
    """Passes in their order. `overgrown`: their graph is one that must not be walked again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._units: list[Unit] = []
        self._known = 0  # of those: found not to be evaluated
        self.overgrown = False

    def __len__(self) -> int:
        """Calls of the passes."""
        return sum(map(len, self._units))

    def add(self, unit: Unit) -> bool:
        """Another pass; whether it is time to look. Seldom where that takes long, as where each call is a pass of its
        own, all of them evaluated together."""
        self._units.append(unit)
        number = len(self._units)
        return number >= unit.patience and number >= 4 * self._known

    def close(self, closed: list[Unit], every: bool = False) -> None:
        """Move the passes that are evaluated to `closed`. One before them that is not never will be, and is given up,
        as all are where they become too many.

        Looks no further than two that are not, unless at `every` one: each has a longer graph than the one before.
        """
        units, self._units = self._units, []
        if self._evaluated(units):
            closed += units
        else:
            self._sort(units, closed, every)
        if len(self) > MAX_PENDING:
            units, self._units = self._units, []
            self._sort(units, closed, every=True)
            self.give_up()
        self._known = len(self._units)

    def _evaluated(self, units: list[Unit]) -> bool:
        """Whether it is the usual case: each pass was evaluated before the next."""
        if len(units) < 2 or self._known:
            return False
        with suppress(Exception):  # whose it is will be found out
            last = [unit.routing(len(unit) - 1) for unit in units]
            return not _graph(last[0]) and not _graph(*last)
        return False

    def _sort(self, units: list[Unit], closed: list[Unit], every: bool) -> None:
        for at, unit in enumerate(units):
            try:
                number = self._computed(unit, alone=len(units) == 1)
            except Exception as error:
                lost(self._store, _HOOK, error, len(unit))
                continue
            if number:
                if self._units:
                    self.give_up()
                if number < len(unit):
                    done, rest = unit.split(number)
                    closed.append(done)
                    self._units += rest
                else:
                    closed.append(unit)
            else:
                self._units.append(unit)
                if self.overgrown or (len(self._units) > 1 and not every):
                    self._units += units[at + 1 :]
                    break

    def give_up(self) -> None:
        """These will not be evaluated: a loss, unless it was to be expected."""
        for unit in self._units:
            if unit.told:
                lost(self._store, _HOOK, Refused("unevaluated", unit), len(unit))
        self._units, self._known = [], 0

    def _computed(self, unit: Unit, alone: bool) -> int:
        """How many of a pass' calls the model has computed: every layer needs the routing of those before it.

        None in a pass under a transformation (mx.compile, mx.grad), in one that failed or that nobody asked for, and
        in a prefill chunk whose only MoE layers are behind the last use.
        """
        number = len(unit)
        if alone and not _graph(unit.routing(number - 1)):  # the usual case here
            return number
        if graph := _graph(unit.routing(0)):
            self.overgrown = self.overgrown or graph > MAX_GRAPH
            return 0
        while number > 1 and _graph(unit.routing(number - 1)):
            number -= 1
        return number


def _graph(*arrays: mx.array) -> int:
    """Length of the drawn graph behind arrays that are not all evaluated; 0 once they have been computed, or begun."""
    drawn = StringIO()
    mx.export_to_dot(drawn, *arrays)
    text = drawn.getvalue()
    return len(text) if "->" in text else 0
