"""What both phases have, one function a panel. The phase is a part of every query and of every title."""

from __future__ import annotations

from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import Panel

from moe_telemetry import catalog as c

from . import causes
from .config import Config
from .expressions import SCOPE, at, ever, ever_ready, flow, level, per, share
from .kit import GREEN, OUTCOME_COLOURS, USUAL, About, Bad, Query, timeseries
from .promql import Q50, Q99, QMAX, ratio
from .rules import usual

BURSTS = "prefill"
"""This phase comes in bursts: lines between them would draw what never was."""


def name(phase: str, title: str) -> str:
    """A title that says its phase."""
    return f"{phase.capitalize()}: {title}"


def _usual(config: Config, figure: str, phase: str) -> Query:
    """What the run's own drop alert compares with."""
    # The usual value of something that was never recorded is 0.
    return Query(f'{usual(config, figure)}{{{",".join(SCOPE)},phase="{phase}"}} > 0', f"{USUAL} {{{{instance}}}}")


def _low(phase: str, value: float) -> list[Bad]:
    """Alerts judge decode only, so only decode has their lines."""
    return [Bad(value, below=True)] if phase == "decode" else []


def active_speed_query(phase: str) -> str:
    """Tokens per second of forward time."""
    speed = per(flow(c.TOKENS, phase=phase), c.FORWARD_DURATION, whole_part="sum", phase=phase)
    return ever(speed, c.TOKENS, phase=phase)


def hit_rate_query(phase: str) -> str:
    """Share of routed experts that were resident."""
    return share(c.LOOKUPS, phase=phase, outcome="hit", whole={"phase": phase})


def recall_query(phase: str) -> str:
    """Share of routed experts that were predicted."""
    return share(c.PREDICTOR_EXPERTS, phase=phase, outcome="recalled", whole={"phase": phase})


def active_speed(config: Config, phase: str) -> Panel:
    """Speed of the model, whatever the pauses between requests."""
    about = About(
        name(phase, "tok/s while active"),
        "Tokens per second of time spent in forward passes: pauses between requests do not lower it. Below the grey "
        "usual line the run has become slower: look at hit rate and stall beside it; if both are as ever, the machine "
        "is busy with something else.",
        "suffix: tok/s",
        causes.NO_SPEED,
        1,
    )
    bads = _low(phase, config.thresholds.decode_slow)
    speed = Query(active_speed_query(phase), "active {{instance}}")
    return timeseries(about, speed, _usual(config, "tokens_per_second", phase), points=phase == BURSTS, bads=bads)


def wall_speed(config: Config, phase: str) -> Panel:
    """Throughput as a client sees it."""
    about = About(
        name(phase, "tok/s by the wall"),
        "Tokens per second of wall time; 0 when nobody asks. Low here and normal while active: the host waits for "
        "requests, or the other phase has the machine.",
        "suffix: tok/s",
        causes.NO_TOKENS,
        1,
    )
    query = ever(flow(c.TOKENS, phase=phase), c.TOKENS, phase=phase)
    return timeseries(about, Query(query, "wall {{instance}}"), points=phase == BURSTS)


def hit_rate(config: Config, phase: str) -> Panel:
    """Was a routed expert resident?"""
    about = About(
        name(phase, "hit rate"),
        "Share of routed experts that were resident when their layer needed them. Low: see lookups by outcome. Red "
        "(never predicted) is the predictor's, yellow (late) the disk's, orange (evicted) the pool's.",
        "percentunit",
        causes.NO_LOOKUPS,
    )
    queries = Query(hit_rate_query(phase), "hit rate {{instance}}"), _usual(config, "hit_rate", phase)
    bads = _low(phase, config.thresholds.hit_rate_low)
    return timeseries(about, *queries, points=phase == BURSTS, bads=bads, top=1)


