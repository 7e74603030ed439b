"""A simulated host as promtool's input series: counters that rise at given rates, gauges, lost scrapes and restarts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from moe_telemetry import catalog as c

LAYERS = ("0", "1")
LOOKUPS_PER_TOKEN = 480
READ_BUCKETS = (0.00128, 0.04096, 0.08192, 0.16384)
GB = 1e9


@dataclass(frozen=True)
class State:
    """What the host does for a while; the defaults are healthy. Rates are per second, shares of 1."""

    decode: float = 10
    """Tokens a second by the wall."""
    prefill: float = 0
    speed: float = 12
    """Decode tokens per second of forward time."""
    sequences: float = 1
    """In a pass, each with a token."""
    accepted: float = 0
    """Share of decode tokens that were drafts."""
    hit: float = 0.9
    timing: float = 0.03
    evicted: float = 0.003
    recall: float = 0.8
    prefill_hit: float = 0.7
    prefill_recall: float = 0.7
    prefill_timing: float = 0.05
    prefill_evicted: float = 0.0
    stall: float = 0.2
    prefill_stall: float = 0.2
    overflows: float = 0
    prefill_overflows: float = 0
    reads: float = 40
    slow_reads: float = 0
    """Share of demand reads that take 82-164 ms."""
    dropped: float = 0
    errors: float = 0
    folded: float = 0
    active: float = 20 * GB
    counted: bool = True
    """Off: passes are timed, tokens are not counted, and their counter stays at 0."""
    hung: str = ""
    """The phase whose pass does not end: its age grows."""
    calls: bool = True
    """Layer calls are recorded."""
    lookups: bool = True
    """Lookups are recorded, and what the predictor said."""
    bypassed: bool = False
    pool: bool = True
    moe: bool = True
    """There are layers at all: a dense model has none of their series."""
    scraped: bool = True
    alive: bool = True
    run: str = "r1"
    """A new name is a restart: counters begin at 0."""
    layer_label: bool = True
    """Off: the label is gone, as with `start(layers="off")`."""
    second_run: bool = False
    """Another telemetry on the same endpoint, with a memory limit of its own."""


Segment = tuple[float, State]


@dataclass(frozen=True)
class Host:
    """An instance and what it does, segment by segment of (seconds, state)."""

    segments: Sequence[Segment]
    instance: str = "mac:9464"
    expect: str = ""

    def series(self, step: float) -> list[dict[str, str]]:
        """promtool's input series, a sample every `step` seconds."""
        identity = f'job="moe",instance="{self.instance}"' + (f',expect="{self.expect}"' if self.expect else "")
        lines: dict[str, _Line] = {}
        totals: dict[str, float] = {}
        run, count, age = "", 0, 0.0
        for seconds, state in self.segments:
            samples = round(seconds / step)
            if state.run != run:
                run, totals = state.run, {}
            slopes = dict(_slopes(state)) if state.alive else {}
            age = age + seconds if state.hung else 0.0
            gauges = dict(_gauges(state))
            for key, value in slopes.items():
                begin, totals[key] = totals.get(key, 0.0), totals.get(key, 0.0) + value * step * samples
                if state.scraped:
                    lines.setdefault(key, _Line()).ramp(count, begin, value * step, samples)
            if state.scraped and state.alive:
                for key, value in gauges.items():
                    lines.setdefault(key, _Line()).ramp(count, value, 0.0, samples)
                for phase in c.PHASES:
                    key = _name(c.FORWARD_ACTIVE.prometheus, phase=phase)
                    hung = phase == state.hung
                    begin = age - seconds if hung else 0.0
                    lines.setdefault(key, _Line()).ramp(count, begin, step if hung else 0.0, samples)
            up = 1.0 if state.scraped and state.alive else 0.0
            lines.setdefault("up", _Line()).ramp(count, up, 0.0, samples)
            for line in lines.values():
                line.end(count)
            count += samples
        return [
            {"series": key.replace("{", f"{{{identity},", 1) if "{" in key else f"{key}{{{identity}}}", "values": text}
            for key, text in sorted((key, line.text()) for key, line in lines.items())
        ]


@dataclass
class _Line:
    parts: list[str] = field(default_factory=list)
    length: int = 0
    live: bool = False

    def ramp(self, at: int, begin: float, slope: float, samples: int) -> None:
        if self.length < at:
            self.parts.append(f"_x{at - self.length}")
        self.parts.append(f"{begin:.12g}{slope:+.12g}x{samples - 1}")
        self.length, self.live = at + samples, True

    def end(self, at: int) -> None:
        """A series that the segment that began at `at` did not scrape is marked stale there."""
        if self.live and self.length <= at:
            self.parts.append("stale")
            self.length, self.live = self.length + 1, False

    def text(self) -> str:
        return " ".join(self.parts)


