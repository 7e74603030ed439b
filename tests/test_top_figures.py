"""What `top` computes from two scrapes is what the snapshots of the same moments differ by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from top_recorded import START, Recorded, at, recorded

import moe_telemetry as mt
from moe_telemetry import catalog as c
from moe_telemetry.client import ClientError
from moe_telemetry.figures import Totals, nearest_rank, phase_figures
from moe_telemetry.top.frame import Absent, Frame, frame
from moe_telemetry.top.layers import ORDERS, ordered
from moe_telemetry.top.scrape import Scrape, parse
from moe_telemetry.top.window import ABOVE, Window

SECONDS = 4.0


@dataclass
class Pair:
    """Two moments of a run, scraped and as snapshots."""

    before: Scrape
    now: Scrape
    totals: Totals
    earlier: dict[str, Any]
    later: dict[str, Any]

    @property
    def window(self) -> Window:
        return Window(self.now, self.before)

    @property
    def frame(self) -> Frame:
        return frame(self.window)


def pair_of(layers: int) -> Pair:
    with recorded(layers) as run:
        _work(run, 3)
        before, earlier = at(run.text(), 10.0), run.snapshot()
        _work(run, 2)
        now, later = at(run.text(), 10.0 + SECONDS), run.snapshot()
    return Pair(before, now, Totals(later, earlier), earlier, later)


def _work(run: Recorded, count: int) -> None:
    run.passes("prefill", 4, count, skill=0.6)
    run.passes("decode", 1, 3 * count)
    run.passes("decode", 3, count, skill=0.8)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_of(6)


@pytest.fixture(scope="module")
def deep() -> Pair:
    """A run of 94 layers."""
    return pair_of(94)


@pytest.fixture(params=["6 layers", "94 layers"])
def each(request: pytest.FixtureRequest, pair: Pair, deep: Pair) -> Pair:
    return pair if request.param == "6 layers" else deep


@pytest.mark.parametrize("phase", c.PHASES)
def test_figures_are_the_snapshots_difference(phase: str, each: Pair) -> None:
    """Every figure of a phase is that of the two snapshots' difference, to the digit."""
    assert phase_figures(each.totals, phase) == phase_figures(each.window, phase)


@pytest.mark.parametrize("phase", c.PHASES)
def test_shown_figures_are_those(phase: str, each: Pair) -> None:
    """What a frame shows of a phase are these figures and the wall's rates."""
    wanted, found = phase_figures(each.totals, phase), each.frame.phases[phase]
    assert (wanted.tokens_per_second, wanted.hit_rate, wanted.recall, wanted.all_hit, wanted.stall) == (
        found.speed,
        found.hit,
        found.recall,
        found.all_hit,
        found.stall,
    )
    assert (wanted.timing, wanted.evicted, wanted.unpredicted) == (found.late, found.evicted, found.unpredicted)
    assert wanted.tokens / SECONDS == found.by_clock
    assert each.totals.total(c.EVICTIONS, phase=phase) / SECONDS == found.evictions
    assert each.totals.total(c.LAYER_OVERFLOWS, phase=phase) / each.totals.total(c.LAYER_CALLS, phase=phase) == (
        found.overflows
    )


@pytest.mark.parametrize("phase", c.PHASES)
def test_times_are_shares_of_the_wall(phase: str, pair: Pair) -> None:
    """Seconds of each prefetch stage and promote step over the seconds between the scrapes."""
    found = pair.frame.phases[phase]
    for metric, key, shares in (
        (c.PREFETCH_DURATION, "stage", found.prefetch),
        (c.PROMOTE_DURATION, "step", found.promote),
    ):
        wanted = {name: pair.totals.observed(metric, phase=phase, **{key: name})[1] / SECONDS for name in shares}
        assert wanted == pytest.approx(shares)
        assert all(share > 0 for share in wanted.values())


