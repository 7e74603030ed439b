"""Every metric, once: instruments, reference page, dashboards, rules and tests derive from this table.

A leaf: it imports nothing of the package, so everything may import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """The three shapes a metric takes on the wire."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Label:
    """A label's key and its closed set of values; an empty set means values known only at run time."""

    key: str
    values: tuple[str, ...] = ()

    @property
    def prometheus(self) -> str:
        """The key as scraped."""
        return self.key.replace(".", "_")


UNIT_SUFFIX = {"s": "_seconds", "By": "_bytes"}
"""What the Prometheus exporter appends for a unit; units in braces leave no trace."""


@dataclass(frozen=True)
class Metric:
    """One metric of the catalog.

    `bounds` are a histogram's inclusive upper bucket bounds in `unit`, ascending, without +Inf.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[Label, ...]
    help: str
    bounds: tuple[float, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Label keys in the order in which the cells hold their values."""
        return tuple(label.key for label in self.labels)

    @property
    def prometheus(self) -> str:
        """The name as scraped, by the exporter's rules: dots, the unit's suffix, `_total` behind counters."""
        suffix = UNIT_SUFFIX.get(self.unit, "") + ("_total" if self.kind is Kind.COUNTER else "")
        return self.name.replace(".", "_") + suffix

    def label(self, key: str) -> Label:
        """The label of that key; KeyError when the metric has none."""
        for label in self.labels:
            if label.key == key:
                return label
        raise KeyError(key)


def _doubling(first: float, count: int) -> tuple[float, ...]:
    return tuple(first * 2.0**step for step in range(count))


def _forward_bounds() -> tuple[float, ...]:
    """Fine from 16 ms to 2 s: with doubling alone 8 and 15 tok/s fall into one bucket."""
    fine = (round(0.016 * 2.0 ** (step / 4), 6) for step in range(1, 28))
    return (*_doubling(0.001, 5), *fine, 2.0, *_doubling(4.096, 6))


HOST_BOUNDS = _doubling(1e-6, 24)
"""Seconds of host work: 1 us doubling to 8.4 s."""
READ_BOUNDS = _doubling(1e-5, 22)
"""Seconds of reads and stalls: 10 us doubling to 21 s."""
FORWARD_BOUNDS = _forward_bounds()
"""Seconds of a forward pass: 1-16 ms doubling, by the fourth root of two to 2 s, doubling to 131 s."""
UNION_BOUNDS = (*(float(size) for size in range(1, 65)), 96.0, 128.0, 192.0, 256.0, 384.0, 512.0)
"""Experts of a union: every integer to 64, so that the ceiling of a quantile is exact where it matters."""
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
"""Seconds, the GenAI convention's bounds continued upward for streaming speeds."""
TPOT_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0)
REQUEST_BOUNDS = (*(0.01 * 2.0**step for step in range(14)), *_doubling(163.84, 7))

PHASES = ("prefill", "decode")
SEQ_EXACT = 16
"""Sequence lengths with a label value of their own; longer ones share the next power of two."""
SEQ_TOP = 4096
SEQ_VALUES = (
    *(str(seq) for seq in range(1, SEQ_EXACT + 1)),
    *(str(2**power) for power in range(5, 13)),
    f"{SEQ_TOP}+",
)


def seq_label(tokens: int) -> str:
    """The label value of a pass of `tokens` (at least 1) tokens per sequence."""
    if tokens <= SEQ_EXACT:
        return str(tokens)
    return str(1 << (tokens - 1).bit_length()) if tokens <= SEQ_TOP else SEQ_VALUES[-1]


LAYER_NONE = "none"
LAYER_OTHER = "other"

_PHASE = Label("phase", PHASES)
_LAYER = Label("layer")
_SEQ = Label("seq", SEQ_VALUES)
_SOURCE = Label("source", ("demand", "prefetch"))
_GEN_AI = (Label("gen_ai.operation.name"), Label("gen_ai.provider.name"), Label("gen_ai.request.model"))

