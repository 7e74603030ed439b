"""Faults put into the generated rules, and the scenario that must find each; lint finds none of them.

`python -m monitoring.faults`, from the tests' folder, prints the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of the rules' text: every match of a regular expression is replaced."""

    name: str
    pattern: str
    replacement: str
    scenario: str

    def put_into(self, rules: str) -> str:
        """The rules with the fault; ValueError where the pattern no longer fits."""
        spoiled = re.sub(self.pattern, self.replacement, rules)
        if spoiled == rules:
            raise ValueError(f"{self.name}: nothing matches {self.pattern}")
        return spoiled


def _in_alert(alert: str, pattern: str) -> str:
    """`pattern` inside that alert's rule, with what is before it as group 1."""
    return rf"(- alert: {alert}\n(?:(?!  - alert)[\s\S])*?){pattern}"


_INFO = r'moe_run_info\{job="moe"\}'
_LAST = rf"last_over_time\({_INFO}\[1m\]"
_RECALL = "run_phase:moe_predictor_recall:ratio_rate5m"
_BELOW = "below the traffic floor, all bad"
_PREFILL = "a drop in prefill only"
_FLAPPING = "MoePredictorRecallDrop: flapping"
_HEALTHY = "healthy: prompt change, prefill bursts"

FAULTS = (
    Fault("no traffic floor", r"\n *and run_phase:moe_tokens:rate5m > 0\.2", "", _BELOW),
    Fault("traffic floor of 0", r"(moe_tokens:rate5m) > 0\.2", r"\1 > 0", _BELOW),
    Fault("no floor of forward time", r" > 0\.01\)", " > 0)", _BELOW),
    Fault("no floor of reads", r"(duration_seconds_count.*\)) > 1\b", r"\1 > 0", _BELOW),
    Fault(
        "a run counts at once, not settled",
        rf"\n *and {_LAST} offset 5m\)",
        "",
        "warm-up of 11 minutes at a hit rate of 20 %",
    ),
    Fault(
        "run info without tolerance of lost scrapes",
        rf"\({_INFO} or on \(job, instance\) {_LAST}\)\)",
        'moe_run_info{job="moe"}',
        "MoePredictorRecallDrop: lost scrapes",
    ),
    Fault(
        "a minute of tolerance, whatever the scrape interval",
        r"(moe_run_info\{job=\"moe\"\})\[3m\]",
        r"\1[1m]",
        "MoePredictorRecallLow: lost scrapes at a scrape a minute",
    ),
    Fault(
        "the old run's figure goes on with the new run's counts",
        rf"\({_INFO} or on \(job, instance\) ({_LAST}\))\)",
        r"\1",
        "a cold restart: the old run is no baseline",
    ),
    Fault(
        "two runs on one instance",
        r"topk by \(job, instance\) \(1,",
        "(",
        "MoePredictorRecallDrop: two runs on one endpoint",
    ),
    Fault(
        "baseline over all runs of the instance",
        rf"quantile_over_time\(0\.5, {_RECALL}\[1h\] offset 10m\)\n *and .*\n *and .*",
        "sum without (run) (0.8 * group by (job, instance, phase, model, run) (run_phase:moe_tokens:rate5m))"
        " * on (job, instance) group_left (run) instance:moe_run_info:settled5m",
        "a cold restart: the old run is no baseline",
    ),
    Fault(
        "an ended run keeps its usual value",
        r"\n *and on \(job, instance, model, run\) instance:moe_run_info:settled5m",
        "",
        "a cold restart: the old run is no baseline",
    ),
    Fault(
        "baseline up to now",
        rf"({_RECALL}\[1h\]) offset 10m",
        r"\1",
        "MoePredictorRecallDrop: the usual value does not follow the drop",
    ),
    Fault(
        "baseline is a mean",
        r"quantile_over_time\(0\.5, ",
        "avg_over_time(",
        "MoePredictorRecallDrop: the usual value does not follow the drop",
    ),
    Fault("no minimum of samples", r"\n *and count_over_time\(.*", "", "an easy first prompt is no baseline"),
    Fault(
        "no floor of the baseline",
        r"(median1h\{phase=\"decode\"\}) > 0\.2\)",
        r"\1 > 0)",
        "a recall that was never good does not drop",
    ),
    Fault(
        "drop as a difference, not a share",
        rf'1 - ({_RECALL}\{{phase="decode"\}})\n *\/ (.*)',
        r"\2 - \1",
        "MoePredictorRecallDrop: real drop",
    ),
    Fault("prefill judged as well", r'(:ratio_rate5m)\{phase="decode"\}', r"\1", _PREFILL),
    Fault(
        "phases blended",
        r"sum by \(job, instance, phase, outcome\) \((rate\(moe_expert_lookups.*?\[5m\]\))\)",
        r'label_replace(sum by (job, instance, outcome) (\1), "phase", "decode", "", "")',
        _PREFILL,
    ),
    Fault("unions of prefill", r'(moe_layer_overflows_total\{job="moe"),phase="decode"', r"\1", _PREFILL),
    Fault(
        "overflows since the start",
        r"increase\((moe_layer_overflows_total\{.*?\})\[5m\]\)",
        r"\1",
        "MoeUnionExceedsPool: ten minutes, then it fits again",
    ),
    Fault(
        "late and evicted exchanged",
        r'outcome="miss_timing"',
        'outcome="miss_evicted"',
        "MoePrefetchLate: real drop",
    ),
    Fault(
        "evicted counts unpredicted ones",
        r'outcome="miss_evicted"',
        'outcome="miss_unpredicted"',
        "MoeEvictionThrash: real drop",
    ),
    Fault(
        "hit rate over a shorter window",
        r"(moe_expert_lookups_total\{job=\"moe\"\})\[5m\]",
        r"\1[1m]",
        "MoeDecodeHitRateLow: real drop",
    ),
    Fault(
        "tok/s by the wall",
        r"\(run_phase:moe_tokens:rate5m > 0\) / \(run_phase:\S+ > 0\.01\)",
        "run_phase:moe_tokens:rate5m > 0",
        "bursts: 10 s of decode every 4.5 minutes",
    ),
    Fault(
        "a speed of 0 where tokens are not counted",
        r"\(run_phase:moe_tokens:rate5m > 0\) / ",
        "run_phase:moe_tokens:rate5m / ",
        "passes are timed, tokens are not counted",
    ),
    Fault(
        "a traffic floor for the speed",
        r"\(run_phase:moe_tokens:rate5m > 0\) / ",
        "(run_phase:moe_tokens:rate5m > 0.2) / ",
        "MoeDecodeSlow: a tenth of a token a second",
    ),
    Fault(
        "speed of all sequences of a batch only",
        r"\n *and \S+second_and_sequence.*",
        "",
        "a server at night: one sequence after eight",
    ),
    Fault(
        "speed of each sequence only",
        r"run_phase:moe_tokens_per_forward_second:\S+ < 0\.5 \* .*\n *and ",
        "",
        "a server in the morning: eight after one",
    ),
    Fault(
        "accepted drafts taken for sequences",
        r" - on \(job, instance\) group_left \(\) .*(?=\) > 0)",
        "",
        "MoeDecodeSlow: drafts are no longer accepted",
    ),
    Fault(
        "stall by the wall",
        r"\n *\) \/ \(run_phase:moe_forward_duration_seconds_sum:rate5m > 0\.01\)",
        "\n      )",
        "MoeDecodeStalled: real drop",
    ),
    Fault(
        "no absolute floor of speed",
        r'\S+\{phase="decode"\} < 1\n *or\n *',
        "",
        "MoeDecodeSlow: absolutely, from the start",
    ),
    Fault("slow only absolutely", r"\n *or\n *\(\n(.* < 0\.5 \* .*\n){2} *\)", "", "MoeDecodeSlow: real drop"),
    Fault(
        "prefill passes hung as soon as decode's",
        r"> 900",
        "> 120",
        "MoeForwardHung: prefill, which may take minutes, until a restart",
    ),
    Fault(
        "any pass in progress is hung",
        r'(moe_forward_active_seconds\{job="moe",phase="decode"\}\)) > 120',
        r"\1 >= 0",
        "idle for ever",
    ),
    Fault(
        "one memory limit expected on an endpoint",
        r"/ \(max by \(job, instance\) \((mlx_memory_limit\S+)\) > 0\)",
        r"/ on (job, instance) (\1 > 0)",
        "MoeMlxMemoryHigh: two limits on another endpoint",
    ),
    Fault("memory with the cache", r',kind="active"', "", "the cache is full, as it is meant to be"),
    Fault(
        "detached although bypassed",
        r"\n *unless on \(job, instance\) .*bypassed.*",
        "",
        "all experts resident: layers are bypassed",
    ),
    Fault(
        "detached without a pool",
        r"\n *and on \(job, instance\) moe_pool_capacity.*",
        "",
        "no pool: routing is recorded, residency unknown",
    ),
    Fault(
        "detached by layer calls only",
        r"\n *or\n *\(\n(?:.*\n){2}(?: *unless.*\n)+ *\)",
        "",
        "MoeHooksDetached: lookups of a declared pool stand still",
    ),
    Fault(
        "detached by lookups only",
        r"moe_layer_calls_total\{job=\"moe\",phase=\"decode\"\}\[5m\]\)\) == 0",
        'moe_layer_calls_total{job="moe",phase="decode"}[5m])) < 0',
        "MoeHooksDetached: layer calls stand still, without a pool",
    ),
    Fault(
        "every target is expected always",
        r',expect="always"',
        "",
        "a run shorter than every window ends on an unmarked target",
    ),
    Fault(
        "a lost scrape is an outage",
        _in_alert("MoeTargetDown", "for: 1m"),
        r"\1for: 0s",
        "40 s without scrapes, of a marked target",
    ),
    Fault(
        "one burst of dropped records",
        _in_alert("MoeRecordsDropped", "for: 10m"),
        r"\1for: 1m",
        "MoeRecordsDropped: one burst is silent, recurring drops are not",
    ),
    Fault(
        "hook errors unseen",
        r"\n *or\n *sum by \(job, instance, hook\).*",
        "",
        "MoeRecordsDropped: errors in a hook, until a restart",
    ),
    Fault("nothing is kept firing", r"\n *keep_firing_for: \w+", "", _FLAPPING),
    Fault(
        "recall drop without a wait",
        _in_alert("MoePredictorRecallDrop", "for: 5m"),
        r"\1for: 0s",
        "idle after traffic, of which the last 20 s were bad",
    ),
    Fault(
        "reads of both sources together",
        r"(\(job, instance, phase), source",
        r"\1",
        "MoeReadLatencyHigh: real drop",
    ),
    Fault(
        "a page as a warning",
        _in_alert("MoeDecodeStalled", "severity: critical"),
        r"\1severity: warning",
        "MoeDecodeStalled: real drop",
    ),
    Fault("recall low upside down", r'(recall:ratio_rate5m\{phase="decode"\}) < 0\.5', r"\1 > 0.5", _HEALTHY),
)


def main() -> None:
    """Put each fault in, and print what found it."""
    import tempfile
    from pathlib import Path

    from monitoring.promtool import complaints
    from monitoring.scenarios import SCENARIOS

    print("| fault | found by |\n|---|---|")
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            scenario = SCENARIOS[fault.scenario]
            found = complaints(Path(folder), fault.put_into(scenario.rules), [scenario])
        print(f"| {fault.name} | {fault.scenario if found else 'NOTHING'} |", flush=True)


if __name__ == "__main__":
    main()
