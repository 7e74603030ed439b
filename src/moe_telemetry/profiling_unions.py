"""Unions behind the drop-in's `UNION_PROF` and `UNION_SAMPLES`: counted once, in cells, and read as the dicts.

The rows here are rows of the telemetry that the recorder feeds (`Store.guest_rows`), kept apart from those of the
recorder's hooks so that the dicts hold what `note_union` was given and nothing else. While no telemetry runs they
belong to a store that nobody exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, overload

from . import catalog
from .cells import LayerCells, SeqCells
from .profiling_times import Lose
from .store import EXACT_SEQS, OTHER, Store
from .values import MAX_COUNT, MAX_LAYER, Refused

Sizes = dict[int, int]
"""How often each union size was seen."""
Totals = dict[int, dict[int, Sizes]]
"""By sequence length and layer."""
UNKNOWN = 0
"""Sequence length of records that came before any union."""


def takes(seq: int, size: int, layer: int) -> bool:
    """Whether such a union can be exported; the dicts hold it in any case."""
    return seq > UNKNOWN and 0 <= size <= MAX_COUNT and layer <= MAX_LAYER


class Samples(Sequence[int]):
    """The union sizes of one layer as a sequence, ascending, at the memory of its distinct values.

    A moment's reading: it does not grow with later unions. Equal to any sequence of the same values, in any order.
    """

    __slots__ = ("_length", "_sizes")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = dict(sorted(sizes.items()))
        self._length = sum(sizes.values())

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(size, times) for size, times in self._sizes.items())

    def __reversed__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(size, times) for size, times in reversed(self._sizes.items()))

    def __contains__(self, value: object) -> bool:
        return value in self._sizes

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self._length))]
        at = range(self._length)[index]  # IndexError, and indices from the end
        for size, times in self._sizes.items():
            at -= times
            if at < 0:
                return size
        raise IndexError(index)

    def count(self, value: Any) -> int:
        """How often `value` was seen."""
        return self._sizes.get(value, 0)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Samples):
            return self._sizes == other._sizes
        if not isinstance(other, (list, tuple)):
            return NotImplemented
        return len(other) == self._length and all(self.count(value) == other.count(value) for value in set(other))

    def __add__(self, other: Iterable[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Iterable[int]) -> list[int]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))


class Unions:
    """Every union since the last reset, exactly, by sequence length and layer (-1: no layer was given)."""

    def __init__(self, home: Store) -> None:
        self.home = home
        self.pending: tuple[int, int, int] | None = None  # sequence length, size, layer; not in a cell yet
        # By sequence length and layer: what note_union finds by itself, and all cells by their phase.
        self.fast: dict[int, dict[int | None, LayerCells]] = {}
        self.by_phase: dict[str, dict[int, dict[int | None, LayerCells]]] = {phase: {} for phase in catalog.PHASES}
        self._rows: dict[tuple[str, int], SeqCells] = {}
        self.resets = 0
        self._past: Totals = {}  # of earlier telemetries, and what no cell keeps apart
        self._before_reset: dict[tuple[str, int, int], Sizes] = {}

    def move(self, home: Store) -> None:
        """Count for another telemetry from now on: from zero there, while the dicts keep what they hold."""
        for seq, layer, sizes in list(self._counted()):
            _merge(self._past.setdefault(seq, {}).setdefault(layer, {}), sizes)
        self.home = home
        self._rows = {}
        self._before_reset = {}
        for found in (self.fast, *self.by_phase.values()):
            found.clear()

    def reset(self) -> None:
        """Empty the dicts; the cells go on rising."""
        self.resets += 1
        self._past.clear()
        self._before_reset = {
            (*key, layer): cells.sizes.copy() for key, row in self._rows.items() for layer, cells in row.layers.items()
        }

    def cells(self, phase: str, seq: int, layer: int) -> LayerCells:
        """Cells for what is known of a layer in passes of this phase and length, UNKNOWN included."""
        try:
            return self.by_phase[phase][seq][layer]
        except KeyError:
            return self._new_cells(phase, seq, layer)

    def _new_cells(self, phase: str, seq: int, layer: int) -> LayerCells:
        seq, layer = int(seq), int(layer)  # True equals 1, and would be another label
        row = self._row(phase, seq) or self.home.row(phase, seq)
        return row.by_layer.get(layer) or self.home.layer_cells(row, layer)

    def add(self, phase: str, seq: int, size: int, layer: int) -> LayerCells | None:
        """Count one union; its cells, or None where only the dicts take it. Refused when it cannot be exported."""
        if not takes(seq, size, layer):
            self._keep(seq, size, layer)
            raise Refused("out_of_range", size)
        row = self._row(phase, seq)
        shared = row is None
        row = row or self.home.row(phase, seq)
        cells = row.by_layer.get(layer) or self.home.layer_cells(row, layer)
        # Where several lengths or layers share their cells, these cannot tell what the dicts must.
        if shared or layer not in row.by_layer or (size not in cells.sizes and len(cells.sizes) >= _DISTINCT):
            self._keep(seq, size, layer)
            if not shared and layer in row.by_layer:
                cells.union.rest_max = max(cells.union.rest_max, size)
                cells.union.rest_sum += size
                cells.union.rest_count += 1
                return cells
        cells.union.add(size)
        if size > cells.capacity:
            cells.overflows += 1
        return cells

    def remember(self, phase: str, seq: int) -> None:
        """Let `note_union` find the cells of this sequence length by itself."""
        if seq in self.by_phase[phase]:
            self.fast[seq] = self.by_phase[phase][seq]

    def totals(self) -> Totals:
        """Sizes by sequence length and layer."""
        found: Totals = {}
        past = [(seq, layer, sizes) for seq, layers in self._past.items() for layer, sizes in layers.items()]
        pending = [(self.pending[0], self.pending[2], {self.pending[1]: 1})] if self.pending else []
        for seq, layer, sizes in (*past, *self._counted(), *pending):
            _merge(found.setdefault(seq, {}).setdefault(layer, {}), sizes)
        return found

    def _row(self, phase: str, seq: int) -> SeqCells | None:
        """The row of one sequence length; None when as many long ones as the snapshot keeps apart exist already."""
        row = self._rows.get((phase, seq))
        if row is None:
            if seq > catalog.SEQ_EXACT and sum(known[1] > catalog.SEQ_EXACT for known in self._rows) >= EXACT_SEQS:
                return None
            label = "" if seq == UNKNOWN else catalog.seq_label(seq)
            row = SeqCells(self.home, self.home.phases[phase], seq or None, label)
            self._rows[phase, seq] = row
            self.by_phase[phase][seq] = row.by_layer
            self.home.guest_rows.append(row)
        return row

    def _keep(self, seq: int, size: int, layer: int) -> None:
        _merge(self._past.setdefault(seq, {}).setdefault(max(layer, -1), {}), {size: 1})

    def _counted(self) -> Iterator[tuple[int, int, Sizes]]:
        for (phase, seq), row in list(self._rows.items()):
            for layer, cells in row.layers.copy().items():
                sizes = cells.sizes.copy()
                for size, times in self._before_reset.get((phase, seq, layer), {}).items():
                    sizes[size] -= times
                sizes = {size: times for size, times in sizes.items() if times}
                if sizes and layer != OTHER:
                    yield seq, layer, sizes


_DISTINCT = 8000
"""Sizes of one layer that its cell keeps for us, below the cell's own limit: the dicts stay exact above it."""


