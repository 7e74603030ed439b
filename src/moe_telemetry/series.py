"""Cells read into series: label values and numbers, metric by metric, before anything knows of OpenTelemetry.

The one reading that collection and snapshot share, so that a scrape and a snapshot cannot disagree.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from . import catalog as c
from .catalog import Kind, Metric
from .cells import HistogramCell, LayerCells, PhaseCells, SeqCells
from .reuse import curve_of
from .store import Layer, Store

LabelValues = tuple[str, ...]


@dataclass(frozen=True)
class Distribution:
    """A histogram at one moment: counts by bucket (one more than bounds), and the sum of the values."""

    counts: tuple[int, ...]
    sum: int | float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @classmethod
    def of(cls, cell: HistogramCell) -> Distribution:
        """Copy of a cell."""
        return cls(cell.by_bucket(), cell.sum)


Value = int | float | Distribution
_Put = Callable[[Metric, Iterable[tuple[LabelValues, Value]]], None]


@dataclass
class Family:
    """All series of one metric."""

    metric: Metric
    series: dict[LabelValues, Value] = field(default_factory=dict)


@dataclass
class Unions:
    """Exact unions of one phase and sequence length: `layers[layer][size]` is the number of layer calls.

    `rest` holds what Tally no longer keeps apart: count, sum, maximum.
    """

    layers: dict[str, dict[int, int]]
    rest: tuple[int, int, int] = (0, 0, 0)


def read(store: Store, layers: bool = True) -> list[Family]:
    """Every series that exists now, in the catalog's order; without `layers` the label `layer` is summed away."""
    families: dict[str, Family] = {}
    store.curves.collect()

    def put(metric: Metric, values: Iterable[tuple[LabelValues, Value]]) -> None:
        families[metric.name] = Family(metric, dict(values))

    phases = list(store.phases.values())
    passes = list(store.rows.values())
    rows = [*passes, *store.guest_rows]
    _read_layers(store, rows, put)
    time.sleep(0)
    of_known_length = [row for row in rows if row.seq]
    put(c.PREDICTOR_CANDIDATES, _candidates(passes))
    put(c.UNION, _unions_by_seq(of_known_length))
    put(c.UNION_MAX, _union_max_by_seq(of_known_length))
    put(c.FORWARD_DURATION, _forward_durations(passes))
    _read_phases(phases, put)
    _read_curves(store, put)
    put(c.SPECULATION_TOKENS, ((("accepted",), store.accepted), (("rejected",), store.rejected)))
    put(c.FORWARD_ACTIVE, _forward_active(store))
    gen_ai = store.identity.gen_ai()
    for metric, cell in ((c.TTFT, store.ttft), (c.TPOT, store.tpot), (c.REQUEST_DURATION, store.request)):
        put(metric, ((gen_ai, Distribution.of(cell)),))
    put(c.RUN_START_TIME, (((), store.identity.start_time),))
    put(c.LOST, (((reason,), count) for reason, count in store.lost.copy().items()))
    put(c.LAYER_FOLDED, (((), store.folded),))
    put(c.HOOK_ERRORS, (((hook,), count) for hook, count in store.hook_errors.copy().items()))
    _add_fed(store, families)
    _leave_out_absent(store, families)
    found = [
        families[metric.name] for metric in c.CATALOG if families.get(metric.name) and families[metric.name].series
    ]
    return found if layers else [_without_layer(family) for family in found]


def unions(store: Store) -> dict[str, dict[str, Unions]]:
    """Exact unions by phase and sequence length, "<=" and the label's value where lengths share their cells."""
    found: dict[str, dict[str, Unions]] = {phase: {} for phase in c.PHASES}
    for row in [*store.rows.values(), *store.guest_rows]:
        shared = row.seq if row.seq.endswith("+") else f"<={row.seq}"
        seq = shared if row.tokens is None else str(row.tokens)
        known = found[row.phase.name].get(seq, Unions({}))
        exact, rest = known.layers, known.rest
        for index, cells in row.layers.copy().items():
            tally = cells.union
            if sizes := tally.sizes.copy():
                already = exact.get(Layer(index).label, {})
                for size, times in already.items():
                    sizes[size] = sizes.get(size, 0) + times
                exact[Layer(index).label] = dict(sorted(sizes.items()))
            rest = (rest[0] + tally.rest_count, rest[1] + tally.rest_sum, max(rest[2], tally.rest_max))
        if exact:
            found[row.phase.name][seq] = Unions(exact, rest)
    return found


# -- by layer -------------------------------------------------------------------------------------------------

