"""Alerts on a figure of the run: recall, hit rate, kinds of misses, speed, stall, reads."""

from __future__ import annotations

from moe_telemetry import catalog as c

from .alert import DECODE, HOST, MINUTE, NUMBER, ON, OVERVIEW, PREFETCH, SHARE, Alert
from .config import Config, millis, number, percent
from .promql import matchers
from .recording import Names


def _decode(series: str) -> str:
    return f"{series}{{{matchers(c.TOKENS, phase=DECODE)[0]}}}"


def _drop(config: Config, figure: str, limit: float) -> str:
    names = Names(config)
    usual = f"({_decode(names.usual(figure))} > {number(config.thresholds.baseline_floor)})"
    return f"1 - {_decode(names.recorded(figure))}\n  / {usual}\n> {number(limit)}"


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


def recall(config: Config) -> list[Alert]:
    """The predictor names too few of the routed experts: at all, or suddenly."""
    limits = config.thresholds
    series = _decode(Names(config).recorded("recall"))
    return [
        Alert(
            "MoePredictorRecallLow",
            f"{series} < {number(limits.recall_low)}",
            "warning",
            f"Predictor recall is low on {ON}",
            f"Decode recall on {ON} was {SHARE} (floor {percent(limits.recall_low)}), model {{{{ $labels.model }}}}.",
            PREFETCH,
            wait=10 * MINUTE,
            keep=5 * MINUTE,
        ),
        Alert(
            "MoePredictorRecallDrop",
            _drop(config, "recall", limits.recall_drop),
            "critical",
            f"Predictor recall dropped on {ON}",
            f"Decode recall on {ON} was {SHARE} below this run's usual value{_against_usual(config, 'recall')}.",
            PREFETCH,
            wait=5 * MINUTE,
            keep=5 * MINUTE,
        ),
    ]


def hit_rate(config: Config) -> list[Alert]:
    """Too few routed experts are resident: at all, or suddenly."""
    limits = config.thresholds
    series = _decode(Names(config).recorded("hit_rate"))
    return [
        Alert(
            "MoeDecodeHitRateLow",
            f"{series} < {number(limits.hit_rate_low)}",
            "warning",
            f"Decode hit rate is low on {ON}",
            f"Decode hit rate on {ON} was {SHARE} (floor {percent(limits.hit_rate_low)}).",
            OVERVIEW,
            wait=10 * MINUTE,
            keep=5 * MINUTE,
        ),
        Alert(
            "MoeDecodeHitRateDrop",
            _drop(config, "hit_rate", limits.hit_rate_drop),
            "critical",
            f"Decode hit rate dropped on {ON}",
            f"Decode hit rate on {ON} was {SHARE} below this run's usual value{_against_usual(config, 'hit_rate')}.",
            OVERVIEW,
            wait=10 * MINUTE,  # longer than recall's: a new prompt refills the pool
            keep=5 * MINUTE,
        ),
    ]


def late(config: Config) -> Alert:
    """Predicted experts are not there yet."""
    limit = config.thresholds.prefetch_late
    return Alert(
        "MoePrefetchLate",
        f"{_decode(Names(config).timing)} > {number(limit)}",
        "warning",
        f"Prefetched experts arrive too late on {ON}",
        f"{SHARE} of decode lookups on {ON} were for experts that were predicted and not there yet"
        f" (limit {percent(limit)}).",
        PREFETCH,
        wait=5 * MINUTE,
        keep=5 * MINUTE,
    )


def thrash(config: Config) -> Alert:
    """Not the eviction rate: a full pool evicts as often as it inserts."""
    limit = config.thresholds.eviction_thrash
    return Alert(
        "MoeEvictionThrash",
        f"{_decode(Names(config).evicted)} > {number(limit)}",
        "warning",
        f"Experts are evicted before use on {ON}",
        f"{SHARE} of decode lookups on {ON} were for experts that had been read and were gone again"
        f" (limit {percent(limit)}).",
        PREFETCH,
        wait=10 * MINUTE,
        keep=5 * MINUTE,
    )


def slow(config: Config) -> Alert:
    """Per second of forward time, so that an idle host is not slow. More sequences in a batch make each one slower, and
    fewer make the sum smaller: only what is slow both ways is slow."""
    limits, names = config.thresholds, Names(config)
    ratio = number(limits.decode_slow_ratio)

    def below_usual(figure: str) -> str:
        return f"{_decode(names.recorded(figure))} < {ratio} * {_decode(names.usual(figure))}"

    return Alert(
        "MoeDecodeSlow",
        f"{_decode(names.recorded('tokens_per_second'))} < {number(limits.decode_slow)}\nor\n"
        f"(\n  {below_usual('tokens_per_second')}\n  and {below_usual('tokens_per_second_and_sequence')}\n)",
        "warning",
        f"Decode is slow on {ON}",
        f"Decode on {ON} ran at {NUMBER} tok/s of forward time: below {number(limits.decode_slow)} tok/s or"
        f" {percent(limits.decode_slow_ratio)} of this run's usual speed.",
        OVERVIEW,
        wait=10 * MINUTE,
        keep=5 * MINUTE,
    )


def stalled(config: Config) -> Alert:
    """More waiting for experts than computing."""
    limit = config.thresholds.decode_stalled
    return Alert(
        "MoeDecodeStalled",
        f"{_decode(Names(config).stall)} > {number(limit)}",
        "critical",
        f"Decode waits for experts on {ON}",
        f"{SHARE} of decode time on {ON} was spent blocked on experts (limit {percent(limit)}).",
        OVERVIEW,
        wait=5 * MINUTE,
        keep=5 * MINUTE,
    )


def reads(config: Config) -> Alert:
    """One slow read in a hundred, by phase and source."""
    limit = config.thresholds.read_latency
    if limit not in c.READ_DURATION.bounds:
        bounds = ", ".join(map(number, c.READ_DURATION.bounds))
        given = f"read_latency {number(limit)}"
        raise ValueError(f"{given} is not on a bucket's bound, where comparisons are exact: {bounds}")
    return Alert(
        "MoeReadLatencyHigh",
        f"{Names(config).read_p99} > {number(limit)}",
        "warning",
        f"Expert reads are slow on {ON}",
        f"p99 of {{{{ $labels.source }}}} reads in {{{{ $labels.phase }}}} on {ON} was"
        f" {{{{ $value | humanizeDuration }}}} (limit {millis(limit)}).",
        HOST,
        wait=10 * MINUTE,
        keep=5 * MINUTE,
        variables=("instance", "phase", "source"),
    )
