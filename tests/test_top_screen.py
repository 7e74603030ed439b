"""The screen of `top`, driven by Textual's pilot over recorded scrapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import scrape
from top_recorded import START, Recorded, at, no_mlx, recorded
from top_screen import drive, press, rows, screen

from moe_telemetry import catalog as c
from moe_telemetry.client import ClientError
from moe_telemetry.figures import Totals, phase_figures
from moe_telemetry.pool_size import pool_size
from moe_telemetry.top.app import TopApp
from moe_telemetry.top.history import BARS, HISTORY_SECONDS
from moe_telemetry.top.layers import LayerRow
from moe_telemetry.top.pools import Sized
from moe_telemetry.top.scrape import Reader, Scrape, parse
from moe_telemetry.top.watched import Watched
from moe_telemetry.top.words import percent

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
EVERY = 20.0
SCRAPES = 30
LAYERS = 94
HOST, OTHER = "gpu1:9464", "gpu2:9464"
BAD = range(12, 18)


class Story:
    """Ten minutes of a run in which pool and predictor fail for a while, a run of 94 layers, and a short other one."""

    def __init__(self) -> None:
        reader = Reader("")
        first, second = Watched(f"http://{HOST}"), Watched(f"http://{OTHER}")
        self.scrapes = []
        self.seen = []
        with recorded(12, slots=12) as run:
            for number in range(SCRAPES):
                self._work(run, number)
                if number == SCRAPES - 2:
                    self.before = run.snapshot()
                self.scrapes.append(at(run.text(), 60.0 + min(EVERY * number, EVERY * (SCRAPES - 2) + 2), reader))
                first.take(self.scrapes[-1])
                self.seen.append(first.copy())
            self.totals = Totals(run.snapshot(), self.before)
        with recorded(4, slots=64, seed=2) as run:
            run.model = "other-moe"
            for number in range(2):
                run.passes("decode", 1, 6)
                second.take(at(run.text(), 600.0 + 2 * number))
        with recorded(LAYERS, slots=12) as run:
            deep = Watched(f"http://{HOST}")
            for number in range(2):
                run.passes("prefill", 4, 2, 0.8)
                run.passes("decode", 3, 3, 0.9)
                deep.take(at(run.text(), 600.0 + 2 * number))
        with recorded(12, slots=16, seed=3, pool_curve="all") as run:
            pooled = Watched(f"http://{HOST}")
            for number in range(2):
                run.passes("prefill", 4, 20, 0.85, skew=5.0)
                run.passes("decode", 1, 100, 0.9, skew=5.0)
                pooled.take(at(run.text(), 600.0 + 2 * number))
            snapshot = run.snapshot()
            pooled.take_size(Sized(pool_size(snapshot, Totals(snapshot)), f"{START:.0f}"), 602.0)
        self.other, self.deep, self.pooled = second, deep, pooled
        self.end = self.scrapes[-1].at

    @staticmethod
    def _work(run: Recorded, number: int) -> None:
        skill, times = 0.55 if number in BAD else 0.9, 6 if number == SCRAPES - 1 else 1
        run.passes("decode", 1, 2 * times, skill)
        run.passes("decode", 3, times, skill)
        if number % 3 == 2:
            run.passes("prefill", 4, 1, skill - 0.1)


@pytest.fixture(scope="module")
def story() -> Story:
    return Story()


def app_of(story: Story, upto: int = SCRAPES, clock: Any = None) -> TopApp:
    """Both endpoints watched, the first one for so many scrapes."""
    return TopApp([story.seen[upto - 1].copy(), story.other.copy()], clock=clock or (lambda: story.end + 0.5))


def deep_app(story: Story) -> TopApp:
    """The run of 94 layers."""
    return TopApp([story.deep.copy()], clock=lambda: 602.5)


# -- pages ----------------------------------------------------------------------------------------------------


def test_overview_shows_the_snapshots_difference(story: Story) -> None:
    """Decode and prefill stand side by side with the figures that the two snapshots differ by."""
    decode, prefill = (phase_figures(story.totals, phase) for phase in ("decode", "prefill"))

    async def script(pilot: Any) -> None:
        shown = screen(pilot.app)
        speed = next(line for line in shown.splitlines() if line.startswith("tok/s"))
        assert [f"{decode.tokens_per_second:.1f}", f"{prefill.tokens_per_second:.1f}"] == re.findall(
            r"tok/s +([\d.]+)", speed
        )
        for name, field in (("hit rate", "hit_rate"), ("recall", "recall"), ("all hit", "all_hit")):
            wanted = [percent(getattr(figures, field)) for figures in (decode, prefill)]
            assert wanted == re.findall(rf"{name} +([\d.]+)%", shown)
        for name, field in (("late", "timing"), ("evicted", "evicted"), ("unpredicted", "unpredicted")):
            assert [percent(getattr(figures, field)) for figures in (decode, prefill)] == re.findall(
                rf"{name} ([\d.]+)%", shown
            )
        assert "(pool 12)" in shown
        assert "recorded-moe on recorded" in shown
        assert "MLX active 1.00 GB cache 1.45 GB peak 2.00 GB limit 3.00 GB process 6.31 GB" in shown

    drive(app_of(story), script)


def test_a_union_above_the_pool_is_marked(story: Story) -> None:
    """By a sign at the maximum and the share of calls, not by a colour alone."""
    calls, above = (story.totals.total(metric, phase="prefill") for metric in (c.LAYER_CALLS, c.LAYER_OVERFLOWS))
    largest = max(story.totals.unions("prefill"))
    assert max(story.totals.unions("decode")) <= 12 < largest

    async def script(pilot: Any) -> None:
        shown = screen(pilot.app)
        assert re.search(rf"seq 4 .* {largest}!", shown)
        assert f"! {percent(above / calls)}% of calls above" in shown
        assert 2 == shown.count("!")

    drive(app_of(story), script)


def test_trends_are_of_ten_minutes_with_gaps(story: Story) -> None:
    """The bad minutes stand lower, on a scale from 0; prefill, which is idle at times, has gaps."""
    app = app_of(story)
    columns = app.watched[0].history.columns("decode", "hit", story.end, 60)
    told = {number: columns[2 * number + 3] for number in range(1, SCRAPES - 1)}
    assert None not in told.values()
    assert max(told[number] for number in BAD) < min(value for number, value in told.items() if number not in BAD)
    prefill = app.watched[0].history.columns("prefill", "hit", story.end, 60)
    assert 10 == sum(value is not None for value in prefill)

    async def script(pilot: Any) -> None:
        lines = [line for line in screen(pilot.app).splitlines() if line.startswith("hit rate")]
        assert set(BARS) & set(lines[0][17:39])

    drive(app, script)


def test_layers_page_shows_each_layer(story: Story) -> None:
    """94 layers with their figures, decode and, behind d, prefill: those that fit, and the others by scrolling."""

    async def script(pilot: Any) -> None:
        for phase, key in (("decode", "2"), ("prefill", "d")):
            shown = await press(pilot, key)
            assert f"{phase.upper()}, 94 layers, by layer" in shown
            wanted = {row.layer: row for row in pilot.app.watched[0].shown[phase].figures.layers}
            seen = re.findall(r"^ +(\d+) +[\d.]+ +([\d.]+) ", shown, re.MULTILINE)
            assert [(layer, percent(wanted[layer].hit)) for layer, _ in seen] == seen
            assert 10 < len(seen)
        last = await press(pilot, "end")
        assert re.search(r"^ +93 ", last, re.MULTILINE)

    drive(deep_app(story), script)


def test_layers_are_sorted_by_keys(story: Story) -> None:
    """s goes through the columns, S back, r turns the order; the head says which it is."""

    async def script(pilot: Any) -> None:
        shown = await press(pilot, "2", "s", "s")
        assert "by hit, worst first" in shown
        assert "hit▲" in shown
        hits = [float(found) for found in re.findall(r"^ +\d+ +[\d.]+ +([\d.]+) ", shown, re.MULTILINE)]
        assert sorted(hits) == hits
        lowest = min(row.hit for row in pilot.app.watched[0].shown["decode"].figures.layers)
        assert percent(lowest) == percent(hits[0] / 100)
        heat_is_a_symbol_too(shown, pilot.app.watched[0].shown["decode"].figures.layers)
        shown = await press(pilot, "r")
        turned = [float(found) for found in re.findall(r"^ +\d+ +[\d.]+ +([\d.]+) ", shown, re.MULTILINE)]
        assert sorted(turned, reverse=True) == turned
        assert "calls/s▲" in await press(pilot, "S")

    drive(deep_app(story), script)


def heat_is_a_symbol_too(shown: str, layers: Sequence[LayerRow]) -> None:
    """Whoever sees no colour sees the misses: more ink where there are more."""
    misses = {row.layer: 1 - row.hit for row in layers}
    cells = re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ ([ ░▒▓█])", shown, re.MULTILINE)
    assert 10 < len(cells)
    for layer, symbol in cells:
        assert " ░▒▓█".index(symbol) == sum(misses[layer] > step for step in (0, 0.05, 0.15, 0.3))


def test_endpoints_stand_side_by_side(story: Story) -> None:
    """Both endpoints with their phases; e selects the other one for all pages."""

    async def script(pilot: Any) -> None:
        shown = await press(pilot, "3")
        assert re.search(rf"^> {HOST} +● live", shown, re.MULTILINE)
        assert re.search(rf"^  {OTHER} +● live", shown, re.MULTILINE)
        shown = await press(pilot, "e")
        assert re.search(rf"^> {OTHER}", shown, re.MULTILINE)
        assert "model other-moe" in shown
        shown = await press(pilot, "1")
        assert shown.startswith(f"{OTHER}  other-moe")
        assert "(pool 64)" in shown

    drive(app_of(story), script)


# -- what happens to endpoints --------------------------------------------------------------------------------


def test_a_vanished_endpoint_keeps_its_figures_and_their_age(story: Story) -> None:
    """What was last seen stays, said to be old, until the endpoint is back."""
    now = [story.end + 2.0]
    app = app_of(story, SCRAPES - 1, clock=lambda: now[0])

    async def script(pilot: Any) -> None:
        before = screen(app)
        app.take(0, ClientError("connection refused"), story.end + 2.0)
        now[0] = story.end + 14.0
        app.show()
        await pilot.pause()
        shown = screen(app)
        assert "✗ gone for 12 s (connection refused); figures are 16 s old" in shown
        figures = r"^hit rate +[\d.]+%"
        assert re.search(figures, before, re.MULTILINE)[0] == re.search(figures, shown, re.MULTILINE)[0]
        assert "gone 12 s" in await press(pilot, "3")
        app.take(0, story.scrapes[-1], story.end)
        await pilot.pause()
        assert "● live" in await press(pilot, "1")

    drive(app, script)


def test_another_run_is_said_and_counts_from_zero(story: Story) -> None:
    """A restart shows as a new run, with no figure below 0."""
    with recorded(4, seed=5) as run:
        run.passes("decode", 1, 1)
        text = run.text(start=START + story.end + 1)
    back = at(text, story.end + 4.0)

    async def script(pilot: Any) -> None:
        pilot.app.take(0, back, back.at)
        await pilot.pause()
        shown = screen(pilot.app)
        assert "a new run, over 3.0 s" in shown
        assert not re.search(r"-\d", shown)
        assert "runs that followed the first one while watched: 1" in await press(pilot, "3")

    drive(app_of(story, clock=lambda: story.end + 4.0), script)


def test_an_idle_phase_keeps_its_last_figures(story: Story) -> None:
    """Prefill works in bursts: between them its figures stay, with how old they are."""
    app = app_of(story, SCRAPES - 1)

    async def script(pilot: Any) -> None:
        shown = screen(app)
        assert re.search(r"PREFILL +idle; figures of 42 s ago", shown)
        assert 2 == len(re.findall(r"hit rate +[\d.]+%", shown))

    drive(app, script)


def test_never_answered_is_said(story: Story) -> None:
    """An endpoint that never was is asked again, and says why it is empty; no other's figures stand in its place."""
    app = TopApp([Watched(f"http://{HOST}"), story.deep.copy()], clock=lambda: 602.5)

    async def script(pilot: Any) -> None:
        assert "… no answer yet" in screen(app)
        assert "%" in await press(pilot, "e")
        assert "%" not in await press(pilot, "e")
        app.take(0, ClientError("connection refused"), 5.0)
        await pilot.pause()
        assert "✗ unreachable: connection refused; asked again and again" in screen(app)
        for key in ("2", "3"):
            assert "unreachable" in await press(pilot, key)

    drive(app, script)