_LAYER_COUNTERS: tuple[tuple[Metric, tuple[tuple[LabelValues, str], ...]], ...] = (
    (c.LOOKUPS, tuple(((outcome,), outcome) for outcome in c.OUTCOMES)),
    (c.LAYER_CALLS, tuple(((residency,), residency) for residency in c.RESIDENCIES)),
    (c.LAYER_OVERFLOWS, (((), "overflows"),)),
    (c.PREDICTOR_EXPERTS, ((("recalled",), "recalled"), (("missed",), "missed"))),
    (c.EVICTIONS, (((), "evictions"),)),
)
"""Counters by phase and layer: the label values behind those two, and the field of LayerCells."""


def _read_layers(store: Store, rows: list[SeqCells], put: _Put) -> None:
    layers = sorted(store.layers.copy().values(), key=lambda layer: (layer.index < 0, layer.index))
    counters: dict[str, dict[LabelValues, Value]] = {metric.name: {} for metric, _ in _LAYER_COUNTERS}
    experts: dict[LabelValues, Value] = {}
    largest: dict[LabelValues, Value] = {}
    prefetch_hits: dict[LabelValues, Value] = {}
    for phase in c.PHASES:
        time.sleep(0)  # hands the interpreter lock over, as rendering does
        of_phase = [row.layers for row in rows if row.phase.name == phase]
        hits = 0
        for layer in layers:
            cells = [by_index[layer.index] for by_index in of_phase if layer.index in by_index]
            labels = (phase, layer.label)
            for metric, fields in _LAYER_COUNTERS:
                series = counters[metric.name]
                for values, name in fields:
                    series[labels + values] = sum([getattr(cell, name) for cell in cells])
            experts[labels] = sum([cell.union.sum() for cell in cells])
            if top := max([cell.union.max() for cell in cells], default=0):
                largest[labels] = top
            hits += sum([cell.prefetch_hits for cell in cells])
        prefetch_hits[(phase,)] = hits
    for metric, _ in _LAYER_COUNTERS:
        put(metric, counters[metric.name].items())
    put(c.LAYER_EXPERTS, experts.items())
    put(c.LAYER_UNION_MAX, largest.items())
    put(c.PREFETCH_HITS, prefetch_hits.items())
    for metric, name in ((c.POOL_CAPACITY, "capacity"), (c.POOL_RESIDENT, "resident"), (c.LOAD_PEAK, "load_peak")):
        gauges = ((layer.label, getattr(layer, name)) for layer in layers)
        put(metric, (((label,), value) for label, value in gauges if value is not None))


def _candidates(passes: list[SeqCells]) -> Iterator[tuple[LabelValues, Value]]:
    """Of the recorder's passes only: guests know of predictions that were routed, and not of the wasted ones."""
    for phase in c.PHASES:
        cells = list(_cells([row for row in passes if row.phase.name == phase]))
        yield (phase, "used"), sum([cell.recalled for cell in cells])
        yield (phase, "wasted"), sum([cell.wasted for cell in cells])


# -- by phase and sequence length -----------------------------------------------------------------------------


def _by_seq(rows: list[SeqCells]) -> Iterator[tuple[LabelValues, list[SeqCells]]]:
    """Rows by label values: several sequence lengths may share a label."""
    found: dict[LabelValues, list[SeqCells]] = {}
    for row in rows:
        found.setdefault((row.phase.name, row.seq), []).append(row)
    yield from found.items()


def _cells(rows: list[SeqCells]) -> Iterator[LayerCells]:
    for row in rows:
        yield from row.layers.copy().values()


def _unions_by_seq(rows: list[SeqCells]) -> Iterator[tuple[LabelValues, Value]]:
    for labels, shared in _by_seq(rows):
        sizes: defaultdict[int, int] = defaultdict(int)
        rest_count = rest_sum = 0
        for cells in _cells(shared):
            for size, times in cells.sizes.copy().items():
                sizes[size] += times
            rest_sum += cells.union.rest_sum
            rest_count += cells.union.rest_count
        counts = [0] * (len(c.UNION_BOUNDS) + 1)
        for size, times in sizes.items():
            counts[bisect_left(c.UNION_BOUNDS, size)] += times
        counts[-1] += rest_count
        yield labels, Distribution(tuple(counts), sum(size * times for size, times in sizes.items()) + rest_sum)


def _union_max_by_seq(rows: list[SeqCells]) -> Iterator[tuple[LabelValues, Value]]:
    for labels, shared in _by_seq(rows):
        if top := max((cells.union.max() for cells in _cells(shared)), default=0):
            yield labels, top


def _forward_durations(rows: list[SeqCells]) -> Iterator[tuple[LabelValues, Value]]:
    for labels, shared in _by_seq(rows):
        counts = [sum(bucket) for bucket in zip(*(row.duration.counts for row in shared), strict=True)]
        yield labels, Distribution(tuple(counts), sum(row.duration.sum for row in shared))