def pool_curve(config: Config, phase: str) -> Panel:
    """How large should the pool be?"""
    about = About(
        name(phase, "hit rate by pool size, simulated"),
        "What pools of other sizes would have hit on the same routing, reading on demand and evicting the least "
        "recently used, beside the actual hit rate. Actual above the line of the pool's own size: what the prefetch "
        "earns. The first size behind which the lines lie close together is enough. Of one layer of four unless "
        "started with pool_curve=all.",
        "percentunit",
        causes.NO_CURVE,
    )
    simulated = share(c.SIMULATED_HITS, "slots", of=c.SIMULATED_LOOKUPS, phase=phase, whole={"phase": phase})
    queries = Query(simulated, "{{slots}} slots {{instance}}"), Query(hit_rate_query(phase), "actual {{instance}}")
    return timeseries(about, *queries, points=phase == BURSTS, top=1)


def recall(config: Config, phase: str) -> Panel:
    """Was a routed expert predicted?"""
    about = About(
        name(phase, "predictor recall"),
        "Share of routed experts that the predictor had named. A fall below the grey usual line fires "
        "MoePredictorRecallDrop: did the prompt's language or task change, or the model? A predictor that was trained "
        "on other text needs new calibration.",
        "percentunit",
        causes.NO_RECALL,
    )
    queries = Query(recall_query(phase), "recall {{instance}}"), _usual(config, "recall", phase)
    bads = _low(phase, config.thresholds.recall_low)
    return timeseries(about, *queries, points=phase == BURSTS, bads=bads, top=1)


def outcome_share(config: Config, phase: str) -> Panel:
    """The diagnosis: which kind of miss grows."""
    about = About(
        name(phase, "lookups by outcome, share"),
        "Routed experts by outcome; they sum to 100 %. Growing red: the predictor does not name them. Growing yellow: "
        "named, but read too late (disk, or too small a window). Growing orange: read and gone again before use (pool "
        "too small); without `ready` from the runtime these count as late. Several instances are averaged in the area; "
        "the tooltip has each one's share.",
        "percentunit",
        causes.NO_LOOKUPS,
    )
    query = Query(share(c.LOOKUPS, "outcome", phase=phase, whole={"phase": phase}), "{{outcome}} {{instance}}")
    stack = StackingMode.PERCENT
    return timeseries(about, query, stack=stack, colours=OUTCOME_COLOURS, points=phase == BURSTS)


def outcome_rate(config: Config, phase: str) -> Panel:
    """The same outcomes as counts."""
    about = About(
        name(phase, "lookups by outcome, rate"),
        "Routed experts per second by outcome. Misses that grow with the hits are only more traffic; misses that grow "
        "while hits fall are a fault: the share beside it says which.",
        "suffix: experts/s",
        causes.NO_LOOKUPS,
    )
    query = Query(ever(flow(c.LOOKUPS, "outcome", phase=phase), c.LOOKUPS), "{{outcome}} {{instance}}")
    stack = StackingMode.NORMAL
    return timeseries(about, query, stack=stack, colours=OUTCOME_COLOURS, points=phase == BURSTS)


def all_hit(config: Config, phase: str) -> Panel:
    """How often a layer did not wait at all."""
    residency = {"phase": phase, "residency": "!unknown"}
    about = About(
        name(phase, "layer calls with every expert resident"),
        "Share of layer calls that found all their experts, calls of the all-resident fast path included. A layer "
        "waits for its last expert, so this falls much faster than the hit rate: 0.95 with 10 experts is 0.60 here.",
        "percentunit",
        causes.NO_LOOKUPS,
    )
    query = share(c.LAYER_CALLS, phase=phase, residency="all_hit|bypassed", whole=residency)
    return timeseries(about, Query(query, "all hit {{instance}}"), points=phase == BURSTS, top=1)