@pytest.mark.parametrize("phase", c.PHASES)
def test_reads_by_source(phase: str, pair: Pair) -> None:
    """Bytes and reads a second, and the mean read, of each source."""
    for row in pair.frame.phases[phase].reads:
        count, seconds = pair.totals.observed(c.READ_DURATION, phase=phase, source=row.source)
        volume = pair.totals.total(c.READ_BYTES, phase=phase, source=row.source)
        assert (volume / SECONDS, count / SECONDS) == (row.bytes, row.count)
        assert seconds / count == pytest.approx(row.mean_seconds)


def union_sizes(pair: Pair, phase: str, seq: str) -> Counter[int]:
    """Exact unions of a sequence length between the snapshots."""
    sizes: Counter[int] = Counter()
    for snapshot, sign in ((pair.later, 1), (pair.earlier, -1)):
        for of_layer in snapshot["unions"][phase][seq]["layers"].values():
            for size, times in of_layer.items():
                sizes[int(size)] += sign * times
    return +sizes


def test_unions_by_length_are_exact(each: Pair) -> None:
    """p50, p99, maximum and rate of each length are those of the exact unions, the most called length first."""
    rows = {phase: each.frame.phases[phase].unions for phase in c.PHASES}
    assert (["1", "3"], ["4"]) == ([row.seq for row in rows["decode"]], [row.seq for row in rows["prefill"]])
    for phase, found in rows.items():
        for row in found:
            sizes = union_sizes(each, phase, row.seq)
            wanted = (nearest_rank(sizes, 0.5), nearest_rank(sizes, 0.99), max(sizes), sizes.total() / SECONDS)
            assert wanted == (row.p50, row.p99, row.largest, row.calls)


def by_layer(pair: Pair, metric: c.Metric, layer: str, **labels: str) -> float:
    return pair.totals.total(metric, layer=layer, **labels)


@pytest.mark.parametrize("phase", c.PHASES)
def test_layers_are_the_snapshots_layers(phase: str, deep: Pair) -> None:
    """Each of 94 layers has its own figures, in the order of the model."""
    rows = deep.frame.phases[phase].layers
    assert [str(layer) for layer in range(94)] == [row.layer for row in rows]
    for row in rows:
        lookups = by_layer(deep, c.LOOKUPS, row.layer, phase=phase)
        calls = by_layer(deep, c.LAYER_CALLS, row.layer, phase=phase)
        assert by_layer(deep, c.LOOKUPS, row.layer, phase=phase, outcome="hit") / lookups == row.hit
        assert by_layer(deep, c.LAYER_EXPERTS, row.layer, phase=phase) / calls == row.union
        assert calls / SECONDS == row.calls
        assert by_layer(deep, c.EVICTIONS, row.layer, phase=phase) / SECONDS == row.evictions
        assert deep.totals.gauge(c.LAYER_UNION_MAX, phase=phase, layer=row.layer) == [row.largest]
        assert 16 == row.pool


def test_layers_are_sorted_by_any_column(deep: Pair) -> None:
    """The worst end first, the other one reversed; a layer without the figure is last both ways."""
    rows = deep.frame.phases["decode"].layers
    hit = next(order for order in ORDERS if order.name == "hit")
    lowest = min(row.hit for row in rows)
    assert lowest == ordered(rows, hit)[0].hit == ordered(rows, hit, reverse=True)[-1].hit
    unions = next(order for order in ORDERS if order.name == "union")
    assert max(row.union for row in rows) == ordered(rows, unions)[0].union
    for order in ORDERS:
        assert sorted(range(94)) == sorted(int(row.layer) for row in ordered(rows, order))
    blind = rows[0].__class__(**{**rows[0].__dict__, "hit": None})
    assert blind == ordered((blind, *rows[1:]), hit)[-1] == ordered((blind, *rows[1:]), hit, reverse=True)[-1]


