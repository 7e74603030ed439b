"""The figures that one frame shows, from a window: by phase and never blended, each a number or the word why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from moe_telemetry import catalog as c
from moe_telemetry.catalog import Kind, Metric
from moe_telemetry.figures import acceptance, nearest_rank, phase_figures, smallest_pool

from .layers import LayerRow, layer_rows
from .window import Window


class Absent(Enum):
    """Why there is no figure."""

    IDLE = "idle"
    NO_POOL = "no pool"
    NO_PREDICTOR = "no predictor"
    UNTIMED = "not timed"
    UNCOUNTED = "not counted"
    NONE_YET = "none yet"
    UNKNOWN = "not known"
    NO_MLX = "no MLX"
    NO_LIMIT = "no limit"
    ONE_SCRAPE = "one scrape"
    NO_DRAFTS = "no drafts"
    SNAPSHOT = "only in a snapshot"


Figure = float | Absent

_LACKING: dict[str, Absent] = {
    c.LOOKUPS.name: Absent.NO_POOL,
    c.PREDICTOR_EXPERTS.name: Absent.NO_PREDICTOR,
    c.FORWARD_DURATION.name: Absent.UNTIMED,
    c.LAYER_CALLS.name: Absent.UNCOUNTED,
    c.SPECULATION_TOKENS.name: Absent.NO_DRAFTS,
    c.MLX_MEMORY.name: Absent.NO_MLX,
    c.MLX_MEMORY_PEAK.name: Absent.NO_MLX,
    c.MLX_MEMORY_LIMIT.name: Absent.NO_LIMIT,
}
"""What it means when a run has no such metric; most exist from its start, at 0, whether or not their hook is called."""


@dataclass(frozen=True)
class UnionRow:
    """Unions of one sequence length: layer calls a second, and quantiles in experts by nearest rank.

    Exact to 64 experts; above, the upper bound of the bucket, and `window.ABOVE` above the top bound.
    """

    seq: str
    calls: Figure
    p50: int
    p99: int
    largest: int


@dataclass(frozen=True)
class ReadRow:
    """Reads from one source."""

    source: str
    bytes: Figure
    count: Figure
    mean_seconds: Figure


@dataclass(frozen=True)
class PhaseFrame:
    """One phase. Shares are of 1; `speed` is tokens a second of forward time, `by_clock` of the wall.

    `busy`, `prefetch`, `promote` and `block` are seconds a second of wall time: a pass is counted when it ends, so that
    a long one is above 1. `stall` is seconds a token, `overflows` the share of layer calls whose union was above the
    pool. `active`: something was recorded in the window; `running`: age in seconds of the pass in progress.
    """

    phase: str
    active: bool
    running: float
    speed: Figure
    by_clock: Figure
    busy: Figure
    hit: Figure
    late: Figure
    evicted: Figure
    unpredicted: Figure
    recall: Figure
    all_hit: Figure
    stall: Figure
    overflows: Figure
    evictions: Figure
    unions: tuple[UnionRow, ...]
    prefetch: dict[str, Figure]
    promote: dict[str, Figure]
    block: dict[str, Figure]
    reads: tuple[ReadRow, ...]
    layers: tuple[LayerRow, ...]


@dataclass(frozen=True)
class Frame:
    """An endpoint's figures over `seconds`, the time between two scrapes, or of the run so far with one only."""

    run: dict[str, str]
    age: float | None
    seconds: float
    whole_run: bool
    restarted: bool
    phases: dict[str, PhaseFrame]
    pool: int | None
    accepted: Figure
    memory: dict[str, Figure]
    lost: float
    layers_off: bool


def frame(window: Window, whole_run: bool = False) -> Frame:
    """All figures of a window."""
    return Frame(
        run=window.now.info() or {},
        age=window.age,
        seconds=window.seconds,
        whole_run=whole_run,
        restarted=window.restarted,
        phases={phase: _phase(window, phase) for phase in c.PHASES},
        pool=smallest_pool(window),
        accepted=_known(acceptance(window), window, c.SPECULATION_TOKENS),
        memory=_memory(window),
        lost=sum(window.now.values(c.LOST)),
        layers_off=not any(key == "layer" for labels in window.now.named(c.LAYER_CALLS) for key, _ in labels),
    )