def _merge(into: Sizes, sizes: Sizes) -> None:
    for size, times in sizes.items():
        into[size] = into.get(size, 0) + times


def sums(totals: Totals) -> dict[int, list[int]]:
    """UNION_PROF: sum of sizes and layer calls, by sequence length."""
    return {
        seq: [
            sum(size * times for sizes in layers.values() for size, times in sizes.items()),
            sum(times for sizes in layers.values() for times in sizes.values()),
        ]
        for seq, layers in totals.items()
    }


def samples(totals: Totals) -> dict[int, dict[int, Samples]]:
    """UNION_SAMPLES: every size, by sequence length and layer."""
    found = {
        seq: {layer: Samples(sizes) for layer, sizes in layers.items() if layer >= 0} for seq, layers in totals.items()
    }
    return {seq: layers for seq, layers in found.items() if layers}


class View(dict[int, Any]):
    """A dict that is computed when it is read. Entries can be removed; what is put in is dropped, and said so."""

    __slots__ = ("_at", "_gone", "_lose", "_show", "_unions")

    def __init__(self, unions: Unions, show: Callable[[Totals], dict[int, Any]], lose: Lose) -> None:
        super().__init__({0: None})  # never shown; json takes a dict without entries for empty, and does not ask
        self._unions = unions
        self._show = show
        self._lose = lose
        self._gone: Totals = {}  # what was removed here, since the reset of this number
        self._at = unions.resets

    def _totals(self) -> Totals:
        totals = self._unions.totals()
        if self._at != self._unions.resets:
            self._at = self._unions.resets
            self._gone = {}
        for seq, layers in self._gone.items():
            for layer, sizes in layers.items():
                left = totals.setdefault(seq, {}).setdefault(layer, {})
                for size, times in sizes.items():
                    left[size] = left.get(size, 0) - times
        found = {
            seq: {layer: {size: times for size, times in sizes.items() if times > 0} for layer, sizes in layers.items()}
            for seq, layers in totals.items()
        }
        kept = {seq: {layer: sizes for layer, sizes in layers.items() if sizes} for seq, layers in found.items()}
        return {seq: layers for seq, layers in kept.items() if layers}

    def _now(self) -> dict[int, Any]:
        return self._show(self._totals() if self._gone else self._unions.totals())

    def _remove(self, *keys: Any) -> None:
        self._totals()  # forgets what a reset removed
        totals = self._unions.totals()
        for key in keys:
            self._gone[int(key)] = totals[int(key)]

    def clear(self) -> None:
        """Empty this dict; `union_reset` empties both, and frees their memory."""
        self._remove(*self._now())

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove one sequence length, as a dict does."""
        found = self._now()
        if key in found:
            self._remove(key)
        return found.pop(key, *default)

    def popitem(self) -> tuple[int, Any]:
        """Remove the last one."""
        item = self._now().popitem()
        self._remove(item[0])
        return item

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._lose("note_union", TypeError("unions are counted by note_union(), not written to"))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """What is there, or the default, which is not kept."""
        found = self._now()
        if key not in found:
            self[key] = default
        return found.setdefault(key, default)

    def update(self, *args: Any, **named: Any) -> None:
        """Drop what is given."""
        for key, value in dict(*args, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> View:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._now(),)


def _reading(name: str) -> Callable[..., Any]:
    def read(self: View, *args: Any) -> Any:
        return getattr(self._now(), name)(*(arg._now() if isinstance(arg, View) else arg for arg in args))

    read.__name__ = name
    return read


for _name in (
    *("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__", "__repr__", "__reversed__"),
    *("__ror__", "copy", "get", "items", "keys", "values"),
):
    setattr(View, _name, _reading(_name))
