"""Alerts: what fires, how long it must last, and what it says.

Prometheus keeps the value of an alert's last breach while `keep_firing_for` holds it, so descriptions say "was".
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_telemetry import catalog as c

from .config import Config, duration
from .promql import TARGET, increase, matchers, rate, select, sum_by
from .recording import Names, Rule, scope

MINUTE = 60.0
DECODE = "decode"
ALWAYS = "always"
"""Value of a target's label `expect` where its absence is an outage."""


@dataclass(frozen=True)
class Alert:
    """One alert; `wait` and `keep` are seconds, before scaling."""

    name: str
    expr: str
    severity: str
    summary: str
    description: str
    dashboard: str
    wait: float
    keep: float = 0

    @property
    def anchor(self) -> str:
        """Of its entry in the runbook."""
        return self.name.lower()

    def rule(self, config: Config) -> Rule:
        """As Prometheus reads it."""
        found: Rule = {"alert": self.name, "expr": self.expr, "for": duration(self.wait / config.time_scale)}
        if self.keep:
            found["keep_firing_for"] = duration(self.keep / config.time_scale)
        found["labels"] = {"severity": self.severity}
        found["annotations"] = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{config.runbook_url}#{self.anchor}",
            "dashboard": f"/d/{self.dashboard}?var-instance={{{{ $labels.instance }}}}",
        }
        return found


OVERVIEW, PREFETCH, LAYERS, HOST = "moe-overview", "moe-prefetch", "moe-layers", "moe-host"
_ON = "{{ $labels.instance }}"
_SHARE = "{{ $value | humanizePercentage }}"
_NUMBER = "{{ $value | humanize }}"


def alerts(config: Config) -> list[Alert]:
    """All alerts."""
    return [
        _target_down(config),
        *_recall(config),
        *_hit_rate(config),
        _late(config),
        _thrash(config),
        _union(config),
        _slow(config),
        _stalled(config),
        _hung(config),
        _reads(config),
        _memory(config),
        _detached(config),
        _records(config),
        _overflow(config),
    ]


def _decode(series: str) -> str:
    return f"{series}{{{matchers(c.TOKENS, phase=DECODE)[0]}}}"


def _drop(config: Config, figure: str, limit: float) -> str:
    names = Names(config)
    usual = f"({_decode(names.usual(figure))} > {config.thresholds.baseline_floor:g})"
    return f"1 - {_decode(names.recorded(figure))}\n  / {usual}\n> {limit:g}"


def _queried(series: str, shown: str) -> str:
    """A template of another series of the same run and phase: `shown` formats it."""
    labels = "job=%q,instance=%q,run=%q,phase=%q"
    given = "$labels.job $labels.instance $labels.run $labels.phase"
    return f'{{{{ with printf "{series}{{{labels}}}" {given} | query }}}}{shown}{{{{ end }}}}'


def _against_usual(config: Config, figure: str) -> str:
    percent = "{{ . | first | value | humanizePercentage }}"
    names = Names(config)
    now = _queried(names.recorded(figure), f": {percent}")
    return now + _queried(names.usual(figure), f" against {percent}")


def _target_down(config: Config) -> Alert:
    return Alert(
        "MoeTargetDown",
        f'up{{{scope(config)},expect="{ALWAYS}"}} == 0',
        "critical",
        f"{_ON} does not answer scrapes",
        f"Prometheus could not scrape {_ON}, which is expected to be there always.",
        HOST,
        wait=MINUTE,
    )


def _recall(config: Config) -> list[Alert]:
    limits = config.thresholds
    recall = _decode(Names(config).recorded("recall"))
    return [
        Alert(
            "MoePredictorRecallLow",
            f"{recall} < {limits.recall_low:g}",
            "warning",
            f"Predictor recall is low on {_ON}",
            f"Decode recall on {_ON} was {_SHARE} (floor {limits.recall_low:.0%}), model {{{{ $labels.model }}}}.",
            PREFETCH,
            wait=10 * MINUTE,
            keep=5 * MINUTE,
        ),
        Alert(
            "MoePredictorRecallDrop",
            _drop(config, "recall", limits.recall_drop),
            "critical",
            f"Predictor recall dropped on {_ON}",
            f"Decode recall on {_ON} was {_SHARE} below this run's usual value{_against_usual(config, 'recall')}.",
            PREFETCH,
            wait=5 * MINUTE,
            keep=5 * MINUTE,
        ),
    ]