def test_memory_and_pool(pair: Pair) -> None:
    """Gauges are those of the later scrape."""
    assert {"active": 1e9, "cache": 1.45e9, "peak": 2e9, "limit": 3e9, "process": 6.31e9} == pair.frame.memory
    assert (16, SECONDS, False) == (pair.frame.pool, pair.frame.seconds, pair.frame.restarted)


# -- resets ---------------------------------------------------------------------------------------------------


def test_another_run_counts_from_zero() -> None:
    """A restart's counters count from 0, also where they are above the old ones by then."""
    with recorded(seed=2) as run:
        run.passes("decode", 1, 2)
        old = at(run.text(), 100.0)
    with recorded(seed=3) as run:
        run.passes("decode", 1, 5)
        new, snapshot = at(run.text(start=START + 101.0), 104.0), run.snapshot()
    window = Window(new, old)
    assert phase_figures(Totals(snapshot), "decode") == phase_figures(window, "decode")
    assert (True, 3.0) == (window.restarted, window.seconds), "the run is 3 s old, 4 s lie between the scrapes"


@pytest.mark.parametrize("started", [50.0, 500.0])
def test_a_start_that_cannot_be_is_not_believed(started: float) -> None:
    """Clocks of two hosts differ: rates are then over the time between the scrapes."""
    with recorded() as run:
        run.passes("decode", 1, 2)
        old, new = run.text(), run.text(start=START + started)
    assert 4.0 == Window(at(new, 104.0), at(old, 100.0)).seconds


def test_a_counter_that_fell_counts_from_zero(pair: Pair) -> None:
    """In the same run, too: only that series, and a histogram as a whole."""
    labels = next(key for key, value in pair.now.named(c.TOKENS).items() if ("phase", "decode") in key)
    series = {name: dict(found) for name, found in pair.now.series.items()}
    series[c.TOKENS.prometheus][labels] = 2.0
    for name in ("count", "sum"):
        for found in series[f"{c.STALL_DURATION.prometheus}_{name}"]:
            if ("phase", "decode") in found:
                series[f"{c.STALL_DURATION.prometheus}_{name}"][found] = {"count": 1.0, "sum": 9.0}[name]
    fallen = Window(Scrape(series, pair.now.at, pair.now.wall), pair.before)
    assert (2.0, (1, 9.0)) == (
        fallen.total(c.TOKENS, phase="decode"),
        fallen.observed(c.STALL_DURATION, phase="decode"),
    )
    assert pair.window.total(c.TOKENS, phase="prefill") == fallen.total(c.TOKENS, phase="prefill")


def test_nothing_is_ever_negative(pair: Pair) -> None:
    """Scrapes in the wrong order give no negative figure, whatever else they give."""
    backwards = Window(pair.before, pair.now)
    assert all(value >= 0 for metric in c.counters() for value in backwards.added(metric).values())
    assert all(count > 0 for count in backwards.unions("decode").values())


# -- what is not there ----------------------------------------------------------------------------------------


@pytest.fixture
def bare(start: Any, recorder: mt.Recorder) -> Callable[..., Frame]:
    """A runtime that tells little: scrapes of it by its hooks."""
    telemetry = start(num_layers=2)

    def scraped(*calls: Any) -> Frame:
        from conftest import scrape

        before = parse(scrape(telemetry), 10.0, START)
        for call in calls:
            call(recorder)
        return frame(Window(parse(scrape(telemetry), 12.0, START + 2), before))

    return scraped


def test_a_runtime_without_a_pool_has_no_hit_rate(bare: Any) -> None:
    """Its unions and tokens have figures, and what it has not is said in a word instead of 0."""
    found = bare(
        lambda rec: rec.forward(1),
        lambda rec: rec.union(0, 10),
        lambda rec: rec.tokens(4),
        lambda rec: rec.forward_done(0.5),
    )
    decode = found.phases["decode"]
    assert (8.0, 2.0, 0.25, 10) == (decode.speed, decode.by_clock, decode.busy, decode.unions[0].p99)
    assert (Absent.NO_POOL, Absent.NO_PREDICTOR) == (decode.hit, decode.recall)
    assert Absent.NO_POOL is decode.late is decode.overflows
    assert Absent.UNKNOWN is decode.all_hit
    assert (Absent.NONE_YET, Absent.NONE_YET) == (decode.prefetch["predict"], decode.reads[0].bytes)
    assert (Absent.NO_DRAFTS, None) == (found.accepted, found.pool)
    assert [None, None] == [row.hit for row in decode.layers]


