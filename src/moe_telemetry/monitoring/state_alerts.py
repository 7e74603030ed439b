"""Alerts on what a host or its telemetry does: down, overflowing, hung, full, detached, dropping."""

from __future__ import annotations

from moe_telemetry import catalog as c

from .alert import DECODE, HOST, LAYERS, MINUTE, NUMBER, ON, OVERVIEW, SHARE, Alert
from .config import Config, duration, number, percent
from .promql import TARGET, increase, rate, select, sum_by
from .recording import scope

ALWAYS = "always"
"""Value of a target's label `expect` where its absence is an outage."""


def target_down(config: Config) -> Alert:
    """Only for targets that are expected always: a finished run is no outage."""
    return Alert(
        "MoeTargetDown",
        f'up{{{scope(config)},expect="{ALWAYS}"}} == 0',
        "critical",
        f"{ON} does not answer scrapes",
        f"Prometheus could not scrape {ON}, which is expected to be there always.",
        HOST,
        wait=MINUTE,
    )


def union(config: Config) -> Alert:
    """Layer calls that cannot fit their pool, in decode: a long prompt never does."""
    window = duration(config.windows.short)
    raised = increase(c.LAYER_OVERFLOWS, window, scope(config), phase=DECODE)
    return Alert(
        "MoeUnionExceedsPool",
        f"{sum_by((*TARGET, 'phase'), raised)} > 0",
        "warning",
        f"Decode passes need more experts than a layer's pool holds on {ON}",
        f'{{{{ printf "%.0f" $value }}}} layer calls on {ON} needed more experts than their layer has slots'
        f" within {window}.",
        LAYERS,
        wait=MINUTE,
        keep=15 * MINUTE,
    )


def hung(config: Config) -> Alert:
    """A pass grows old; when idle its age is 0."""
    limits = {DECODE: config.thresholds.forward_hung, "prefill": config.thresholds.forward_hung_prefill}
    age = "max by (job, instance, phase) ({}) > {}"
    return Alert(
        "MoeForwardHung",
        "\nor\n".join(
            age.format(select(c.FORWARD_ACTIVE, scope(config), phase=phase), number(limit))
            for phase, limit in limits.items()
        ),
        "critical",
        f"A forward pass does not end on {ON}",
        f"A {{{{ $labels.phase }}}} pass on {ON} had been running for {{{{ $value | humanizeDuration }}}}.",
        OVERVIEW,
        wait=MINUTE,
    )


def memory(config: Config) -> Alert:
    """Not the cache: it fills by design. Two runs on an endpoint have a limit each, and it is the same machine's."""
    limit = config.thresholds.mlx_memory
    active = sum_by(TARGET, select(c.MLX_MEMORY, scope(config), kind="active"))
    available = f"(max by ({', '.join(TARGET)}) ({select(c.MLX_MEMORY_LIMIT, scope(config))}) > 0)"
    return Alert(
        "MoeMlxMemoryHigh",
        f"{active}\n  / {available}\n> {number(limit)}",
        "warning",
        f"MLX memory is nearly full on {ON}",
        f"MLX arrays on {ON} held {SHARE} of MLX's memory limit (alert above {percent(limit)}).",
        HOST,
        wait=5 * MINUTE,
        keep=5 * MINUTE,
    )


def detached(config: Config) -> Alert:
    """A runtime without a pool and without layer calls has nothing to detach."""
    window = duration(config.windows.short)

    def flow(metric: c.Metric, **labels: str) -> str:
        return sum_by(TARGET, rate(metric, window, scope(config), phase=DECODE, **labels))

    tokens = f"{flow(c.TOKENS)} > {number(config.thresholds.detached_tokens)}"
    pool = select(c.POOL_CAPACITY, scope(config))
    return Alert(
        "MoeHooksDetached",
        f"(\n  {tokens}\n  and on (job, instance) {flow(c.LAYER_CALLS)} == 0\n)\nor\n(\n  {tokens}\n"
        f"  and on (job, instance) {pool} > 0\n"
        f"  unless on (job, instance) {flow(c.LOOKUPS)} > 0\n"
        f"  unless on (job, instance) {flow(c.LAYER_CALLS, residency='bypassed')} > 0\n)",
        "warning",
        f"Tokens flow but no experts are recorded on {ON}",
        f"{ON} decoded {NUMBER} tok/s and recorded no layer calls, or no lookups of its pool: a hook is not on the"
        " path taken.",
        HOST,
        wait=5 * MINUTE,
    )


def records(config: Config) -> Alert:
    """The wait is longer than the window: one burst is silent, drops that recur are not."""
    window = duration(config.windows.short)
    lost = sum_by((*TARGET, "reason"), rate(c.LOST, window, scope(config)))
    errors = sum_by((*TARGET, "hook"), rate(c.HOOK_ERRORS, window, scope(config)))
    return Alert(
        "MoeRecordsDropped",
        f"{lost} > 0\nor\n{errors} > 0",
        "warning",
        f"Telemetry drops records on {ON}",
        f"{NUMBER} records a second were lost on {ON} ({{{{ $labels.reason }}}}{{{{ $labels.hook }}}}).",
        HOST,
        wait=10 * MINUTE,
        keep=5 * MINUTE,
    )


def overflow(config: Config) -> Alert:
    """More layers were named than the budget has."""
    folded = sum_by(TARGET, rate(c.LAYER_FOLDED, duration(config.windows.short), scope(config)))
    return Alert(
        "MoeSeriesOverflow",
        f"{folded} > 0",
        "warning",
        f"The layer budget is used up on {ON}",
        f'{NUMBER} records a second on {ON} went to layer="other": figures by layer are incomplete.',
        HOST,
        wait=2 * MINUTE,
        keep=15 * MINUTE,
    )
