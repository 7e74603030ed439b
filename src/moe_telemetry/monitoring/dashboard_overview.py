"""Overview: is it healthy, how fast, and why."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import Panel

from moe_telemetry import catalog as c

from . import causes, panels
from .config import Config
from .expressions import RANGE, SCOPE, ever, flow, level
from .kit import GREEN, RED, About, Bad, Query, number, table, timeseries
from .layout import Band, Section, dashboard
from .promql import Q99, quantile, select
from .rules import usual

UID = "moe-overview"


def up() -> Panel:
    """Does Prometheus reach the exporter?"""
    about = About(
        "Up",
        "Whether the last scrape of each target succeeded, targets that never answered included. Down: is the process "
        "there, does it listen on an address that Prometheus can reach (127.0.0.1 by default)?",
        "none",
        causes.NO_TARGET,
    )
    texts = {"1": ("up", GREEN), "0": ("down", RED)}
    return number(about, Query(f"up{{{SCOPE[0]}}}", "{{instance}}"), texts=texts, bads=[Bad(1, below=True)])


def firing() -> Panel:
    """How many alerts fire."""
    about = About(
        "Firing alerts",
        "Alerts that fire now, of all instances of the job. Not 0: the table below names them; each has an entry in "
        "the runbook.",
        "none",
        causes.NO_ALERTS,
        0,
    )
    query = f'count(ALERTS{{alertstate="firing",{SCOPE[0]}}}) or vector(0)'
    return number(about, Query(query, "firing"), bads=[Bad(1)])


def speed_now(config: Config) -> Panel:
    """Speed as one number."""
    about = About(
        "Decode tok/s",
        "Tokens emitted per second of decode time, now. Red below the alert's floor; the Decode row has the run's "
        "usual speed.",
        "suffix: tok/s",
        causes.NO_SPEED,
        1,
    )
    query = Query(panels.active_speed_query("decode"), "{{instance}}")
    return number(about, query, bads=[Bad(config.thresholds.decode_slow, below=True)])


def hit_rate_now(config: Config) -> Panel:
    """Hit rate as one number."""
    about = About(
        "Decode hit rate",
        "Share of decode's routed experts that were resident, now. Red below the alert's floor: the Decode row says "
        "which kind of miss.",
        "percentunit",
        causes.NO_LOOKUPS,
        1,
    )
    query = Query(panels.hit_rate_query("decode"), "{{instance}}")
    return number(about, query, bads=[Bad(config.thresholds.hit_rate_low, below=True)])


def recall_now(config: Config) -> Panel:
    """Recall as one number, with what is usual."""
    about = About(
        "Decode recall, and usual",
        "Share of decode's routed experts that were predicted, now, beside the run's usual value. Far below it: the "
        "recall alert is on its way.",
        "percentunit",
        causes.NO_RECALL,
        1,
    )
    usually = f'{usual(config, "recall")}{{{",".join(SCOPE)},phase="decode"}}'
    queries = Query(panels.recall_query("decode"), "now {{instance}}"), Query(usually, "usual {{instance}}")
    return number(about, *queries, bads=[Bad(config.thresholds.recall_low, below=True)])


def run() -> Panel:
    """What runs."""
    about = About(
        "Model · runtime · run",
        "The runs of the time range. Several for one instance: it was restarted within the range, and counters began "
        "anew (blue marks on the graphs).",
        "none",
        causes.NO_RUN,
    )
    query = f"last_over_time({select(c.RUN_INFO, *SCOPE, model='$model')}[{RANGE}])"
    return number(about, Query(query, "{{model}} · {{runtime}} · {{run}} · {{instance}}"), name=True)


def run_age() -> Panel:
    """How long the run lasts, which says whether a usual value can exist yet."""
    about = About(
        "Run age",
        "Time since the run started. Drop alerts need a usual value, which a young run does not have yet.",
        "s",
        causes.NO_RUN_NOW,
    )
    return number(about, Query(f"time() - {level(c.RUN_START_TIME)}", "{{instance}}"), plain=True)


def in_progress(config: Config) -> Panel:
    """Hung, or only idle?"""
    about = About(
        "Forward pass in progress",
        "Age of the pass that runs now, 0 when none does. An age that only grows is a hung pass (MoeForwardHung): take "
        "a stack dump of the process before you end it.",
        "s",
        causes.NO_FORWARD,
    )
    queries = [Query(level(c.FORWARD_ACTIVE, phase=phase), f"{phase} {{{{instance}}}}") for phase in c.PHASES]
    limits = config.thresholds
    others = {"prefill": Bad(limits.forward_hung_prefill)}
    return number(about, *queries, bads=[Bad(limits.forward_hung)], others=others)


def wall_time() -> Panel:
    """Where wall time goes."""
    about = About(
        "Where wall time goes",
        "Share of wall time in decode passes, in prefill passes and in neither, which is idle. Much idle under load: "
        "time goes outside the model (sampling, tokenizer, network). A pass counts when it ends, so a pass longer than "
        "the window shows late and above 100 %. Several instances add up.",
        "percentunit",
        causes.NO_FORWARD,
    )
    idle = f"clamp_min(1 - {flow(c.FORWARD_DURATION, part='sum')}, 0)"
    times = {phase: flow(c.FORWARD_DURATION, part="sum", phase=phase) for phase in c.PHASES} | {"idle": idle}
    queries = [Query(ever(time, c.FORWARD_DURATION), f"{use} {{{{instance}}}}") for use, time in times.items()]
    colours = {"decode": "blue", "prefill": "purple", "idle": "#d8d9da"}
    return timeseries(about, *queries, stack=StackingMode.NORMAL, colours=colours)


def firing_table() -> Panel:
    """Which alerts fire."""
    about = About(
        "Alerts that fire",
        "Start with the critical ones; the runbook has their likely causes in order.",
        "none",
        causes.NO_ALERTS,
    )
    hidden = ("Time", "Value", "__name__", "alertstate", "job", "model", "run")
    names = {"alertname": "alert", "severity": "severity", "instance": "instance", "phase": "phase"}
    query = Query(f'ALERTS{{alertstate="firing",{SCOPE[0]}}}', "{{alertname}}")
    return table(about, query, hidden, names, "severity")


def run_unions() -> Panel:
    """Unions since the start, equal to the snapshot."""
    about = About(
        "Experts per layer call since the start: p99",
        "The whole run's p99 of distinct experts per layer call, equal to the run's own report to 64 experts. Use it "
        "to size the pool: the Decode row has the smallest pool.",
        "suffix: experts",
        causes.NO_RUN_NOW,
        0,
    )
    rest = quantile(Q99, ("instance", "phase", "seq"), select(c.UNION, *SCOPE, part="bucket"))
    return number(about, Query(f"ceil({rest})", "{{phase}} seq {{seq}} {{instance}}"), plain=True)


def run_union_max() -> Panel:
    """The largest union since the start."""
    about = About(
        "Experts per layer call since the start: max",
        "The largest union of any layer in this run, by tokens per sequence. Above the pool: some calls loaded in "
        "waves; the Layers dashboard has which layers.",
        "suffix: experts",
        causes.NO_RUN_NOW,
        0,
    )
    return number(about, Query(level(c.UNION_MAX, "phase", "seq"), "{{phase}} seq {{seq}} {{instance}}"), plain=True)


def _phase(config: Config, phase: str) -> tuple[Band, ...]:
    """The same questions at the same place for both phases."""
    speed = panels.active_speed(config, phase), panels.wall_speed(config, phase), panels.hit_rate(config, phase)
    waits = panels.stall_per_token(config, phase), panels.stall_share(config, phase), panels.forward(config, phase)
    layers = panels.union(config, phase), panels.all_hit(config, phase)
    counts = panels.hits_by_cause(config, phase), panels.outcome_rate(config, phase)
    return (
        Band(8, tuple(zip(speed, (9, 6, 9), strict=True))),
        Band(8, ((panels.outcome_share(config, phase), 12), (panels.recall(config, phase), 12))),
        Band(8, tuple((panel, 8) for panel in waits)),
        Band(8, ((layers[0], 12), (counts[0], 12))),
        Band(7, ((layers[1], 12), (counts[1], 12))),
        Band(8, ((panels.pool_curve(config, phase), 24),)),
    )


def overview(config: Config) -> dict[str, Any]:
    """The dashboard."""
    now = (up(), 3), (firing(), 3), (speed_now(config), 4), (hit_rate_now(config), 4), (recall_now(config), 4)
    head = (
        Band(4, (*now, (run(), 6))),
        Band(6, ((wall_time(), 10), (firing_table(), 8), (in_progress(config), 3), (run_age(), 3))),
    )
    whole = (Band(4, ((run_unions(), 12), (run_union_max(), 12))),)
    return dashboard(
        config,
        UID,
        "Overview",
        "A streamed Mixture-of-Experts run at a glance: state, then decode, then prefill, never blended.",
        [
            Section("", head),
            Section("Decode", _phase(config, "decode")),
            Section("Whole run", whole),
            Section("Prefill", _phase(config, "prefill"), collapsed=True),
        ],
    )