def test_what_a_runtime_has_not_is_said_in_words(start: Any, recorder: Any) -> None:
    """A runtime without pool, predictor and clock: the reason stands where the figure would, in full."""
    telemetry = start()
    app = TopApp([Watched(telemetry.url)], clock=lambda: 12.0)

    async def script(pilot: Any) -> None:
        for seconds in (10.0, 12.0):
            recorder.forward(1)
            recorder.union(0, 10)
            recorder.tokens(1)
            app.take(0, parse(scrape(telemetry), seconds, START + seconds), seconds)
        await pilot.pause()
        await pilot.pause()
        shown = screen(app)
        for words in (
            *("tok/s     - not timed", "hit rate  - no pool", "recall    - no predictor", "all hit   - not known"),
            *("lookups   - no pool", "union (no pool)", "prefetch  - none yet", "demand   - none yet"),
            *("stall - none yet", "memory - no MLX"),
        ):
            assert words in shown, words
        assert re.search(r"seq 1 +10 +10 +10 +0.50", shown)

    with no_mlx():
        drive(app, script)


def test_figures_that_make_no_sense_are_a_failure(story: Story) -> None:
    """An endpoint whose series are not ours by their labels or values is one that fails; the screen goes on."""
    now, before = story.scrapes[-1], story.scrapes[-2]
    name = c.LAYER_UNION_MAX.prometheus
    odd = [
        {**now.series, name: {frozenset({("layer", "0")}): 1.0}},
        {**now.series, c.TOKENS.prometheus: dict.fromkeys(now.named(c.TOKENS), float("inf"))},
        {**now.series, c.POOL_CAPACITY.prometheus: dict.fromkeys(now.named(c.POOL_CAPACITY), float("nan"))},
    ]
    for series in odd:
        watched = Watched(f"http://{HOST}")
        watched.take(before)
        watched.take(Scrape(series, now.at, now.wall))
        assert re.match("its figures make no sense: [A-Za-z]+Error", watched.failure)
        watched.take(now)
        assert watched.live