def _name(metric: str, **labels: str) -> str:
    inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{metric}{{{inner}}}" if inner else metric


def _slopes(state: State) -> Iterator[tuple[str, float]]:
    if state.moe:
        for labels in _layers(state):
            yield from _layer(state, "decode", labels)
            yield from _layer(state, "prefill", labels)
    for phase, tokens, speed, stall in (
        ("decode", state.decode, state.speed, state.stall),
        ("prefill", state.prefill, 400, state.prefill_stall),
    ):
        yield _name(c.TOKENS.prometheus, phase=phase), tokens if state.counted else 0
        busy = tokens / speed
        yield _name(f"{c.FORWARD_DURATION.prometheus}_sum", phase=phase, seq="1"), busy
        passes = tokens * (1 - state.accepted) / state.sequences
        yield _name(f"{c.FORWARD_DURATION.prometheus}_count", phase=phase, seq="1"), passes
        yield _name(f"{c.STALL_DURATION.prometheus}_sum", phase=phase), busy * stall
    for source in ("demand", "prefetch"):
        reads = state.reads if state.decode or state.prefill else 0
        slow = state.slow_reads if source == "demand" else 0
        for bound in (*READ_BUCKETS, float("inf")):
            below = (1 - slow) * (0.5 if bound < 0.04 else 1) + (slow if bound > 0.1 else 0)
            shown = "+Inf" if bound == float("inf") else f"{bound:g}"
            bucket = _name(f"{c.READ_DURATION.prometheus}_bucket", phase="decode", source=source, le=shown)
            yield bucket, reads * below
        yield _name(f"{c.READ_DURATION.prometheus}_count", phase="decode", source=source), reads
    yield _name(c.SPECULATION_TOKENS.prometheus, outcome="accepted"), state.decode * state.accepted
    yield _name(c.LOST.prometheus, reason="not_a_number"), state.dropped
    yield _name(c.HOOK_ERRORS.prometheus, hook="routed"), state.errors
    yield c.LAYER_FOLDED.prometheus, state.folded


def _layers(state: State) -> list[dict[str, str]]:
    return [{"layer": layer} for layer in LAYERS] if state.layer_label else [{}]


def _layer(state: State, phase: str, labels: dict[str, str]) -> Iterator[tuple[str, float]]:
    decode = phase == "decode"
    tokens = state.decode if decode else state.prefill
    looked = tokens * LOOKUPS_PER_TOKEN / len(_layers(state)) if state.lookups else 0
    hit, timing, evicted, recall = (
        (state.hit, state.timing, state.evicted, state.recall)
        if decode
        else (state.prefill_hit, state.prefill_timing, state.prefill_evicted, state.prefill_recall)
    )
    where = {"phase": phase, **labels}
    if state.pool:
        shares = dict(zip(c.OUTCOMES, (hit, timing, evicted, 1 - hit - timing - evicted), strict=True))
        for outcome, share in shares.items():
            yield _name(c.LOOKUPS.prometheus, **where, outcome=outcome), looked * share
        for outcome, share in (("recalled", recall), ("missed", 1 - recall)):
            yield _name(c.PREDICTOR_EXPERTS.prometheus, **where, outcome=outcome), looked * share
    calls = tokens * 24 if state.calls else 0
    residencies = {"all_hit": 0.0, "partial": 0.0, "bypassed": 0.0, "unknown": 0.0}
    if state.bypassed:
        residencies["bypassed"] = calls
    elif state.lookups and state.pool:
        residencies |= {"all_hit": calls * 0.3, "partial": calls * 0.7}
    else:
        residencies["unknown"] = calls
    for residency, rate in residencies.items():
        yield _name(c.LAYER_CALLS.prometheus, **where, residency=residency), rate
    overflows = state.overflows if decode else state.prefill_overflows
    yield _name(c.LAYER_OVERFLOWS.prometheus, **where), overflows / len(_layers(state))


def _gauges(state: State) -> Iterator[tuple[str, float]]:
    runs = (state.run, f"{state.run}-second") if state.second_run else (state.run,)
    for run in runs:
        yield _name(c.RUN_INFO.prometheus, model="m", run=run, runtime="rt", version="0"), 1
    yield _name(c.MLX_MEMORY.prometheus, kind="active"), state.active
    yield _name(c.MLX_MEMORY.prometheus, kind="cache"), 25 * GB
    yield c.MLX_MEMORY_LIMIT.prometheus, 48 * GB
    if state.second_run:
        yield _name(c.MLX_MEMORY_LIMIT.prometheus, process="second"), 48 * GB
    if state.pool and state.moe:
        for labels in _layers(state):
            yield _name(c.POOL_CAPACITY.prometheus, **labels), 32


def minutes(count: float, **changes: object) -> Segment:
    """A segment of so many minutes in a healthy state with these changes."""
    return count * 60, replace(State(), **changes)