def _phase(window: Window, phase: str) -> PhaseFrame:
    of = phase_figures(window, phase)
    passes, busy = window.observed(c.FORWARD_DURATION, phase=phase)
    calls = window.total(c.LAYER_CALLS, phase=phase)
    active = bool(of.tokens or passes or calls)
    a_second = _rates(window)
    wall = _wall_shares(window, phase)

    def known(value: float | None, metric: Metric) -> Figure:
        return _known(value, window, metric)

    speed = known(of.tokens_per_second, c.FORWARD_DURATION)
    share = a_second(busy, c.FORWARD_DURATION)
    if passes and not of.tokens:
        speed = Absent.UNCOUNTED
    elif of.tokens and not passes:  # as of prompts that a server's cache has but for their last token (mlx_lm)
        speed = share = Absent.UNTIMED
    all_hit = known(of.all_hit, c.LAYER_CALLS)
    return PhaseFrame(
        phase=phase,
        active=active,
        running=max(window.gauge(c.FORWARD_ACTIVE, phase=phase), default=0.0),
        speed=speed,
        by_clock=a_second(of.tokens, c.TOKENS),
        busy=share,
        hit=known(of.hit_rate, c.LOOKUPS),
        late=known(of.timing, c.LOOKUPS),
        evicted=known(of.evicted, c.LOOKUPS),
        unpredicted=known(of.unpredicted, c.LOOKUPS),
        recall=known(of.recall, c.PREDICTOR_EXPERTS),
        all_hit=Absent.UNKNOWN if all_hit is Absent.IDLE and calls else all_hit,
        stall=known(of.stall, c.STALL_DURATION),
        overflows=_overflows(window, phase, calls),
        evictions=a_second(window.total(c.EVICTIONS, phase=phase), c.EVICTIONS),
        unions=_unions(window, phase),
        prefetch=wall(c.PREFETCH_DURATION, "stage", c.STAGES),
        promote=wall(c.PROMOTE_DURATION, "step", c.STEPS),
        block=wall(c.BLOCK_DURATION, "segment", c.SEGMENTS),
        reads=tuple(_read(window, phase, source) for source in c.READ_BYTES.label("source").values),
        layers=layer_rows(window, phase),
    )


def _lack(window: Window, metric: Metric) -> Absent | None:
    """Why a run has no figure of a metric at all; None where it recorded something."""
    part = "count" if metric.kind is Kind.HISTOGRAM else ""
    if any(window.now.values(metric, part)):
        return None
    if window.has(metric) and metric in (c.LOOKUPS, c.PREDICTOR_EXPERTS, c.LAYER_CALLS):
        return Absent.IDLE
    if metric is c.FORWARD_DURATION and not any(window.now.values(c.TOKENS)):
        return Absent.IDLE
    return _LACKING.get(metric.name, Absent.NONE_YET)


def _known(value: float | None, window: Window, metric: Metric) -> Figure:
    """A value made of a metric, with None for a window in which it counted nothing."""
    return _lack(window, metric) or (Absent.IDLE if value is None else value)


def _rates(window: Window) -> Callable[[float, Metric], Figure]:
    """Growth of a metric as a rate."""

    def a_second(growth: float, metric: Metric) -> Figure:
        return _lack(window, metric) or (growth / window.seconds if window.seconds else Absent.ONE_SCRAPE)

    return a_second


def _wall_shares(window: Window, phase: str) -> Callable[[Metric, str, tuple[str, ...]], dict[str, Figure]]:
    """Seconds of each segment of a metric as a share of the window."""
    a_second = _rates(window)

    def shares(metric: Metric, key: str, names: tuple[str, ...]) -> dict[str, Figure]:
        observed = {name: window.observed(metric, phase=phase, **{key: name}) for name in names}
        if not any(count for count, _ in observed.values()):
            return dict.fromkeys(names, _lack(window, metric) or Absent.IDLE)
        return {name: a_second(seconds, metric) for name, (_, seconds) in observed.items()}

    return shares


def _unions(window: Window, phase: str) -> tuple[UnionRow, ...]:
    """Sequence lengths that had calls, the most called first."""
    a_second = _rates(window)
    rows = []
    for seq in c.SEQ_VALUES:
        sizes = window.unions(phase, seq=seq)
        p50, p99 = nearest_rank(sizes, 0.5), nearest_rank(sizes, 0.99)
        if p50 is not None and p99 is not None:
            row = UnionRow(seq, a_second(sizes.total(), c.UNION), p50, p99, max(sizes))
            rows.append((sizes.total(), row))
    return tuple(row for _, row in sorted(rows, key=lambda each: -each[0]))


def _overflows(window: Window, phase: str, calls: float) -> Figure:
    if not window.has(c.POOL_CAPACITY):
        return Absent.NO_POOL
    return window.total(c.LAYER_OVERFLOWS, phase=phase) / calls if calls else Absent.IDLE


def _read(window: Window, phase: str, source: str) -> ReadRow:
    a_second = _rates(window)
    count, seconds = window.observed(c.READ_DURATION, phase=phase, source=source)
    return ReadRow(
        source,
        a_second(window.total(c.READ_BYTES, phase=phase, source=source), c.READ_BYTES),
        a_second(count, c.READ_DURATION),
        _known(seconds / count if count else None, window, c.READ_DURATION),
    )


def _memory(window: Window) -> dict[str, Figure]:
    """Bytes: MLX's active, cache, peak and limit, and the process' resident memory."""

    def value(metric: Metric, **labels: str) -> Figure:
        found = window.gauge(metric, **labels)
        return found[0] if found else _LACKING.get(metric.name, Absent.NONE_YET)

    return {
        "active": value(c.MLX_MEMORY, kind="active"),
        "cache": value(c.MLX_MEMORY, kind="cache"),
        "peak": value(c.MLX_MEMORY_PEAK),
        "limit": value(c.MLX_MEMORY_LIMIT),
        "process": value(c.PROCESS_MEMORY),
    }