def test_names_from_an_endpoint_are_only_shown(story: Story) -> None:
    """A model's name is neither markup nor anything that a terminal obeys."""
    found = story.scrapes[0]
    labels = frozenset({("model", "[bold]x\x1b[31m"), ("run", "r"), ("runtime", "t"), ("version", "1")})
    series = {**found.series, c.RUN_INFO.prometheus: {labels: 1.0}}

    async def script(pilot: Any) -> None:
        pilot.app.take(0, Scrape(series, found.at, found.wall), found.at)
        await pilot.pause()
        assert "[bold]x?[31m on t" in screen(pilot.app)

    drive(TopApp([Watched(f"http://{HOST}")], clock=lambda: found.at), script)


# -- keys -----------------------------------------------------------------------------------------------------


def test_pause_holds_the_screen_and_not_the_scraping(story: Story) -> None:
    """While paused every page shows that moment; afterwards the trends have no gap."""
    now = [story.scrapes[-3].at]
    app = app_of(story, SCRAPES - 2, clock=lambda: now[0])

    async def script(pilot: Any) -> None:
        held = re.search(r"hit rate +[\d.]+%", await press(pilot, "space"))[0]
        for each in story.scrapes[-2:]:
            now[0] = each.at
            app.take(0, each, each.at)
        await pilot.pause()
        shown = screen(app)
        assert "PAUSED for 22 s, space goes on" in shown
        assert held in shown
        assert "12 layers" in await press(pilot, "2")
        shown = await press(pilot, "1", "space")
        assert "PAUSED" not in shown
        assert SCRAPES - 1 == len(app.watched[0].history)
        assert percent(phase_figures(story.totals, "decode").hit_rate) in shown

    drive(app, script)


