"""The alerts that judge no figure of decode, and several hosts at once."""

from __future__ import annotations

from collections.abc import Iterator

from monitoring import expected as e
from monitoring.expected import Firing
from monitoring.host import Host, minutes
from monitoring.promtool import Scenario

from moe_telemetry.monitoring.config import Config, Windows


def scenarios() -> Iterator[Scenario]:
    """All of them."""
    yield from _targets()
    yield from _unions()
    yield from _hung()
    yield from _memory()
    yield from _two_limits()
    yield from _detached()
    yield from _records()
    yield from _figures()
    yield from _two()


def _targets() -> Iterator[Scenario]:
    down = e.target_down()
    yield Scenario(
        "a marked target goes in the middle of a drop, and comes back",
        [
            Host(
                [minutes(28), minutes(4, recall=0.5, hit=0.6), minutes(15, alive=False), minutes(5, run="r2")],
                expect="always",
            )
        ],
        {32.5: (), 34: (down,), 46: (down,), 48: ()},
    )
    yield Scenario(
        "a marked target that was never up",
        [Host([minutes(10, alive=False)], expect="always")],
        {0.5: (), 2: (down,), 10: (down,)},
    )


def _unions() -> Iterator[Scenario]:
    yield Scenario(
        "MoeUnionExceedsPool: ten minutes, then it fits again",
        [Host([minutes(8), minutes(10, overflows=0.1), minutes(25)])],
        {9: (), 11: (e.union("").bare,), 18: (e.union("30"),), 37: (e.union("").bare,), 39: ()},
    )
    yield Scenario(
        "MoeUnionExceedsPool: restart",
        [Host([minutes(8), minutes(5, overflows=0.1), minutes(25, run="r2")])],
        {12: (e.union("").bare,), 34: ()},
    )


def _hung() -> Iterator[Scenario]:
    yield Scenario(
        "MoeForwardHung: decode; idle is not hung",
        [Host([minutes(10), minutes(6, decode=0, hung="decode"), minutes(10, decode=0)])],
        {12.5: (), 13.75: (e.hung("").bare,), 15.75: (e.hung("5m 45s"),), 16.5: ()},
    )
    yield Scenario(
        "MoeForwardHung: prefill, which may take minutes, until a restart",
        [Host([minutes(5), minutes(19, decode=0, hung="prefill"), minutes(3, decode=0, run="r2")])],
        {20: (), 22: (e.hung("17m 0s", "prefill"),), 25: ()},
    )


def _memory() -> Iterator[Scenario]:
    yield Scenario(
        "MoeMlxMemoryHigh",
        [Host([minutes(8), minutes(12, active=36e9), minutes(8)])],
        {12: (), 14: (e.memory("75%"),), 20: (e.memory("75%"),), 24: (e.memory("").bare,), 26: ()},
    )
    yield Scenario(
        "MoeMlxMemoryHigh: restart",
        [Host([minutes(8), minutes(7, active=36e9), minutes(8, run="r2")])],
        {14.5: (e.memory("75%"),), 21: ()},
    )


def _two_limits() -> Iterator[Scenario]:
    """The rule of one host does not fail for what another shows."""
    full = "studio:9464"
    firing = e.memory("75%").on(full)
    yield Scenario(
        "MoeMlxMemoryHigh: two limits on another endpoint",
        [
            Host([minutes(20, second_run=True)]),
            Host([minutes(8), minutes(12, active=36e9)], instance=full),
        ],
        {12: (), 14: (firing,), 20: (firing,)},
    )
    yield Scenario(
        "MoeMlxMemoryHigh: two limits on its own endpoint",
        [Host([minutes(8, second_run=True), minutes(12, active=36e9, second_run=True)])],
        {12: (), 14: (e.memory("75%"),), 20: (e.memory("75%"),)},
    )


def _detached() -> Iterator[Scenario]:
    firing = e.detached()
    yield Scenario(
        "MoeHooksDetached: lookups of a declared pool stand still",
        [Host([minutes(10), minutes(15, lookups=False), minutes(5)])],
        {19: (), 21: (firing,), 25: (firing,), 26: ()},
    )
    yield Scenario(
        "MoeHooksDetached: layer calls stand still, without a pool",
        [Host([minutes(10, pool=False), minutes(15, pool=False, calls=False)])],
        {19: (), 21: (firing,), 25: (firing,)},
    )
    yield Scenario(
        "MoeHooksDetached: from the start, and mended by a restart",
        [Host([minutes(12, calls=False, lookups=False), minutes(10, run="r2")])],
        {4: (), 11: (firing,), 13: (), 22: ()},
    )


