"""Prefetch: what predicting, reading and placing cost, and what they bring."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import Panel

from moe_telemetry import catalog as c

from . import causes, panels
from .config import Config
from .expressions import at, ever, ever_ready, flow, mean, per, share
from .kit import OUTCOME_COLOURS, About, Bad, Query, timeseries
from .layout import Band, Section, dashboard
from .panels import BURSTS, name
from .promql import Q50, Q99

UID = "moe-prefetch"


def host_time(phase: str) -> Panel:
    """Host seconds per second."""
    about = About(
        name(phase, "host time by stage, share of wall time"),
        "Host seconds per second spent predicting, submitting reads and promoting what was read: time in which this "
        "thread dispatches nothing else. A stage above a tenth is worth moving off the thread or making cheaper; the "
        "mean beside it says per layer. Several instances add up.",
        "percentunit",
        causes.NO_PREFETCH,
    )
    times = ever(flow(c.PREFETCH_DURATION, "stage", part="sum", phase=phase), c.PREFETCH_DURATION)
    query = Query(times, "{{stage}} {{instance}}")
    return timeseries(about, query, stack=StackingMode.NORMAL, points=phase == BURSTS)


def stage_mean(phase: str) -> Panel:
    """Mean host time of a stage."""
    about = About(
        name(phase, "mean per stage"),
        "Mean host time of a stage for one layer. Predict rising: a larger candidate set, or the device is waited for. "
        "Promote rising: more experts per promote, see its steps.",
        "s",
        causes.NO_PREFETCH,
    )
    query = Query(mean(c.PREFETCH_DURATION, "stage", phase=phase), "{{stage}} {{instance}}")
    return timeseries(about, query, points=phase == BURSTS)


def stage_p99(phase: str) -> Panel:
    """Slow cases of a stage."""
    about = About(
        name(phase, "p99 per stage"),
        "The slow hundredth of each stage, to within a factor of two (buckets double). Far above the mean: a lock, the "
        "interpreter's garbage collector, or a full queue.",
        "s",
        causes.NO_PREFETCH,
    )
    query = Query(at(Q99, c.PREFETCH_DURATION, "stage", phase=phase), "{{stage}} {{instance}}")
    return timeseries(about, query, points=phase == BURSTS)


def promote_steps(phase: str) -> Panel:
    """Inside promote."""
    about = About(
        name(phase, "promote by step, per promote"),
        "Mean host time of promote's steps: take (collect what was read), route (find slots), place (write into the "
        "pool). Place grows with the experts placed; take that grows means waiting for the reader.",
        "s",
        causes.NO_PROMOTE,
    )
    promotes = {"phase": phase, "stage": "promote"}
    steps = flow(c.PROMOTE_DURATION, "step", part="sum", phase=phase)
    query = per(steps, c.PREFETCH_DURATION, "step", whole_part="count", **promotes)
    steps_of_promote = Query(ever(query, c.PROMOTE_DURATION), "{{step}} {{instance}}")
    return timeseries(about, steps_of_promote, stack=StackingMode.NORMAL, points=phase == BURSTS)


def window_and_reads(config: Config, phase: str) -> Panel:
    """Can a read hide in its window?"""
    about = About(
        name(phase, "window against read latency"),
        "Time from submit to promote of one layer, and the time a read takes. Reads above the window come late and "
        "show as miss_timing: predict further ahead, read less, or get a faster disk. The red line is "
        "MoeReadLatencyHigh, for p99.",
        "s",
        causes.NO_WINDOW,
    )
    queries = [
        *(
            Query(at(q, c.PREFETCH_WINDOW, phase=phase), f"window {label} {{{{instance}}}}")
            for q, label in (("0.1", "p10"), (Q50, "p50"))
        ),
        *(
            Query(at(q, c.READ_DURATION, "source", phase=phase), f"{{{{source}}}} read {label} {{{{instance}}}}")
            for q, label in ((Q50, "p50"), (Q99, "p99"))
        ),
    ]
    return timeseries(about, *queries, points=phase == BURSTS, bads=[Bad(config.thresholds.read_latency)])


def recall_and_precision(config: Config, phase: str) -> Panel:
    """How good the predictor is."""
    about = About(
        name(phase, "recall and precision"),
        "Recall: routed experts that were predicted. Precision: predicted experts that were routed. Recall low: name "
        "more candidates. Precision low: reads go to waste and late ones wait behind them; name fewer.",
        "percentunit",
        causes.NO_RECALL,
    )
    precise = share(c.PREDICTOR_CANDIDATES, phase=phase, outcome="used", whole={"phase": phase})
    queries = Query(panels.recall_query(phase), "recall {{instance}}"), Query(precise, "precision {{instance}}")
    bads = [Bad(config.thresholds.recall_low)] if phase == "decode" else []
    return timeseries(about, *queries, points=phase == BURSTS, top=1, bads=bads)


def avoidable_misses(config: Config, phase: str) -> Panel:
    """Predicted, and a miss all the same."""
    about = About(
        name(phase, "predicted, and missed all the same"),
        "Share of lookups that were predicted but late (yellow; above its line MoePrefetchLate), or read and evicted "
        "before use (orange; above its line MoeEvictionThrash). Late: disk or window. Evicted: pool too small for what "
        "is prefetched into it; without `ready` from the runtime there is no orange line, and these count as late.",
        "percentunit",
        causes.NO_PREDICTED,
    )
    # One query an outcome, so that each is there at 0 even where the other is not.
    late, evicted = (
        share(c.LOOKUPS, phase=phase, outcome=outcome, whole={"phase": phase})
        for outcome in ("miss_timing", "miss_evicted")
    )
    queries = (
        Query(ever(late, c.PREDICTOR_EXPERTS), "miss_timing {{instance}}"),
        Query(ever_ready(evicted), "miss_evicted {{instance}}"),
    )
    limits = config.thresholds
    bads = [Bad(limits.prefetch_late), Bad(limits.eviction_thrash)] if phase == "decode" else []
    return timeseries(about, *queries, colours=OUTCOME_COLOURS, points=phase == BURSTS, bads=bads)


def bytes_read(phase: str) -> Panel:
    """What the disk delivers."""
    about = About(
        name(phase, "bytes read by source"),
        "Expert weights read from storage, on demand (a layer waits) and ahead. At the disk's limit: fewer candidates, "
        "a larger pool or smaller weights. Several instances add up.",
        "Bps",
        causes.NO_READS,
    )
    query = Query(ever(flow(c.READ_BYTES, "source", phase=phase), c.READ_BYTES), "{{source}} {{instance}}")
    return timeseries(about, query, stack=StackingMode.NORMAL, points=phase == BURSTS)


def wasted(phase: str) -> Panel:
    """Predicted for nothing."""
    about = About(
        name(phase, "wasted candidates per token"),
        "Predicted experts that no layer routed, per token. They cost reads and slots only where they were not "
        "resident: see the bytes wasted.",
        "suffix: experts",
        causes.NO_RECALL,
    )
    query = per(flow(c.PREDICTOR_CANDIDATES, phase=phase, outcome="wasted"), c.TOKENS, phase=phase)
    return timeseries(about, Query(ever(query, c.PREDICTOR_CANDIDATES), "wasted {{instance}}"), points=phase == BURSTS)


def wasted_bytes(phase: str) -> Panel:
    """Read for nothing."""
    about = About(
        name(phase, "bytes read for nothing"),
        "Bytes per second that a prefetch read and nobody used. Compare with bytes read by source: a large part of it "
        "is bandwidth that late reads lacked.",
        "Bps",
        causes.NO_WASTE,
    )
    query = Query(ever(flow(c.PREFETCH_WASTED, phase=phase), c.PREFETCH_WASTED), "wasted {{instance}}")
    return timeseries(about, query, points=phase == BURSTS)


def dropped(phase: str) -> Panel:
    """Predicted, and thrown away."""
    about = About(
        name(phase, "predictions dropped by reason"),
        "Predicted experts that were never placed: budget or queue_full (raise them, or predict less), no_slot (pool "
        "full of protected experts), unused (read, never routed). Without this a budget would look like a slow disk.",
        "suffix: experts/s",
        causes.NO_DROPS,
    )
    query = Query(ever(flow(c.PREFETCH_DROPPED, "reason", phase=phase), c.PREFETCH_DROPPED), "{{reason}} {{instance}}")
    return timeseries(about, query, points=phase == BURSTS)


def evictions(phase: str) -> Panel:
    """Experts that left the pool."""
    about = About(
        name(phase, "evictions"),
        "Experts evicted per second. A full pool evicts one for each that it takes in, so the rate alone is not bad; "
        "bad is evicting what is needed again, which is the orange line of the misses.",
        "suffix: experts/s",
        causes.NO_EVICTIONS,
    )
    query = ever(flow(c.EVICTIONS, phase=phase), c.EVICTIONS)
    return timeseries(about, Query(query, "evicted {{instance}}"), points=phase == BURSTS)


def placed(phase: str) -> Panel:
    """Experts that a prefetch placed."""
    about = About(
        name(phase, "placed experts per token"),
        "Experts that a prefetch wrote into the pool, per token, and the hits that came of it. Many placed and few "
        "hits: precision is low or they are evicted before use.",
        "suffix: experts",
        causes.NO_PLACED,
    )
    put, hits = (
        per(flow(metric, phase=phase), c.TOKENS, phase=phase) for metric in (c.PREFETCH_PLACED, c.PREFETCH_HITS)
    )
    queries = Query(ever(put, c.PREFETCH_PLACED), "placed {{instance}}"), Query(ever_ready(hits), "hits {{instance}}")
    return timeseries(about, *queries, points=phase == BURSTS)


def block(phase: str) -> Panel:
    """Where a token's time in the MoE block goes."""
    about = About(
        name(phase, "MoE block by segment, per token"),
        "Host time of the MoE block's segments per token. Fetch is waiting for experts; matmul that grows is the "
        "device, or lazy work that is evaluated there.",
        "s",
        causes.NO_BLOCK,
    )
    segments = flow(c.BLOCK_DURATION, "segment", part="sum", phase=phase)
    query = Query(ever(per(segments, c.TOKENS, "segment", phase=phase), c.BLOCK_DURATION), "{{segment}} {{instance}}")
    return timeseries(about, query, stack=StackingMode.NORMAL, points=phase == BURSTS)


