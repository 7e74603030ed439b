"""Figures for people, from snapshots."""

from collections import Counter

import pytest

from moe_telemetry import recorder as rec
from moe_telemetry import snapshot
from moe_telemetry.figures import Totals, acceptance, nearest_rank, phase_figures, smallest_pool
from moe_telemetry.series import read
from moe_telemetry.testing import capture


def _snapshot(captured):
    return snapshot.build(captured.store, read(captured.store))


@pytest.mark.parametrize(
    ("sizes", "q", "expected"),
    [
        ({10: 100}, 0.5, 10),
        ({1: 99, 30: 1}, 0.99, 1),
        ({1: 98, 30: 2}, 0.99, 30),
        ({1: 1, 2: 1, 3: 1}, 0.5, 2),
        ({}, 0.5, None),
    ],
)
def test_quantile_is_nearest_rank(sizes, q, expected):
    """A quantile is the smallest value that at least that share of observations does not exceed."""
    assert expected == nearest_rank(Counter(sizes), q)


def test_phases_are_never_blended():
    """30 % in prefill and 94 % in decode stay 30 % and 94 %."""
    with capture() as captured:
        for phase, hits, lookups in (("prefill", 1843, 6144), ("decode", 92406, 98304)):
            rec.forward(1, phase)
            for begin in range(0, lookups, 64):
                experts = set(range(begin, min(begin + 64, lookups)))
                rec.routed(0, experts, resident={expert for expert in experts if expert < hits})
        totals = Totals(_snapshot(captured))
    assert 0.3000 == pytest.approx(phase_figures(totals, "prefill").hit_rate, abs=1e-4)
    assert 0.9400 == pytest.approx(phase_figures(totals, "decode").hit_rate, abs=1e-4)


def test_figures_of_a_known_run():
    """Each figure of a phase is the ratio that its name says."""
    with capture(num_layers=1) as captured:
        rec.pool(0, capacity=8)
        rec.forward(1)
        rec.routed(0, {1, 2, 3, 4}, resident={1, 2}, predicted={1, 3, 9}, ready={1})
        rec.routed(0, {5, 6, 7, 8}, resident={5, 6, 7, 8}, predicted={5, 6, 7, 8}, ready=set())
        rec.forward_done(0.5)
        rec.stall(0.1)
        rec.tokens(2)
        rec.speculation(4, 1)
        totals = Totals(_snapshot(captured))
    figures = phase_figures(totals, "decode")
    assert (2, 4.0) == (figures.tokens, figures.tokens_per_second)
    assert (6 / 8, 1 / 8, 0.0, 1 / 8) == (figures.hit_rate, figures.timing, figures.evicted, figures.unpredicted)
    assert (5 / 6, 1 / 6) == (figures.reuse, figures.by_prefetch)
    assert (6 / 8, 0.5) == (figures.recall, figures.all_hit)
    assert (4, 4) == (figures.union_p99, figures.union_max)
    assert 0.05 == pytest.approx(figures.stall)
    assert (0.25, 8) == (acceptance(totals), smallest_pool(totals))


def test_a_window_is_the_difference_of_two_snapshots():
    """With an earlier snapshot only what came since counts, unions included."""
    with capture() as captured:
        rec.forward(1)
        rec.routed(0, {1, 2, 3}, resident=set())
        before = _snapshot(captured)
        rec.routed(0, {1, 2}, resident={1, 2})
        figures = phase_figures(Totals(_snapshot(captured), before), "decode")
    assert 1.0 == figures.hit_rate
    assert (2, 2) == (figures.union_p99, figures.union_max)


def test_what_was_not_recorded_has_no_figure():
    """Nothing recorded is None, never a ratio of 0."""
    with capture() as captured:
        figures = phase_figures(Totals(_snapshot(captured)), "decode")
    assert figures.hit_rate is figures.recall is figures.tokens_per_second is figures.union_max is figures.stall is None
