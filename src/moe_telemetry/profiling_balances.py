"""Counts that a runtime writes into the dicts itself, until they can be exported as counters that only rise.

What the metrics need is a difference of entries that are written one after the other (prefill is all less decode).
A balance that is negative in between waits until it has risen again.
"""

from __future__ import annotations

from typing import ClassVar

from .cells import LayerCells


class MissBalance:
    """Writes to MISS_ATTRIB: prefill is all less decode, and a miss A that is not split is late."""

    # What a rise of an entry adds to and takes from.
    _PARTS: ClassVar[dict[str, tuple[tuple[str, int], ...]]] = {
        "resident_hit": (("hit", 1),),
        "miss_A_predicted": (("a", 1),),
        "miss_B_unpredicted": (("b", 1),),
        "dec_resident_hit": (("hit", -1), ("decode_hit", 1)),
        "dec_miss_A": (("a", -1), ("unsplit", 1)),
        "dec_miss_B": (("b", -1), ("decode_b", 1)),
        "dec_miss_A_timing": (("unsplit", -1), ("timing", 1)),
        "dec_miss_A_evicted": (("unsplit", -1), ("evicted", 1)),
    }
    ENTRIES: ClassVar[frozenset[str]] = frozenset(_PARTS)
    TOTALS: ClassVar[frozenset[str]] = frozenset(
        ("routed", "resident_hit", "miss_A_predicted", "miss_B_unpredicted", "n")
    )

    __slots__ = ("a", "b", "complete", "decode_b", "decode_hit", "evicted", "hit", "owed", "timing", "unsplit")

    def __init__(self) -> None:
        self.owed = False
        self.complete = False  # `n` has risen: only `dec_` entries of the same layers can still come
        self.hit = self.a = self.b = 0  # prefill
        self.decode_hit = self.decode_b = self.timing = self.evicted = self.unsplit = 0

    def change(self, key: str, rise: int) -> None:
        """A rise of one of the entries."""
        for name, sign in self._PARTS[key]:
            setattr(self, name, getattr(self, name) + sign * rise)
        self.owed = True

    def owes_prefill(self) -> bool:
        """Whether there is anything to export for prefill."""
        return self.hit > 0 or self.a > 0 or self.b > 0

    def owes_decode(self) -> bool:
        """Whether there is anything to export for decode."""
        return max(self.decode_hit, self.decode_b, self.timing, self.evicted, self.unsplit) > 0

    def add(self, prefill: LayerCells | None, decode: LayerCells | None) -> None:
        """Move what is owed to the cells."""
        self.owed = False
        if prefill is not None:
            hit, late, unpredicted = self._take("hit"), self._take("a"), self._take("b")
            prefill.hit += hit
            prefill.miss_timing += late
            prefill.miss_unpredicted += unpredicted
        if decode is not None:
            hit, unpredicted = self._take("decode_hit"), self._take("decode_b")
            late, evicted = self._take("timing") + self._take("unsplit"), self._take("evicted")
            decode.hit += hit
            decode.miss_timing += late
            decode.miss_evicted += evicted
            decode.miss_unpredicted += unpredicted

    def _take(self, name: str) -> int:
        owed: int = getattr(self, name)
        if owed <= 0:
            return 0
        setattr(self, name, 0)
        return owed


class RecallBalance:
    """Writes to PREDICT_RECALL_PROF: missed is routed less recalled."""

    __slots__ = ("hit", "owed", "routed")

    def __init__(self) -> None:
        self.owed = False
        self.hit = self.routed = 0  # rises that are not exported; below 0 where the other has risen first

    def add(self, cells: LayerCells) -> None:
        """Move what is owed to the cells."""
        self.owed = False
        recalled, missed = self.hit, self.routed - self.hit
        self.hit = 0
        if missed > 0:
            self.routed = 0
            cells.missed += missed
        else:
            self.routed = missed
        cells.recalled += recalled