def _hit_rate(config: Config) -> list[Alert]:
    limits = config.thresholds
    hit_rate = _decode(Names(config).recorded("hit_rate"))
    return [
        Alert(
            "MoeDecodeHitRateLow",
            f"{hit_rate} < {limits.hit_rate_low:g}",
            "warning",
            f"Decode hit rate is low on {_ON}",
            f"Decode hit rate on {_ON} was {_SHARE} (floor {limits.hit_rate_low:.0%}).",
            OVERVIEW,
            wait=10 * MINUTE,
            keep=5 * MINUTE,
        ),
        Alert(
            "MoeDecodeHitRateDrop",
            _drop(config, "hit_rate", limits.hit_rate_drop),
            "critical",
            f"Decode hit rate dropped on {_ON}",
            f"Decode hit rate on {_ON} was {_SHARE} below this run's usual value{_against_usual(config, 'hit_rate')}.",
            OVERVIEW,
            wait=10 * MINUTE,  # longer than recall's: a new prompt refills the pool
            keep=5 * MINUTE,
        ),
    ]


def _late(config: Config) -> Alert:
    limit = config.thresholds.prefetch_late
    return Alert(
        "MoePrefetchLate",
        f"{_decode(Names(config).timing)} > {limit:g}",
        "warning",
        f"Prefetched experts arrive too late on {_ON}",
        f"{_SHARE} of decode lookups on {_ON} were for experts that were predicted and not there yet"
        f" (limit {limit:.0%}).",
        PREFETCH,
        wait=5 * MINUTE,
        keep=5 * MINUTE,
    )


def _thrash(config: Config) -> Alert:
    """Not the eviction rate: a full pool evicts as often as it inserts."""
    limit = config.thresholds.eviction_thrash
    return Alert(
        "MoeEvictionThrash",
        f"{_decode(Names(config).evicted)} > {limit:g}",
        "warning",
        f"Experts are evicted before use on {_ON}",
        f"{_SHARE} of decode lookups on {_ON} were for experts that had been read and were gone again"
        f" (limit {limit:.0%}).",
        PREFETCH,
        wait=10 * MINUTE,
        keep=5 * MINUTE,
    )


def _union(config: Config) -> Alert:
    window = duration(config.windows.short)
    raised = increase(c.LAYER_OVERFLOWS, window, scope(config), phase=DECODE)
    return Alert(
        "MoeUnionExceedsPool",
        f"{sum_by((*TARGET, 'phase'), raised)} > 0",
        "warning",
        f"Decode passes need more experts than a layer's pool holds on {_ON}",
        f'{{{{ printf "%.0f" $value }}}} layer calls on {_ON} needed more experts than their layer has slots'
        f" within {window}.",
        LAYERS,
        wait=MINUTE,
        keep=15 * MINUTE,
    )


def _slow(config: Config) -> Alert:
    limits, names = config.thresholds, Names(config)
    speed, usual = _decode(names.recorded("tokens_per_second")), _decode(names.usual("tokens_per_second"))
    return Alert(
        "MoeDecodeSlow",
        f"{speed} < {limits.decode_slow:g}\nor\n{speed} < {limits.decode_slow_ratio:g} * {usual}",
        "warning",
        f"Decode is slow on {_ON}",
        f"Decode on {_ON} ran at {_NUMBER} tok/s of forward time: below {limits.decode_slow:g} tok/s or"
        f" {limits.decode_slow_ratio:.0%} of this run's usual speed.",
        OVERVIEW,
        wait=10 * MINUTE,
        keep=5 * MINUTE,
    )


def _stalled(config: Config) -> Alert:
    limit = config.thresholds.decode_stalled
    return Alert(
        "MoeDecodeStalled",
        f"{_decode(Names(config).stall)} > {limit:g}",
        "critical",
        f"Decode waits for experts on {_ON}",
        f"{_SHARE} of decode time on {_ON} was spent blocked on experts (limit {limit:.0%}).",
        OVERVIEW,
        wait=5 * MINUTE,
        keep=5 * MINUTE,
    )


def _hung(config: Config) -> Alert:
    limits = {DECODE: config.thresholds.forward_hung, "prefill": config.thresholds.forward_hung_prefill}
    age = "max by (job, instance, phase) ({}) > {:g}"
    return Alert(
        "MoeForwardHung",
        "\nor\n".join(
            age.format(select(c.FORWARD_ACTIVE, scope(config), phase=phase), limit) for phase, limit in limits.items()
        ),
        "critical",
        f"A forward pass does not end on {_ON}",
        f"A {{{{ $labels.phase }}}} pass on {_ON} had been running for {{{{ $value | humanizeDuration }}}}.",
        OVERVIEW,
        wait=MINUTE,
    )