def _forward_active(store: Store) -> Iterator[tuple[LabelValues, Value]]:
    if not store.forward_done_seen:
        return
    active = [] if store.ended else list(store.active.copy().values())
    now = time.perf_counter()  # behind the copy: an age is never negative
    for phase in c.PHASES:
        yield (phase,), max((now - begin for name, begin in active if name == phase), default=0.0)


# -- by phase -------------------------------------------------------------------------------------------------


def _read_phases(phases: list[PhaseCells], put: _Put) -> None:
    def by_key(field_name: str) -> Iterator[tuple[LabelValues, Value]]:
        for phase in phases:
            for key, cell in getattr(phase, field_name).copy().items():
                yield (phase.name, key), Distribution.of(cell) if isinstance(cell, HistogramCell) else cell.count

    def single(field_name: str) -> Iterator[tuple[LabelValues, Value]]:
        for phase in phases:
            cell = getattr(phase, field_name)
            yield (phase.name,), Distribution.of(cell) if isinstance(cell, HistogramCell) else cell

    for metric, name in (
        (c.PREFETCH_DURATION, "prefetch"),
        (c.PROMOTE_DURATION, "promote"),
        (c.BLOCK_DURATION, "block"),
        (c.PREFETCH_DROPPED, "dropped"),
        (c.READ_BYTES, "read_bytes"),
        (c.READ_DURATION, "read_duration"),
        (c.DEGRADED, "degraded"),
    ):
        put(metric, by_key(name))
    for metric, name in (
        (c.PREFETCH_PLACED, "placed"),
        (c.PREFETCH_WASTED, "wasted_bytes"),
        (c.PREFETCH_WINDOW, "window"),
        (c.BLOCK_CALLS, "block_calls"),
        (c.STALL_DURATION, "stall"),
        (c.TOKENS, "tokens"),
    ):
        put(metric, single(name))


def _read_curves(store: Store, put: _Put) -> None:
    lookups: dict[LabelValues, Value] = {}
    hits: dict[LabelValues, Value] = {}
    for phase in c.PHASES:
        time.sleep(0)  # to others
        curves = [curve_of(stack.feeds[phase]) for _, stack in store.curves.followed()]
        lookups[(phase,)] = sum([curve.lookups for curve in curves])
        for slots in c.POOL_SIZES:
            hits[phase, str(slots)] = sum([curve.at(slots) for curve in curves])
    put(c.SIMULATED_LOOKUPS, lookups.items())
    put(c.SIMULATED_HITS, hits.items())


# -- what the reading as a whole decides ----------------------------------------------------------------------


def _add_fed(store: Store, families: dict[str, Family]) -> None:
    for (name, labels), value in store.fed.copy().items():
        series = families[name].series
        already = series.get(labels, 0)
        if not isinstance(already, Distribution):
            series[labels] = already + value


def _leave_out_absent(store: Store, families: dict[str, Family]) -> None:
    """A runtime without residency or predictor has no such series; once seen, they stay."""
    lookups, predictor = families[c.LOOKUPS.name], families[c.PREDICTOR_EXPERTS.name]
    candidates = families[c.PREDICTOR_CANDIDATES.name]
    store.has_lookups = store.has_lookups or any(lookups.series.values())
    store.has_predictor = store.has_predictor or any((*predictor.series.values(), *candidates.series.values()))
    if not store.has_lookups:
        lookups.series.clear()
    if not store.has_predictor:
        predictor.series.clear()
        candidates.series.clear()
    simulated = families[c.SIMULATED_LOOKUPS.name].series
    if not (any(simulated.values()) or (store.has_lookups and store.curves.mode != "off")):
        simulated.clear()
        families[c.SIMULATED_HITS.name].series.clear()


_SMALLEST = frozenset((c.POOL_CAPACITY.name, c.POOL_RESIDENT.name))


def _without_layer(family: Family) -> Family:
    """Sum counters over layers; of gauges keep the smallest pool, or the largest value."""
    keys = family.metric.keys
    if "layer" not in keys:
        return family
    at = keys.index("layer")
    labels = tuple(label for label in family.metric.labels if label.key != "layer")
    merged: dict[LabelValues, list[int | float]] = {}
    for values, value in family.series.items():
        if not isinstance(value, Distribution):
            merged.setdefault(values[:at] + values[at + 1 :], []).append(value)
    gauge = min if family.metric.name in _SMALLEST else max
    combine = sum if family.metric.kind is Kind.COUNTER else gauge
    return Family(replace(family.metric, labels=labels), {key: combine(found) for key, found in merged.items()})