def test_idle_is_said(bare: Any) -> None:
    """A phase without a pass in the interval has no figures, and the other one has."""
    bare(lambda rec: rec.pool(0, capacity=8), lambda rec: rec.forward(9, "prefill"), lambda rec: rec.forward_done(1.0))
    found = bare(lambda rec: rec.forward(1), lambda rec: rec.routed(0, {1, 2}, {1}), lambda rec: rec.forward_done(0.5))
    assert (0.5, Absent.IDLE) == (found.phases["decode"].hit, found.phases["prefill"].hit)
    assert (True, False) == (found.phases["decode"].active, found.phases["prefill"].active)
    assert Absent.IDLE is found.phases["prefill"].speed


def test_uncounted_tokens_and_untimed_passes_are_said(bare: Any) -> None:
    """Passes without tokens are no speed of 0, and tokens without passes none at all."""
    assert Absent.UNTIMED is bare(lambda rec: rec.forward(1), lambda rec: rec.tokens(3)).phases["decode"].speed
    assert Absent.UNCOUNTED is bare(lambda rec: rec.forward_done(0.5)).phases["decode"].speed
    prefill = bare(lambda rec: rec.tokens(3, "prefill")).phases["prefill"]  # though decode is timed
    assert Absent.UNTIMED is prefill.speed is prefill.busy


def test_a_pass_in_progress_is_seen(bare: Any) -> None:
    """Its age tells a long pass from an idle host."""
    bare(lambda rec: rec.forward(1), lambda rec: rec.forward_done(0.1))
    assert 0 < bare(lambda rec: rec.forward(64)).phases["prefill"].running


def test_unions_above_the_exact_buckets(bare: Any) -> None:
    """To 64 a union is exact; above it is the bucket's bound, and above the top bound that is said."""
    found = bare(
        lambda rec: rec.forward(1),
        *(lambda rec, size=size: rec.union(0, size) for size in (64, 65, 70, 600)),
    )
    (row,) = found.phases["decode"].unions
    assert (96, ABOVE, ABOVE) == (row.p50, row.p99, row.largest)


def test_one_scrape_is_the_run_so_far(pair: Pair) -> None:
    """Without an earlier scrape the figures are the run's; without a start that can be, there are no rates."""
    found = frame(Window(pair.before), whole_run=True)
    assert phase_figures(Totals(pair.earlier), "decode") == phase_figures(Window(pair.before), "decode")
    assert (10.0, True) == (found.seconds, found.whole_run)
    ahead = Scrape(pair.before.series, 10.0, START - 5)
    assert Absent.ONE_SCRAPE is frame(Window(ahead)).phases["decode"].by_clock


def test_layers_off_is_seen(start: Any, recorder: mt.Recorder) -> None:
    """start(layers="off") leaves no layers to show."""
    from conftest import scrape

    telemetry = start(layers="off")
    recorder.forward(1)
    recorder.routed(0, {1, 2}, resident={1})
    found = frame(Window(parse(scrape(telemetry), 10.0, START)))
    assert (True, ()) == (found.layers_off, found.phases["decode"].layers)


@pytest.mark.parametrize("text", ["", "hello world\n", "a{ 1\n", "up 1.0\n", "<html></html>\n", "\x00\n"])
def test_another_endpoint_is_refused(text: str) -> None:
    """What is no exposition, or not one of moe_telemetry, has a reason in one line."""
    with pytest.raises(ClientError, match=r"^[^\n]+$"):
        parse(text, 0.0, 0.0)