def _reads(config: Config) -> Alert:
    limit = config.thresholds.read_latency
    if limit not in c.READ_DURATION.bounds:
        bounds = ", ".join(f"{bound:g}" for bound in c.READ_DURATION.bounds)
        raise ValueError(f"read_latency {limit:g} is not on a bucket's bound, where comparisons are exact: {bounds}")
    return Alert(
        "MoeReadLatencyHigh",
        f"{Names(config).read_p99} > {limit:g}",
        "warning",
        f"Expert reads are slow on {_ON}",
        f"p99 of {{{{ $labels.source }}}} reads in {{{{ $labels.phase }}}} on {_ON} was"
        f" {{{{ $value | humanizeDuration }}}} (limit {limit * 1000:.0f}ms).",
        HOST,
        wait=10 * MINUTE,
        keep=5 * MINUTE,
    )


def _memory(config: Config) -> Alert:
    """Not the cache: it fills by design."""
    limit = config.thresholds.mlx_memory
    active = sum_by(TARGET, select(c.MLX_MEMORY, scope(config), kind="active"))
    available = f"({select(c.MLX_MEMORY_LIMIT, scope(config))} > 0)"
    return Alert(
        "MoeMlxMemoryHigh",
        f"{active}\n  / on (job, instance) {available}\n> {limit:g}",
        "warning",
        f"MLX memory is nearly full on {_ON}",
        f"MLX arrays on {_ON} held {_SHARE} of MLX's memory limit (alert above {limit:.0%}).",
        HOST,
        wait=5 * MINUTE,
        keep=5 * MINUTE,
    )


def _detached(config: Config) -> Alert:
    """A runtime without a pool and without layer calls has nothing to detach."""
    window = duration(config.windows.short)

    def flow(metric: c.Metric, **labels: str) -> str:
        return sum_by(TARGET, rate(metric, window, scope(config), phase=DECODE, **labels))

    tokens = f"{flow(c.TOKENS)} > {config.thresholds.detached_tokens:g}"
    pool = select(c.POOL_CAPACITY, scope(config))
    return Alert(
        "MoeHooksDetached",
        f"(\n  {tokens}\n  and on (job, instance) {flow(c.LAYER_CALLS)} == 0\n)\nor\n(\n  {tokens}\n"
        f"  and on (job, instance) {pool} > 0\n"
        f"  unless on (job, instance) {flow(c.LOOKUPS)} > 0\n"
        f"  unless on (job, instance) {flow(c.LAYER_CALLS, residency='bypassed')} > 0\n)",
        "warning",
        f"Tokens flow but no experts are recorded on {_ON}",
        f"{_ON} decoded {_NUMBER} tok/s and recorded no layer calls, or no lookups of its pool: a hook is not on the"
        " path taken.",
        HOST,
        wait=5 * MINUTE,
    )


def _records(config: Config) -> Alert:
    """The wait is longer than the window: one burst is silent, drops that recur are not."""
    window = duration(config.windows.short)
    lost = sum_by((*TARGET, "reason"), rate(c.LOST, window, scope(config)))
    errors = sum_by((*TARGET, "hook"), rate(c.HOOK_ERRORS, window, scope(config)))
    return Alert(
        "MoeRecordsDropped",
        f"{lost} > 0\nor\n{errors} > 0",
        "warning",
        f"Telemetry drops records on {_ON}",
        f"{_NUMBER} records a second were lost on {_ON} ({{{{ $labels.reason }}}}{{{{ $labels.hook }}}}).",
        HOST,
        wait=10 * MINUTE,
        keep=5 * MINUTE,
    )


def _overflow(config: Config) -> Alert:
    folded = sum_by(TARGET, rate(c.LAYER_FOLDED, duration(config.windows.short), scope(config)))
    return Alert(
        "MoeSeriesOverflow",
        f"{folded} > 0",
        "warning",
        f"The layer budget is used up on {_ON}",
        f'{_NUMBER} records a second on {_ON} went to layer="other": figures by layer are incomplete.',
        HOST,
        wait=2 * MINUTE,
        keep=15 * MINUTE,
    )