def block_calls(phase: str) -> Panel:
    """Calls of the block."""
    about = About(
        name(phase, "MoE block calls per token"),
        "Decode of single tokens has one call a MoE layer; verify passes have fewer per token emitted, when drafts are "
        "accepted. More than layers: tokens are verified in vain.",
        "suffix: calls",
        causes.NO_BLOCK_CALL,
    )
    query = per(flow(c.BLOCK_CALLS, phase=phase), c.TOKENS, phase=phase)
    return timeseries(about, Query(ever(query, c.BLOCK_CALLS), "calls {{instance}}"), points=phase == BURSTS)


def degraded(phase: str) -> Panel:
    """Answers without the right weights."""
    about = About(
        name(phase, "experts served otherwise, share"),
        "Routed experts that were substituted, skipped or computed on the CPU. Substituted and skipped change the "
        "output: any lasting share is a question of quality, not of speed.",
        "percentunit",
        causes.NO_DEGRADED,
    )
    query = share(c.DEGRADED, "mode", of=c.LOOKUPS, phase=phase, whole={"phase": phase})
    return timeseries(about, Query(ever(query, c.DEGRADED), "{{mode}} {{instance}}"), points=phase == BURSTS)


def _phase(config: Config, phase: str) -> tuple[Band, ...]:
    rows = (
        (host_time(phase), stage_mean(phase), stage_p99(phase)),
        (promote_steps(phase), window_and_reads(config, phase), recall_and_precision(config, phase)),
        (avoidable_misses(config, phase), bytes_read(phase), wasted_bytes(phase)),
        (wasted(phase), placed(phase), dropped(phase)),
        (evictions(phase), block(phase), block_calls(phase)),
    )
    last = Band(6, ((degraded(phase), 24),))
    return (*(Band(8, tuple((panel, 8) for panel in row)) for row in rows), last)


def prefetch(config: Config) -> dict[str, Any]:
    """The dashboard."""
    return dashboard(
        config,
        UID,
        "Prefetch",
        "What predicting, reading and placing experts cost, and what they bring.",
        [
            Section("Decode", _phase(config, "decode")),
            Section("Prefill", _phase(config, "prefill"), collapsed=True),
        ],
    )
