"""What became of one layer's routed experts, and MISS_ATTRIB's share of it."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from numbers import Integral
from typing import Any

from . import values
from .profiling_times import Lose
from .values import MAX_ITEMS, Refused

ENTRIES = (
    *("routed", "resident_hit", "miss_A_predicted", "miss_B_unpredicted", "n"),
    *("dec_routed", "dec_resident_hit", "dec_miss_A", "dec_miss_B", "dec_n"),
    *("dec_miss_A_timing", "dec_miss_A_evicted"),
)
"""MISS_ATTRIB's: all passes, then decode passes."""
MAX_SIZED = 2**22
"""Items read of what says how many it has: a range says so of as many as you like."""


class Sums:
    """Layer calls of one phase that are not in the dict yet: five increments where the dict would have twelve."""

    __slots__ = ("calls", "evicted", "late", "misses", "routed")

    def __init__(self) -> None:
        self.routed = self.misses = self.late = self.evicted = self.calls = 0

    def add(self, routed: int, misses: int, late: int, evicted: int) -> None:
        """Add to a layer call that is counted already."""
        self.routed += routed
        self.misses += misses
        self.late += late
        self.evicted += evicted


class Misses:
    """What MISS_ATTRIB lacks; the dict is brought up to date when it is read."""

    def __init__(self, target: dict[str, int], lose: Lose) -> None:
        self._lose = lose
        self.prefill = Sums()
        self.decode = Sums()
        self._target = target

    @property
    def raw(self) -> Misses:
        """Itself: true while the dict lacks something."""
        return self

    def __bool__(self) -> bool:
        return self.prefill.calls > 0 or self.decode.calls > 0

    def settle(self) -> None:
        """Bring the dict up to date."""
        for sums, decode in ((self.prefill, False), (self.decode, True)):
            if sums.calls:
                taken = (sums.routed, sums.misses, sums.late, sums.evicted, sums.calls)
                sums.routed -= taken[0]
                sums.misses -= taken[1]
                sums.late -= taken[2]
                sums.evicted -= taken[3]
                sums.calls -= taken[4]
                self._add(decode, *taken)

    def _add(self, decode: bool, routed: int, misses: int, late: int, evicted: int, calls: int) -> None:
        """Without its being taken for writes of the runtime's. An entry that is gone, or no number, stays so."""
        predicted = late + evicted
        rises = [routed, routed - misses, predicted, misses - predicted, calls]
        if decode:
            rises += [*rises, late, evicted]
        for entry, rise in zip(ENTRIES, rises, strict=False):
            try:
                dict.__setitem__(self._target, entry, dict.__getitem__(self._target, entry) + rise)
            except Exception as error:
                self._lose("note_miss_attrib", error)


def add_plain(
    target: dict[str, int], decode: bool, routed: int, misses: int, late: int, evicted: int, calls: int = 1
) -> None:
    """The same where writes are not watched, at half the cost."""
    hits = routed - misses
    target["routed"] += routed
    target["resident_hit"] += hits
    target["n"] += calls
    if decode:
        target["dec_routed"] += routed
        target["dec_resident_hit"] += hits
        target["dec_n"] += calls
    if misses:
        predicted = late + evicted
        target["miss_A_predicted"] += predicted
        target["miss_B_unpredicted"] += misses - predicted
        if decode:
            target["dec_miss_A"] += predicted
            target["dec_miss_B"] += misses - predicted
            target["dec_miss_A_timing"] += late
            target["dec_miss_A_evicted"] += evicted


def repeats(
    items: list[Any], absent: Collection[Any], predicted: Collection[Any], ready: Collection[Any]
) -> tuple[int, int, int, int]:
    """Routed, misses, late and evicted of the ids that have come before among the items."""
    seen: set[Any] = set()
    again = [item for item in items if item in seen or seen.add(item)]  # type: ignore[func-returns-value]
    lost = [item for item in again if item in absent]
    in_vain = [item for item in lost if item in predicted]
    evicted = sum(item in ready for item in in_vain)
    return len(again), len(lost), len(in_vain) - evicted, evicted


def read_items(ids: Any) -> list[Any]:
    """An iterable's items, read once."""
    values.refuse_lazy(ids)
    most = min(len(ids), MAX_SIZED) if hasattr(ids, "__len__") else MAX_ITEMS
    items = list(islice(iter(ids), most + 1))  # one more: what says how long it is may be wrong
    if len(items) > most:
        raise Refused("too_many", ids)
    for item in items:
        if type(item) is not int:
            values.refuse_lazy(item)
    return items


def among(ids: Any, container: Any) -> set[Any]:
    """Those of the ids that a container holds."""
    if isinstance(container, (set, frozenset)):
        return set(ids & container)
    values.refuse_lazy(container)
    if type(container) is range:  # compares each of its numbers with what is not an int: a long one does not end
        return {item for item in ids if isinstance(item, Integral) and int(item) in container}
    if hasattr(container, "__contains__"):
        return {item for item in ids if item in container}
    return set(ids) & set(read_items(container))


def truth(value: Any) -> bool:
    """A condition that is not a lazy array's."""
    values.refuse_lazy(value)
    return bool(value)
