"""Unions that the drop-in was told of, counted once, in cells that metrics and dicts (profiling_views.py) share.

The rows here are rows of the telemetry that the recorder feeds (`Store.guest_rows`), kept apart from those of the
recorder's hooks so that the dicts hold what `note_union` was given and nothing else. While no telemetry runs they
belong to a store that nobody exports.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import catalog
from .cells import LayerCells, SeqCells
from .store import EXACT_SEQS, OTHER, Store
from .values import MAX_COUNT, MAX_LAYER, Refused

Sizes = dict[int, int]
"""How often each union size was seen."""
Totals = dict[int, dict[int, Sizes]]
"""By sequence length and layer."""
UNKNOWN = 0
"""Sequence length of records that came before any union."""
_DISTINCT = 8000
"""Sizes of one layer that its cell keeps for us, below the cell's own limit: the dicts stay exact above it."""


def takes(seq: int, size: int, layer: int) -> bool:
    """Whether such a union can be exported; the dicts hold it in any case."""
    return seq > UNKNOWN and 0 <= size <= MAX_COUNT and layer <= MAX_LAYER


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
            made = SeqCells(self.home, self.home.phases[phase], seq or None, label)
            row = self._rows.setdefault((phase, seq), made)  # another thread may have been here first
            if row is made:
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


def _merge(into: Sizes, sizes: Sizes) -> None:
    for size, times in sizes.items():
        into[size] = into.get(size, 0) + times