def test_help_tells_keys_and_symbols_and_q_quits(story: Story) -> None:
    """? shows every key of the screen, any key closes it; q ends the app."""
    app = app_of(story)

    async def script(pilot: Any) -> None:
        shown = await press(pilot, "question_mark")
        for words in (
            "overview",
            "layers",
            "endpoints",
            "4 c pool",
            "pause",
            "quit",
            "turn their order",
            "░▒▓█",
            "Any key",
        ):
            assert words in shown
        assert "turn their order" not in await press(pilot, "x")
        assert app.is_running
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running

    drive(app, script)


def test_a_smaller_terminal_is_told_so(story: Story) -> None:
    """Less than 80 by 24 says what is needed instead of a cut page, and goes on when it is larger again."""
    app = app_of(story)

    async def script(pilot: Any) -> None:
        for size in ((79, 24), (80, 23), (20, 7)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            shown = " ".join(screen(app).split())
            assert "80 columns by 24" in shown
            assert "hit rate" not in shown
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert "hit rate" in screen(app)

    drive(app, script)


def test_nothing_is_cut(story: Story) -> None:
    """At 80 columns every line of a page fits, and a larger terminal shows no less."""
    pages = {
        "1": ("stall", "evict", "promote", "demand"),
        "2": ("evict/s", "all hit"),
        "3": ("draft tokens",),
        "c": ("knee", "safe"),
    }

    async def script(pilot: Any) -> None:
        for size in ((80, 24), (160, 50)):
            await pilot.resize_terminal(*size)
            for page, words in pages.items():
                shown = await press(pilot, page)
                assert size[1] >= len(shown.splitlines())
                assert "…" not in shown
                for word in (*words, "process 6.31 GB", "Quit"):
                    assert word in shown

    drive(app_of(story), script)


# -- pictures -------------------------------------------------------------------------------------------------

KEYS = {"overview": "1", "layers": "2", "endpoints": "3", "pool": "c"}


def test_pictures_show_the_pages(story: Story, request: pytest.FixtureRequest) -> None:
    """The committed picture of each page has the characters that the page has over the same scrapes."""
    app = app_of(story)
    app.watched[1].fail("connection refused", story.end - 41.0)
    made = {}

    async def script(pilot: Any) -> None:
        await pilot.press("s", "s")
        for page, key in KEYS.items():
            await press(pilot, key)
            made[page] = pilot.app.export_screenshot(title="moe-telemetry top")

    drive(deep_app(story), script)
    layers = made["layers"]
    drive(TopApp([story.pooled.copy()], clock=lambda: 602.5), script)
    pool = made["pool"]
    drive(app, script)
    made["layers"], made["pool"] = layers, pool
    for page, picture in made.items():
        path = PICTURES / f"top-{page}.svg"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n", encoding="utf-8")
        assert rows(path.read_text(encoding="utf-8")) == rows(picture), page


def test_history_forgets_what_is_older(story: Story) -> None:
    """The ring holds ten minutes."""
    app = app_of(story)
    history = app.watched[0].history
    assert SCRAPES - 1 == len(history)
    history.add(story.end + HISTORY_SECONDS - EVERY, app.watched[0].frame)
    assert 3 == len(history)
