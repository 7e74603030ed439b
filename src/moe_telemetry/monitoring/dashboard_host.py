"""Host and exporter: memory, reads, requests, and what telemetry itself costs."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import Panel

from moe_telemetry import catalog as c

from . import causes
from .config import Config
from .expressions import RANGE, SCOPE, WINDOW, flow, level, mean, share
from .kit import About, Bad, Query, heat_map, number, timeseries
from .layout import Band, Section, chosen, dashboard
from .promql import Q50, Q99, quantile, rate, ratio, sum_by

UID = "moe-host"
OPERATION = "gen_ai_operation_name"


def mlx_memory() -> Panel:
    """What MLX holds."""
    about = About(
        "MLX memory by kind",
        "MLX's arrays in use and the freed buffers that it keeps, with the most in use so far. Active that rises "
        "without end: a context that grows, or arrays that something holds. Cache fills by design and is given back. "
        "Several instances add up.",
        "bytes",
        causes.NO_MLX,
    )
    queries = (
        Query(level(c.MLX_MEMORY, "kind", kind="active|cache"), "{{kind}} {{instance}}"),
        Query(level(c.MLX_MEMORY_PEAK), "peak {{instance}}"),
    )
    return timeseries(about, *queries, stack=StackingMode.NORMAL)


def mlx_share(config: Config) -> Panel:
    """How near the limit is."""
    about = About(
        "MLX memory in use, of its limit",
        "Arrays in use against MLX's memory limit. Above the line (MoeMlxMemoryHigh): reduce slots per layer or the "
        "context's length.",
        "percentunit",
        causes.NO_MLX,
    )
    query = ratio(level(c.MLX_MEMORY, kind="active"), level(c.MLX_MEMORY_LIMIT))
    return timeseries(about, Query(query, "of limit {{instance}}"), bads=[Bad(config.thresholds.mlx_memory)])


def process_memory() -> Panel:
    """Resident memory."""
    about = About(
        "Process memory",
        "Resident memory of the process. It rises without end while MLX memory does not: a leak outside MLX.",
        "bytes",
        causes.NO_PROCESS,
    )
    return timeseries(about, Query(level(c.PROCESS_MEMORY), "resident {{instance}}"))


def process_cpu() -> Panel:
    """CPU seconds per second."""
    about = About(
        "Process CPU, cores",
        "CPU seconds per second: 1 is one core. One core full and tok/s low: the host thread is the limit, see host "
        "time by stage on the Prefetch dashboard.",
        "suffix: cores",
        causes.NO_PROCESS,
    )
    return timeseries(about, Query(flow(c.PROCESS_CPU), "cores {{instance}}"))


def read_latency() -> Panel:
    """Reads over time by how long they took."""
    about = About(
        "Read latency, $source reads in $phase",
        "How many reads took how long. A second band above the first: some reads go to another place (a cold file, a "
        "second disk) or wait behind others. Instances are added, as reads may be.",
        "s",
        causes.NO_READS,
    )
    labels = {"phase": "$phase", "source": "$source"}
    # Not by instance: in this format two series of one bucket would be taken for two buckets.
    query = sum_by(("le",), rate(c.READ_DURATION, WINDOW, *SCOPE, part="bucket", **labels))
    return heat_map(about, Query(query, "{{le}}"))


def acceptance() -> Panel:
    """Do drafts pay?"""
    about = About(
        "Speculation: drafts accepted",
        "Share of draft tokens that verification accepted. Low: a verify pass routes more experts than a single token "
        "and wins little; shorten the draft or turn it off.",
        "percentunit",
        causes.NO_DRAFTS,
    )
    query = Query(share(c.SPECULATION_TOKENS, outcome="accepted"), "accepted {{instance}}")
    return timeseries(about, query, top=1)


_REQUEST = {
    c.TTFT: ("Time to first token", "Long: the prompt is long, or prefill streams experts that do not fit the pool."),
    c.TPOT: ("Time per output token", "Long: see decode's tok/s and stall on the Overview."),
    c.REQUEST_DURATION: ("Request duration", "Long: see which part is, the first token or those behind it."),
}


def over_the_range(metric: c.Metric) -> Panel:
    """Quantiles of the requests of the whole range; a request is too rare for a rate."""
    title, text = _REQUEST[metric]
    about = About(
        f"{title}: p50 and p99 of the range",
        f"Of all requests that ended in the time range. {text}",
        "s",
        causes.NO_REQUESTS,
    )
    keys = ("instance", OPERATION)
    rated = rate(metric, RANGE, *SCOPE, part="bucket")
    queries = [
        Query(quantile(q, keys, rated), f"{label} {{{{{OPERATION}}}}} {{{{instance}}}}")
        for q, label in ((Q50, "p50"), (Q99, "p99"))
    ]
    return number(about, *queries, plain=True)


def over_time(metric: c.Metric) -> Panel:
    """Their mean as points, where requests ended."""
    title, text = _REQUEST[metric]
    about = About(
        f"{title}: mean",
        f"Mean of the requests that ended within the window; no point where none did. {text}",
        "s",
        causes.NO_REQUESTS,
    )
    return timeseries(about, Query(mean(metric, OPERATION), f"{{{{{OPERATION}}}}} {{{{instance}}}}"), points=True)


def lost() -> Panel:
    """Records that telemetry refused."""
    about = About(
        "Records dropped by reason",
        "Records per second that a hook refused. Not 0: figures are incomplete, and the process' log has a line that "
        "says which hook was given what (MoeRecordsDropped).",
        "suffix: records/s",
        causes.NO_SCRAPE,
    )
    return timeseries(about, Query(flow(c.LOST, "reason"), "{{reason}} {{instance}}"), bads=[Bad(1e-9)])


def faults() -> Panel:
    """Errors inside hooks, and layers over the budget."""
    about = About(
        "Hook errors, and records over the layer budget",
        'Exceptions caught inside a hook, and records folded into layer="other" (MoeSeriesOverflow). Not 0: report the '
        "error with its log line; for the budget, name the MoE layers in start(num_layers=…).",
        "suffix: per second",
        causes.NO_SCRAPE,
    )
    errors, folded = Query(flow(c.HOOK_ERRORS, "hook"), "{{hook}} {{instance}}"), flow(c.LAYER_FOLDED)
    return timeseries(about, errors, Query(folded, "folded {{instance}}"), bads=[Bad(1e-9)])


def collecting() -> Panel:
    """What a scrape costs."""
    about = About(
        "Collect and scrape duration",
        "Time to read the cells, and time of the whole scrape. A scrape near its interval: scrape less often, or start "
        "with layers=off.",
        "s",
        causes.NO_SCRAPE,
    )
    scraped = f"max by (instance) (scrape_duration_seconds{{{','.join(SCOPE)}}})"
    queries = Query(level(c.COLLECT_DURATION), "collect {{instance}}"), Query(scraped, "scrape {{instance}}")
    return timeseries(about, *queries)


def series() -> Panel:
    """How much is exported."""
    about = About(
        "Series and samples per scrape",
        "Series of the last collection, and samples that Prometheus took. It grows with each first-seen pair of phase "
        "and seq and then stops; if it goes on, a label is not bounded.",
        "short",
        causes.NO_SCRAPE,
    )
    samples = f"max by (instance) (scrape_samples_scraped{{{','.join(SCOPE)}}})"
    return timeseries(about, Query(level(c.SERIES), "series {{instance}}"), Query(samples, "samples {{instance}}"))


def host(config: Config) -> dict[str, Any]:
    """The dashboard."""
    variables = [
        chosen("phase", "Phase of reads", c.PHASES, "decode"),
        chosen("source", "Source of reads", c.READ_DURATION.label("source").values, "prefetch"),
    ]
    memory = (
        Band(8, ((mlx_memory(), 12), (mlx_share(config), 12))),
        Band(7, ((process_memory(), 12), (process_cpu(), 12))),
    )
    requests = (
        Band(4, tuple((over_the_range(metric), 8) for metric in _REQUEST)),
        Band(7, tuple((over_time(metric), 8) for metric in _REQUEST)),
    )
    telemetry = Band(7, ((lost(), 12), (faults(), 12))), Band(7, ((collecting(), 12), (series(), 12)))
    return dashboard(
        config,
        UID,
        "Host and exporter",
        "Memory, reads, requests, and what telemetry itself costs and loses.",
        [
            Section("Memory and CPU", memory),
            Section("Reads and drafts", (Band(9, ((read_latency(), 14), (acceptance(), 10))),)),
            Section("Requests", requests),
            Section("Telemetry", telemetry),
        ],
        variables,
    )