OUTCOMES = ("hit", "miss_timing", "miss_evicted", "miss_unpredicted")
RESIDENCIES = ("all_hit", "partial", "bypassed", "unknown")
STAGES = ("predict", "submit", "promote")
STEPS = ("take", "route", "place")
SEGMENTS = ("route", "pyremap", "fetch", "matmul", "combine")
DROP_REASONS = ("budget", "queue_full", "no_slot", "unused")
DEGRADED_MODES = ("substituted", "skipped", "cpu")
POOL_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
"""Slots a layer for which the hits of a simulated pool are exported; the snapshot has every size."""
HOOKS = (
    *("forward", "forward_done", "tokens", "speculation", "request", "routed", "routed_array"),
    *("union", "recall"),
    *("prefetch", "promote", "window", "placed", "prefetch_dropped", "block", "block_call"),
    *("read", "stall", "evicted", "degraded", "pool", "cumulative"),
)
LOST_REASONS = (
    "not_a_number",
    "not_finite",
    "negative",
    "not_integer",
    "out_of_range",
    "lazy_array",
    "unevaluated",
    "too_many",
    "unknown_label",
    "unknown_metric",
    "unknown_pass",
    "name_taken",
    "changed",
    "error",
)
"""Why a record was dropped: the closed set of ``moe.telemetry.dropped``'s reason."""

