"""Recording rules: what alerts compare, and what dashboards draw as a run's usual value.

Every recorded series carries the run it belongs to, so that no baseline reaches into another run.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_telemetry import catalog as c

from .config import Config, duration, number
from .promql import Q99, TARGET, matchers, quantile, rate, ratio, select, sum_by

Rule = dict[str, object]

RUN = ("model", "run")
SOURCED = (*TARGET, "phase", "source")


@dataclass(frozen=True)
class Figure:
    """A ratio that has a usual value: the median of its own record."""

    metric: str
    wait: float
    """Seconds that a drop must last; the baseline ends before them."""


FIGURES = {
    "recall": Figure("moe_predictor_recall", 300),
    "hit_rate": Figure("moe_expert_hit", 600),
    "tokens_per_second": Figure("moe_tokens_per_forward_second", 600),
    "tokens_per_second_and_sequence": Figure("moe_tokens_per_forward_second_and_sequence", 600),
}


class Names:
    """The recorded series' names, with the configured windows in them."""

    def __init__(self, config: Config) -> None:
        self._short = duration(config.windows.short)
        self._long = duration(config.windows.long)
        self.settled = f"instance:moe_run_info:settled{self._short}"
        self.tokens = self._rate("run_phase", "moe_tokens")
        self.lookups = self._rate("run_phase", "moe_expert_lookups")
        self.lookups_by_outcome = self._rate("run_phase_outcome", "moe_expert_lookups")
        self.predicted = self._rate("run_phase", "moe_predictor_experts")
        self.predicted_by_outcome = self._rate("run_phase_outcome", "moe_predictor_experts")
        self.busy = self._rate("run_phase", "moe_forward_duration_seconds_sum")
        self.passes = self._rate("run_phase", "moe_forward_duration_seconds_count")
        self.timing = self._ratio("moe_expert_miss_timing")
        self.evicted = self._ratio("moe_expert_miss_evicted")
        self.stall = self._ratio("moe_expert_stall")
        self.read_p99 = f"run_phase_source:moe_expert_read_duration_seconds:p99_rate{self._short}"

    def _rate(self, level: str, metric: str) -> str:
        return f"{level}:{metric}:rate{self._short}"

    def _ratio(self, metric: str) -> str:
        return f"run_phase:{metric}:ratio_rate{self._short}"

    def recorded(self, figure: str) -> str:
        """A figure over the short window; KeyError for an unknown one."""
        return self._ratio(FIGURES[figure].metric)

    def usual(self, figure: str) -> str:
        """Its median over the long window."""
        return f"{self.recorded(figure)}_median{self._long}"


def rules(config: Config) -> list[Rule]:
    """All recording rules, each behind those that it uses."""
    names = Names(config)
    return [
        _record(names.settled, _settled(config)),
        _record(names.tokens, _of_run(config, c.TOKENS, "phase")),
        *_shares(config),
        *_recall(config),
        *_speed(config),
        _record(names.read_p99, _read_p99(config)),
        *(_record(names.usual(figure), _usual(config, figure)) for figure in FIGURES),
    ]


def scope(config: Config) -> str:
    """The matcher that every raw selector has."""
    return f'job="{config.job}"'


def _record(name: str, expression: str) -> Rule:
    return {"record": name, "expr": expression}


def _settled(config: Config) -> str:
    """The run on each target once it has filled the short window: warm-up, restart and short runs need no other case.

    The last known run stands in while scrapes are lost, but not beside a newer one, whose counts are not its own.
    """
    windows = config.windows
    info = select(c.RUN_INFO, scope(config))
    last = f"last_over_time({info}[{duration(windows.tolerance)}]"
    return (
        "topk by (job, instance) (1,\n"
        f"  ({info} or on (job, instance) {last}))\n"
        f"  and {last} offset {duration(windows.short)})\n"
        ")"
    )


def _join(config: Config, expression: str) -> str:
    return f"{expression}\n* on (job, instance) group_left ({', '.join(RUN)}) {Names(config).settled}"


def _of_run(config: Config, metric: c.Metric, *keys: str, part: str = "") -> str:
    rated = rate(metric, duration(config.windows.short), scope(config), part=part)
    return _join(config, sum_by((*TARGET, *keys), rated))