def _records() -> Iterator[Scenario]:
    dropped = e.records("2", reason="not_a_number")
    failed = e.records("500m", hook="routed")
    yield Scenario(
        "MoeRecordsDropped: one burst is silent, recurring drops are not",
        [Host([minutes(6), minutes(1, dropped=5), minutes(14), minutes(14, dropped=2), minutes(12)])],
        {20: (), 30: (), 34: (dropped,), 44: (dropped.bare,), 46: ()},
    )
    yield Scenario(
        "MoeRecordsDropped: errors in a hook, until a restart",
        [Host([minutes(6), minutes(14, errors=0.5), minutes(12, run="r2")])],
        {15: (), 19: (failed,), 31: ()},
    )
    yield Scenario(
        "MoeSeriesOverflow",
        [Host([minutes(6), minutes(8, folded=3), minutes(23)])],
        {7: (), 9: (e.overflow("").bare,), 13: (e.overflow("3"),), 33: (e.overflow("").bare,), 35: ()},
    )
    yield Scenario(
        "MoeSeriesOverflow: restart",
        [Host([minutes(6), minutes(4, folded=3), minutes(23, run="r2")])],
        {9.5: (e.overflow("").bare,), 32: ()},
    )


def _figures() -> Iterator[Scenario]:
    yield Scenario(
        "MoeDecodeSlow: absolutely, from the start",
        [Host([minutes(20, decode=0.5, speed=0.6, reads=4)])],
        {14: (), 16: (e.slow("600m"),)},
    )
    yield Scenario(
        "MoeDecodeSlow: a tenth of a token a second",
        [Host([minutes(20, decode=0.1, speed=0.2)])],
        {14: (), 16: (e.slow("200m"),), 20: (e.slow("200m"),)},
    )
    yield Scenario(
        "MoeDecodeSlow: eight sequences, then one that is slow by itself",
        [Host([minutes(28, decode=30, speed=40, sequences=8), minutes(16, decode=2, speed=2.5)])],
        {38: (), 43: (e.slow("2.5"),)},
    )
    yield Scenario(
        "MoeDecodeSlow: drafts are no longer accepted",
        [Host([minutes(28, accepted=0.7), minutes(18, decode=3, speed=4)])],
        {38: (), 45: (e.slow(),)},
    )
    every, lost = minutes(8, recall=0.1), minutes(1, recall=0.1, scraped=False)
    yield Scenario(
        "MoePredictorRecallLow: lost scrapes at a scrape a minute",
        [Host([every, lost] * 5)],
        {14: (), 17: (e.recall_low("10%"),), 26.5: (e.recall_low("10%"),), 45: (e.recall_low("10%"),)},
        step=60,
        config=Config(windows=Windows(scrape=60)),
    )
    yield Scenario(
        "MoePredictorRecallDrop: 21 minutes into a run",
        [Host([minutes(21), minutes(14, recall=0.55)])],
        {28: (), 31: (e.recall_drop(),), 35: (e.recall_drop(),)},
    )
    yield Scenario(
        "MoePredictorRecallDrop: the value shown is the last that was bad",
        [Host([minutes(28), minutes(10, recall=0.55), minutes(6)])],
        {38: (e.recall_drop(),), 42: (e.recall_drop("20.31%", "63.75%"),)},
    )
    yield Scenario(
        "MoePredictorRecallDrop: the usual value does not follow the drop",
        [Host([minutes(28), minutes(32, recall=0.55)])],
        {44: (e.recall_drop(),), 60: (e.recall_drop().bare,)},
        values={"run_phase:moe_predictor_recall:ratio_rate5m_median1h": (58, 0.8)},
    )
    yield Scenario(
        "MoeDecodeHitRateLow: a hundred lookups a second with ten hits",
        [Host([minutes(25, decode=0.21, hit=0.1, reads=0.5)])],
        {14: (), 16: (e.hit_low("10%"),), 25: (e.hit_low("10%"),)},
    )
    yield Scenario(
        "a recall that was never good does not drop",
        [Host([minutes(28, recall=0.15), minutes(12, recall=0.05)])],
        {14: (), 27: (e.recall_low("15%"),), 40: (e.recall_low("5%"),)},
    )
    yield Scenario(
        "without the label layer, alerts are the same",
        [
            Host(
                [
                    minutes(28, layer_label=False),
                    minutes(12, layer_label=False, recall=0.55, overflows=0.1),
                    minutes(11, layer_label=False, lookups=False, recall=0.55),
                ]
            )
        ],
        {28: (), 40: (e.recall_drop(), e.union("30")), 51: (e.detached(), e.union("").bare)},
    )
    yield Scenario(
        "MoePredictorRecallDrop: two runs on one endpoint",
        [Host([minutes(28, second_run=True), minutes(12, recall=0.55, second_run=True)])],
        {35: (), 38: (e.recall_drop().bare,), 40: (e.recall_drop().bare,)},
    )


def _two() -> Iterator[Scenario]:
    bad = "studio:9464"
    firing: tuple[Firing, ...] = (e.recall_drop().on(bad), e.stalled().on(bad), e.union("30").on(bad))
    yield Scenario(
        "two hosts: one is healthy, one is bad",
        [
            Host([minutes(45)]),
            Host([minutes(28), minutes(17, recall=0.55, stall=0.7, overflows=0.1)], instance=bad),
        ],
        {28: (), 44: firing},
    )
    yield Scenario(
        "two hosts: a marked one goes, the other is bad",
        [
            Host([minutes(28), minutes(12, stall=0.7)]),
            Host([minutes(30), minutes(10, alive=False)], instance=bad, expect="always"),
        ],
        {29: (), 34: (e.target_down().on(bad),), 39: (e.target_down().on(bad), e.stalled())},
    )