LOOKUPS = Metric(
    "moe.expert.lookups",
    Kind.COUNTER,
    "{expert}",
    (_PHASE, _LAYER, Label("outcome", OUTCOMES)),
    "Routed experts by outcome: hit (resident), miss_timing (A: predicted, not ready), miss_evicted (A: predicted, "
    "ready, not resident), miss_unpredicted (B). The outcomes sum to the routed experts.",
)
LAYER_CALLS = Metric(
    "moe.layer.calls",
    Kind.COUNTER,
    "{call}",
    (_PHASE, _LAYER, Label("residency", RESIDENCIES)),
    "MoE layer calls: all routed experts resident, some missing, bypassed (a fast path that keeps no counts), unknown.",
)
LAYER_EXPERTS = Metric(
    "moe.layer.experts",
    Kind.COUNTER,
    "{expert}",
    (_PHASE, _LAYER),
    "Distinct routed experts summed over layer calls (the same calls that moe.layer.calls counts).",
)
LAYER_OVERFLOWS = Metric(
    "moe.layer.overflows",
    Kind.COUNTER,
    "{call}",
    (_PHASE, _LAYER),
    "Layer calls whose union was above the layer's pool capacity at that moment.",
)
LAYER_UNION_MAX = Metric(
    "moe.layer.union.max",
    Kind.GAUGE,
    "{expert}",
    (_PHASE, _LAYER),
    "Largest union of the layer since the start of the run.",
)
UNION = Metric(
    "moe.expert.union",
    Kind.HISTOGRAM,
    "{expert}",
    (_PHASE, _SEQ),
    "Distinct experts routed in one layer call, by tokens per sequence.",
    UNION_BOUNDS,
)
UNION_MAX = Metric(
    "moe.expert.union.max",
    Kind.GAUGE,
    "{expert}",
    (_PHASE, _SEQ),
    "Largest union of any layer since the start of the run.",
)
PREDICTOR_EXPERTS = Metric(
    "moe.predictor.experts",
    Kind.COUNTER,
    "{expert}",
    (_PHASE, _LAYER, Label("outcome", ("recalled", "missed"))),
    "Routed experts that the predictor named, or did not name.",
)
PREDICTOR_CANDIDATES = Metric(
    "moe.predictor.candidates",
    Kind.COUNTER,
    "{expert}",
    (_PHASE, Label("outcome", ("used", "wasted"))),
    "Predicted experts that were routed, or were not.",
)
PREFETCH_DURATION = Metric(
    "moe.prefetch.duration",
    Kind.HISTOGRAM,
    "s",
    (_PHASE, Label("stage", STAGES)),
    "Host time of a prefetch stage of one layer.",
    HOST_BOUNDS,
)
PROMOTE_DURATION = Metric(
    "moe.promote.duration",
    Kind.HISTOGRAM,
    "s",
    (_PHASE, Label("step", STEPS)),
    "Host time of a step inside promote.",
    HOST_BOUNDS,
)
PREFETCH_PLACED = Metric(
    "moe.prefetch.placed", Kind.COUNTER, "{expert}", (_PHASE,), "Experts that a prefetch wrote into the pool."
)
PREFETCH_HITS = Metric(
    "moe.prefetch.hits",
    Kind.COUNTER,
    "{expert}",
    (_PHASE,),
    "Hits that a prefetch made: routed, predicted, ready and resident. The other hits are reuse.",
)
PREFETCH_DROPPED = Metric(
    "moe.prefetch.dropped",
    Kind.COUNTER,
    "{expert}",
    (_PHASE, Label("reason", DROP_REASONS)),
    "Predicted experts that a budget, a full queue or a full pool left out, or that were read and never used.",
)
PREFETCH_WASTED = Metric(
    "moe.prefetch.wasted", Kind.COUNTER, "By", (_PHASE,), "Bytes that a prefetch read for nothing."
)
PREFETCH_WINDOW = Metric(
    "moe.prefetch.window",
    Kind.HISTOGRAM,
    "s",
    (_PHASE,),
    "Time from submit to promote of one layer: what a read can hide in.",
    HOST_BOUNDS,
)
BLOCK_DURATION = Metric(
    "moe.block.duration",
    Kind.HISTOGRAM,
    "s",
    (_PHASE, Label("segment", SEGMENTS)),
    "Host time of a segment of the MoE block.",
    HOST_BOUNDS,
)
BLOCK_CALLS = Metric("moe.block.calls", Kind.COUNTER, "{call}", (_PHASE,), "Calls of the MoE block.")
READ_BYTES = Metric("moe.expert.read", Kind.COUNTER, "By", (_PHASE, _SOURCE), "Expert weights read from storage.")
READ_DURATION = Metric(
    "moe.expert.read.duration",
    Kind.HISTOGRAM,
    "s",
    (_PHASE, _SOURCE),
    "Duration of one read of expert weights.",
    READ_BOUNDS,
)
STALL_DURATION = Metric(
    "moe.expert.stall.duration",
    Kind.HISTOGRAM,
    "s",
    (_PHASE,),
    "Time a forward pass was blocked on experts.",
    READ_BOUNDS,
)
EVICTIONS = Metric(
    "moe.expert.evictions", Kind.COUNTER, "{expert}", (_PHASE, _LAYER), "Experts evicted from a layer's pool."
)
DEGRADED = Metric(
    "moe.expert.degraded",
    Kind.COUNTER,
    "{expert}",
    (_PHASE, Label("mode", DEGRADED_MODES)),
    "Experts served otherwise than by their weights.",
)
POOL_CAPACITY = Metric("moe.pool.capacity", Kind.GAUGE, "{expert}", (_LAYER,), "Slots of a layer's pool.")
POOL_RESIDENT = Metric("moe.pool.resident", Kind.GAUGE, "{expert}", (_LAYER,), "Experts resident in a layer's pool.")
SIMULATED_LOOKUPS = Metric(
    "moe.pool.simulated.lookups",
    Kind.COUNTER,
    "{expert}",
    (_PHASE,),
    "Routed experts that simulated pools looked up, of the layers that are followed (one of four unless told "
    "otherwise).",
)
SIMULATED_HITS = Metric(
    "moe.pool.simulated.hits",
    Kind.COUNTER,
    "{expert}",
    (_PHASE, Label("slots", tuple(map(str, POOL_SIZES)))),
    "Those that a pool of so many slots a layer would have hit: reading on demand, evicting the least recently used, "
    "each pass looked up before it is touched.",
)
FORWARD_DURATION = Metric(
    "moe.forward.duration", Kind.HISTOGRAM, "s", (_PHASE, _SEQ), "Duration of a forward pass.", FORWARD_BOUNDS
)
FORWARD_ACTIVE = Metric(
    "moe.forward.active",
    Kind.GAUGE,
    "s",
    (_PHASE,),
    "Age of the forward pass in progress, 0 when none is: tells hung from idle.",
)
TOKENS = Metric(
    "moe.tokens",
    Kind.COUNTER,
    "{token}",
    (_PHASE,),
    "Prompt tokens processed (prefill) and tokens emitted (decode: accepted drafts and own, not positions verified).",
)
SPECULATION_TOKENS = Metric(
    "moe.speculation.tokens",
    Kind.COUNTER,
    "{token}",
    (Label("outcome", ("accepted", "rejected")),),
    "Draft tokens by the outcome of their verification.",
)
LOAD_PEAK = Metric(
    "moe.expert.load.peak",
    Kind.GAUGE,
    "{expert}",
    (_LAYER,),
    "Busiest expert's share of its layer's routed tokens times the expert count (1: even), over some 256 calls; known "
    "where routing comes as arrays (routed_array, mlx_lm).",
)
TTFT = Metric(
    "gen_ai.server.time_to_first_token",
    Kind.HISTOGRAM,
    "s",
    _GEN_AI,
    "Time from a request's arrival to its first token.",
    TTFT_BOUNDS,
)
TPOT = Metric(
    "gen_ai.server.time_per_output_token",
    Kind.HISTOGRAM,
    "s",
    _GEN_AI,
    "Time per output token behind the first.",
    TPOT_BOUNDS,
)
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration", Kind.HISTOGRAM, "s", _GEN_AI, "Duration of a request.", REQUEST_BOUNDS
)
MLX_MEMORY = Metric(
    "mlx.memory",
    Kind.GAUGE,
    "By",
    (Label("kind", ("active", "cache")),),
    "MLX's own allocations: arrays in use, and freed buffers it keeps. Not the process' resident memory.",
)
MLX_MEMORY_PEAK = Metric("mlx.memory.peak", Kind.GAUGE, "By", (), "Most memory that MLX arrays used at one time.")
MLX_MEMORY_LIMIT = Metric("mlx.memory.limit", Kind.GAUGE, "By", (), "MLX's memory limit.")
PROCESS_MEMORY = Metric("process.memory.usage", Kind.GAUGE, "By", (), "Resident memory of the process.")
PROCESS_CPU = Metric("process.cpu.time", Kind.COUNTER, "s", (), "CPU time of the process, user and system.")
RUN_INFO = Metric(
    "moe.run.info",
    Kind.GAUGE,
    "{run}",
    (Label("model"), Label("run"), Label("runtime"), Label("version")),
    "Always 1; names the run that this process is on. A restart is another run.",
)
RUN_START_TIME = Metric("moe.run.start.time", Kind.GAUGE, "s", (), "Unix time at which the run started.")
LOST = Metric(
    "moe.telemetry.dropped",
    Kind.COUNTER,
    "{record}",
    (Label("reason", LOST_REASONS),),
    "Records that telemetry refused, by reason.",
)
LAYER_FOLDED = Metric(
    "moe.telemetry.overflow",
    Kind.COUNTER,
    "{record}",
    (),
    'Records folded into layer="other" because the layer budget was spent.',
)
HOOK_ERRORS = Metric(
    "moe.telemetry.hook.errors",
    Kind.COUNTER,
    "{error}",
    (Label("hook", HOOKS),),
    "Exceptions caught inside a hook.",
)
COLLECT_DURATION = Metric(
    "moe.telemetry.collect.duration", Kind.GAUGE, "s", (), "Time the last collection took to read the cells."
)
SERIES = Metric("moe.telemetry.series", Kind.GAUGE, "{series}", (), "Series that the last collection produced.")

CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOG}


def counters() -> Iterator[Metric]:
    """The catalog's counters, in order."""
    return (metric for metric in CATALOG if metric.kind is Kind.COUNTER)