def _under_traffic(config: Config, expression: str) -> str:
    """Absent below the floor, so that neither an alert nor a baseline sees figures that chance made."""
    return f"{expression}\nand {Names(config).tokens} > {number(config.thresholds.traffic)}"


def _share(by_outcome: str, whole: str, metric: c.Metric, outcome: str) -> str:
    part = f"sum without (outcome) ({by_outcome}{{{matchers(metric, outcome=outcome)[0]}}})"
    return ratio(part, whole)


def _shares(config: Config) -> list[Rule]:
    names = Names(config)
    shares = {names.recorded("hit_rate"): "hit", names.timing: "miss_timing", names.evicted: "miss_evicted"}
    return [
        _record(names.lookups_by_outcome, _of_run(config, c.LOOKUPS, "phase", "outcome")),
        _record(names.lookups, f"sum without (outcome) ({names.lookups_by_outcome})"),
        *(
            _record(name, _under_traffic(config, _share(names.lookups_by_outcome, names.lookups, c.LOOKUPS, outcome)))
            for name, outcome in shares.items()
        ),
    ]


def _recall(config: Config) -> list[Rule]:
    names = Names(config)
    recall = _share(names.predicted_by_outcome, names.predicted, c.PREDICTOR_EXPERTS, "recalled")
    return [
        _record(names.predicted_by_outcome, _of_run(config, c.PREDICTOR_EXPERTS, "phase", "outcome")),
        _record(names.predicted, f"sum without (outcome) ({names.predicted_by_outcome})"),
        _record(names.recorded("recall"), _under_traffic(config, recall)),
    ]


def _speed(config: Config) -> list[Rule]:
    """Per second of forward time: an idle host is not slow, and a runtime that counts no tokens has no speed of 0.

    In decode also for each sequence of a batch, of which there are as many as tokens in a pass that were no drafts.
    """
    names = Names(config)
    decode = f"{{{matchers(c.TOKENS, phase='decode')[0]}}}"
    speed = names.recorded("tokens_per_second")
    accepted = rate(c.SPECULATION_TOKENS, duration(config.windows.short), scope(config), outcome="accepted")
    own = f"{names.tokens}{decode} - on (job, instance) group_left () {sum_by(TARGET, accepted)}"
    busy = f"({names.busy} > {number(config.thresholds.busy_floor)})"
    stall = _of_run(config, c.STALL_DURATION, "phase", part="sum")
    return [
        _record(names.busy, _of_run(config, c.FORWARD_DURATION, "phase", part="sum")),
        _record(names.passes, _of_run(config, c.FORWARD_DURATION, "phase", part="count")),
        _record(speed, f"({names.tokens} > 0) / {busy}"),
        _record(
            names.recorded("tokens_per_second_and_sequence"),
            f"{speed}{decode} * {names.passes}{decode}\n/ (({own}) > 0)",
        ),
        _record(names.stall, f"(\n{stall}\n) / {busy}"),
    ]


def _read_p99(config: Config) -> str:
    window = duration(config.windows.short)
    durations = quantile(Q99, SOURCED, rate(c.READ_DURATION, window, scope(config), part="bucket"))
    reads = sum_by(SOURCED, rate(c.READ_DURATION, window, scope(config), part="count"))
    enough = f"{reads} > {number(config.thresholds.reads_floor)}"
    return _join(config, f"(\n{durations}\nand {enough}\n)")


def _usual(config: Config, figure: str) -> str:
    """A median, so that a prompt change moves nothing; it ends where the short window and a drop's wait begin.

    Of the settled run only: an ended one's record reaches into the window for over an hour.
    """
    windows = config.windows
    offset = duration(windows.short + FIGURES[figure].wait / config.time_scale)
    record = f"{Names(config).recorded(figure)}[{duration(windows.long)}] offset {offset}"
    return (
        f"quantile_over_time(0.5, {record})\nand count_over_time({record}) >= {windows.least_samples}\n"
        f"and on ({', '.join((*TARGET, *RUN))}) {Names(config).settled}"
    )
