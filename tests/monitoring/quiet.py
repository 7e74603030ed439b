"""What must fire nothing: no alert at any time of these."""

from __future__ import annotations

from collections.abc import Iterator

from monitoring.host import Host, State, minutes
from monitoring.promtool import Scenario

BAD = {"hit": 0.5, "timing": 0.1, "evicted": 0.05, "recall": 0.3, "stall": 0.7, "speed": 4, "slow_reads": 0.05}
"""Bad by every alert on a figure of decode."""
BAD_PREFILL = {
    "prefill_hit": 0.1,
    "prefill_recall": 0.1,
    "prefill_timing": 0.4,
    "prefill_evicted": 0.2,
    "prefill_stall": 0.9,
    "prefill_overflows": 1,
}


def scenarios() -> Iterator[Scenario]:
    """All of them, by the kind of quiet."""
    yield from _healthy()
    yield from _little_traffic()
    yield from _runs()
    yield from _scrapes()
    yield from _runtimes()


def _healthy() -> Iterator[Scenario]:
    prompt = {"recall": 0.7, "hit": 0.84}
    yield Scenario(
        "healthy: prompt change, prefill bursts",
        [
            Host(
                [
                    minutes(25),
                    minutes(1, decode=0, prefill=300),
                    minutes(9),
                    minutes(16, **prompt),
                    minutes(1, decode=0, prefill=300, **prompt),
                    minutes(15),
                ]
            )
        ],
        values={
            "run_phase:moe_expert_hit:ratio_rate5m{phase='decode'}": (20, 0.9),
            "run_phase:moe_predictor_recall:ratio_rate5m{phase='decode'}": (20, 0.8),
            "run_phase:moe_predictor_recall:ratio_rate5m_median1h{phase='decode'}": (25, 0.8),
            "run_phase:moe_tokens_per_forward_second:ratio_rate5m{phase='decode'}": (20, 12),
            "run_phase:moe_expert_stall:ratio_rate5m{phase='decode'}": (20, 0.2),
        },
    )
    yield Scenario("healthy: 1 tok/s", [Host([minutes(40, decode=1, speed=1.2, reads=4)])])
    yield Scenario("healthy: 15 tok/s", [Host([minutes(40, decode=15, speed=18)])])


def _little_traffic() -> Iterator[Scenario]:
    yield Scenario("idle for ever", [Host([minutes(30, decode=0)])])
    yield Scenario(
        "idle after traffic, of which the last 20 s were bad",
        [Host([minutes(30), minutes(1 / 3, **BAD), minutes(20, decode=0)])],
        step=5,
    )
    yield Scenario(
        "bursts: 10 s of decode every 4.5 minutes",
        [Host([minutes(1 / 6), minutes(13 / 3, decode=0)] * 9)],
        step=5,
    )
    yield Scenario(
        "below the traffic floor, all bad",
        [Host([minutes(30, **BAD | {"decode": 0.05, "speed": 6, "reads": 0.2})])],
    )


def _runs() -> Iterator[Scenario]:
    cold = {"hit": 0.2, "recall": 0.3, "timing": 0.06}
    yield Scenario("warm-up: cold pool and predictor for 3 minutes", [Host([minutes(3, **cold), minutes(25)])])
    yield Scenario("warm-up of 11 minutes at a hit rate of 20 %", [Host([minutes(11, hit=0.2), minutes(15)])])
    yield Scenario("an easy first prompt is no baseline", [Host([minutes(7, recall=0.95), minutes(25, recall=0.7)])])
    yield Scenario(
        "a cold restart: the old run is no baseline",
        [Host([minutes(40), minutes(3, **cold, run="r2"), minutes(30, recall=0.62, hit=0.75, run="r2")])],
        values={
            "count(run_phase:moe_predictor_recall:ratio_rate5m{run='r1'}) or vector(0)": (40.5, 0),
            "count({__name__=~'.+_median1h',phase='decode'}) or vector(0)": (39.5, 4),
            "count({__name__=~'.+_median1h',run='r1'}) or vector(0)": (40.5, 0),
            "count({__name__=~'.+_median1h',run=~'r1'}) or vector(0)": (72, 0),
        },
    )
    yield Scenario(
        "a run shorter than every window ends on an unmarked target",
        [Host([minutes(12, decode=15), minutes(15, alive=False)])],
    )
    yield Scenario(
        "a run ends while it is bad, on an unmarked target",
        [Host([minutes(28), minutes(4, **BAD), minutes(20, alive=False)])],
    )
    yield Scenario(
        "restart every 6 minutes, cold each time",
        [Host([segment for n in range(4) for segment in (minutes(3, **cold, run=f"r{n}"), minutes(3, run=f"r{n}"))])],
    )


def _scrapes() -> Iterator[Scenario]:
    yield Scenario(
        "40 s without scrapes, of a marked target",
        [Host([minutes(28), minutes(2 / 3, scraped=False), minutes(15)], expect="always")],
        step=5,
    )
    yield Scenario("a target that was never up", [Host([minutes(20, alive=False)])])
    yield Scenario("no series", [Host([])], least=20)
    yield Scenario(
        "a drop in prefill only",
        [Host([minutes(28, prefill=20), minutes(25, prefill=20, **BAD_PREFILL)])],
    )


def _runtimes() -> Iterator[Scenario]:
    yield Scenario("no pool: routing is recorded, residency unknown", [Host([minutes(20, pool=False)])])
    many = {"decode": 30, "speed": 40, "sequences": 8, "pool": False}
    few = {"decode": 8, "speed": 12, "sequences": 1, "pool": False}
    yield Scenario("a server at night: one sequence after eight", [Host([minutes(28, **many), minutes(25, **few)])])
    yield Scenario("a server in the morning: eight after one", [Host([minutes(28, **few), minutes(25, **many)])])
    yield Scenario("a dense model: tokens and passes only", [Host([minutes(20, moe=False)])])
    yield Scenario(
        "passes are timed, tokens are not counted",
        [Host([minutes(30, counted=False)])],
        values={
            "run_phase:moe_forward_duration_seconds_sum:rate5m{phase='decode'}": (25, 0.833),
            "count(run_phase:moe_tokens_per_forward_second:ratio_rate5m) or vector(0)": (25, 0),
        },
    )
    yield Scenario("all experts resident: layers are bypassed", [Host([minutes(20, lookups=False, bypassed=True)])])
    yield Scenario(
        "the cache is full, as it is meant to be",
        [Host([minutes(15, active=27e9)])],
    )


assert set(BAD) <= set(State.__dataclass_fields__)