def hits_by_cause(config: Config, phase: str) -> Panel:
    """What the prefetch earns."""
    hits, whole = flow(c.LOOKUPS, phase=phase, outcome="hit"), flow(c.LOOKUPS, phase=phase)
    placed = flow(c.PREFETCH_HITS, phase=phase)
    about = About(
        name(phase, "hits by reuse and by prefetch"),
        "Share of lookups that hit because the expert was still there, and because a prefetch had placed it. Little "
        "prefetch above much reuse: the pool does the work, and the predictor's host time may be saved. Several "
        "instances add up.",
        "percentunit",
        causes.NO_READY,
    )
    # A scrape may fall between the two counters of one event.
    reuse = f"clamp_min({ratio(f'({hits} - {placed})', whole)}, 0)"
    queries = [
        Query(ever_ready(query), f"{cause} {{{{instance}}}}")
        for cause, query in (("reuse", reuse), ("prefetch", ratio(placed, whole)))
    ]
    colours = {"reuse": GREEN, "prefetch": "blue"}
    return timeseries(about, *queries, stack=StackingMode.NORMAL, colours=colours, points=phase == BURSTS)


def stall_per_token(config: Config, phase: str) -> Panel:
    """Waiting, per token."""
    about = About(
        name(phase, "stall per token"),
        "Time a token's forward pass was blocked on experts. Compare with 1 / (tok/s while active): the part of a "
        "token that a faster disk, a better predictor or a larger pool could win.",
        "s",
        causes.NO_STALL,
    )
    query = per(flow(c.STALL_DURATION, part="sum", phase=phase), c.TOKENS, phase=phase)
    return timeseries(about, Query(ever(query, c.STALL_DURATION), "stall {{instance}}"), points=phase == BURSTS)


def stall_share(config: Config, phase: str) -> Panel:
    """Waiting, as a share of forward time."""
    about = About(
        name(phase, "stall share of forward time"),
        "Forward time that was spent blocked on experts. Above the line decode waits more than it computes "
        "(MoeDecodeStalled): look at read latency, then at the misses that are late.",
        "percentunit",
        causes.NO_STALL,
    )
    stalls = flow(c.STALL_DURATION, part="sum", phase=phase)
    query = ever(per(stalls, c.FORWARD_DURATION, whole_part="sum", phase=phase), c.STALL_DURATION)
    bads = [Bad(config.thresholds.decode_stalled)] if phase == "decode" else []
    return timeseries(about, Query(query, "stall share {{instance}}"), points=phase == BURSTS, bads=bads)


def forward(config: Config, phase: str) -> Panel:
    """How long a pass takes."""
    about = About(
        name(phase, "forward pass p50 and p99 by seq"),
        "Duration of a forward pass by tokens per sequence. A p99 far above p50 is stalls or long reads; both rising "
        "together is the machine, or the growing context.",
        "s",
        causes.NO_FORWARD,
    )
    queries = [
        Query(at(q, c.FORWARD_DURATION, "seq", phase=phase), f"{label} seq {{{{seq}}}} {{{{instance}}}}")
        for q, label in ((Q50, "p50"), (Q99, "p99"))
    ]
    return timeseries(about, *queries, points=phase == BURSTS)


def union(config: Config, phase: str) -> Panel:
    """Does a pass' union of experts fit the pool?"""
    about = About(
        name(phase, "experts per layer call by seq"),
        "Distinct experts that one layer call routes, by tokens per sequence, with the smallest pool as a dashed line. "
        "Above the line a call cannot have its experts resident at once: enlarge the pool, or use shorter chunks and "
        "drafts. Exact to 64 experts.",
        "suffix: experts",
        causes.IDLE,
    )
    queries = [
        Query(f"ceil({at(q, c.UNION, 'seq', phase=phase)})", f"{label} seq {{{{seq}}}} {{{{instance}}}}")
        for q, label in ((Q50, "p50"), (Q99, "p99"), (QMAX, "max"))
    ]
    pool = Query(level(c.POOL_CAPACITY, of="min"), "smallest pool {{instance}}")
    return timeseries(about, *queries, pool, points=phase == BURSTS)
