"""The pool curve in `top`: what the report has of it, or what a scrape can tell, and how it looks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from top_recorded import START, Recorded, at, recorded
from top_screen import drive, press, screen

import moe_telemetry as mt
from moe_telemetry import catalog as c
from moe_telemetry.client import ClientError
from moe_telemetry.top import pool_lines, pools
from moe_telemetry.top.app import TopApp
from moe_telemetry.top.once import text, watch_once
from moe_telemetry.top.panes import PANE_WIDTH
from moe_telemetry.top.pools import SIZE_SECONDS, Sized, scraped
from moe_telemetry.top.scrape import Scrape
from moe_telemetry.top.watched import Watched
from moe_telemetry.top.words import percent, plain

RUN = f"{START:.0f}"
URL = "http://gpu1:9464"
BARS = pool_lines.LRU + pool_lines.EARNED + pool_lines.LOST


def work(run: Recorded, skill: float = 0.9) -> None:
    """Some experts are more wanted than others."""
    for _ in range(8):
        run.passes("decode", 1, 20, skill, skew=3.0)
        run.passes("prefill", 4, 1, skill, skew=3.0)


@dataclass
class Known:
    """A run's scrape, and what the report says of its pool."""

    scrape: Scrape
    size: dict[str, Any]
    snapshot: dict[str, Any]
    text: str

    @property
    def sized(self) -> Sized:
        return Sized(self.size, RUN)


def known(run: Recorded, skill: float = 0.9) -> Known:
    work(run, skill)
    snapshot, text = run.snapshot(), run.text()
    return Known(at(text, 60.0), mt.report(snapshot)["pool_size"], snapshot, text)


@pytest.fixture(scope="module")
def whole() -> Iterator[Known]:
    """All layers are followed."""
    with recorded(8, slots=16, pool_curve="all") as run:
        yield known(run)


@pytest.fixture(scope="module")
def part() -> Iterator[Known]:
    """One layer of four is followed, as usual, and the pool has a size that is not exported."""
    with recorded(8, slots=12) as run:
        yield known(run)


def shown(watched: Watched, now: float = 60.0) -> list[str]:
    """The page's lines."""
    return [plain(line) for line in pool_lines.lines(watched, now)]


def watching(scrape: Scrape, sized: Sized | None = None) -> Watched:
    """An endpoint with that scrape and that snapshot."""
    watched = Watched(URL)
    watched.take(scrape)
    if sized is not None:
        watched.take_size(sized, 60.0)
    return watched


# -- figures --------------------------------------------------------------------------------------------------


def test_a_snapshot_gives_what_the_report_has() -> None:
    """Read from the endpoint itself."""
    with recorded(4, pool_curve="all") as run:
        work(run)
        found = pools.ask(run.telemetry.url.removesuffix("/metrics"))
        assert mt.report(run.snapshot())["pool_size"] == found.found
        assert run.snapshot()["run"]["run"] == found.run


def test_a_scrape_gives_the_same_where_it_can(whole: Known) -> None:
    """Rates at the exported sizes, the gain at one of them, cost and the largest union; not the knee."""
    found = scraped(whole.scrape)
    assert found is not None
    for phase, wanted in whole.size["phases"].items():
        of = found["phases"][phase]
        assert {slots: wanted["hit_rates"][slots] for slots in of["hit_rates"]} == of["hit_rates"]
        assert max(wanted["hit_rates"].values()) == max(of["hit_rates"].values())
        for key in ("lookups", "actual", "simulated", "gain"):
            assert wanted[key] == of[key], key
        assert None is of["knee"]
    for key in ("capacity", "expert_bytes", "safe", "layers"):
        assert whole.size[key] == found[key], key
    assert whole.size["steps"][: len(found["steps"])] == found["steps"]


@pytest.mark.parametrize(("slots", "mode"), [(16, "sample"), (12, "all")])
def test_a_scrape_compares_no_sample_with_all_and_no_other_size(slots: int, mode: str) -> None:
    """Which layers are followed it does not say, and sizes that are not exported neither; the report has a gain."""
    with recorded(8, slots=slots, pool_curve=mode) as run:
        of = known(run)
    found = scraped(of.scrape)
    assert found is not None
    decode = found["phases"]["decode"]
    assert (None, None) == (decode["gain"], decode["simulated"])
    assert None is not of.size["phases"]["decode"]["gain"]


def test_nothing_simulated_is_nothing_to_show() -> None:
    """With the curve switched off there is a reason instead of figures."""
    with recorded(4, pool_curve="off") as run:
        work(run)
        scrape = at(run.text(), 60.0)
        assert None is mt.report(run.snapshot())["pool_size"]
    assert None is scraped(scrape)
    assert list(pool_lines.NONE) == shown(watching(scrape)) == shown(watching(scrape, Sized(None, RUN)))
    assert [] == shown(Watched(URL))


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e308"])
def test_a_scrape_with_any_figure_breaks_no_page(value: str, whole: Known) -> None:
    """Each of those that the curve is made of; bars are as long as there is room."""
    metrics = (c.SIMULATED_HITS, c.SIMULATED_LOOKUPS, c.LOOKUPS, c.POOL_CAPACITY, c.UNION_MAX, c.READ_BYTES)
    for metric in metrics:
        for line in re.findall(rf"^{metric.prometheus}{{.*$", whole.text, re.MULTILINE):
            odd = whole.text.replace(line, f"{line.rpartition(' ')[0]} {value}")
            for shown_ in shown(watching(at(odd, 60.0))):
                assert 2 * PANE_WIDTH > sum(map(shown_.count, BARS))


def test_a_scrape_of_pools_of_two_sizes_has_no_rate_of_their_own(whole: Known) -> None:
    """Which of them would hit as much, no simulation tells."""
    line = f'{c.POOL_CAPACITY.prometheus}{{layer="3"}} '
    assert line in whole.text
    found = scraped(at(whole.text.replace(f"{line}16.0", f"{line}24.0"), 60.0))
    assert found is not None
    assert (16, None) == (found["capacity"], found["phases"]["decode"]["simulated"])


@pytest.mark.parametrize("overall", ["text", ["x"], {"verify": {"lookups": 1, "distances": [1]}}], ids=str)
def test_a_curve_of_no_phase_that_is_known_is_none(
    overall: object, whole: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another version: the page says that there is no curve."""
    found = {**whole.snapshot, "pool_curve": {**whole.snapshot["pool_curve"], "overall": overall}}
    monkeypatch.setattr(pools, "get", lambda *given: json.dumps(found).encode())
    assert list(pool_lines.NONE) == shown(watching(whole.scrape, Sized(pools.ask(URL).found, RUN)))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"run": 3}', b'{"pool_curve": {"overall": {"decode": 1}, "layers": 2}}']
)
def test_a_snapshot_that_makes_no_sense_is_a_failure(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another server answers, there is a reason in one line."""
    monkeypatch.setattr(pools, "get", lambda *given: body)
    with pytest.raises(ClientError, match="its snapshot makes no sense"):
        pools.ask(URL)


# -- the page -------------------------------------------------------------------------------------------------


def test_the_page_has_the_curve_and_what_it_says(whole: Known) -> None:
    """Each size with its rate, the pool's own marked, actual, gain, knee, smallest safe size and costs, both phases."""
    lines = shown(watching(whole.scrape, whole.sized), 75.0)
    text_ = "\n".join(lines)
    decode, prefill = (whole.size["phases"][phase] for phase in ("decode", "prefill"))
    for of, column in ((decode, 0), (prefill, 41)):
        part_ = "\n".join(line[column : column + 39] for line in lines)
        found = re.findall(r"^([> ]) +(\d+) +([\d.]+)%", part_, re.MULTILINE)
        wanted = [(">" if slots == "16" else " ", slots, percent(rate)) for slots, rate in of["hit_rates"].items()]
        assert wanted == found
        assert f"actual   {percent(of['actual'])}% with 16 slots" in part_
        assert f"gain     {100 * of['gain']:+.1f} points ▒ over LRU" in part_
        assert f"knee     {of['knee']} slots" in part_
    assert 2 == text_.count("all 8 layers")
    assert f"safe     {whole.size['safe']} slots at least" in text_
    assert (
        f"16 -> 24 slots: decode {percent(decode['hit_rates']['16'])} -> {percent(decode['hit_rates']['24'])}%" in text_
    )
    assert re.search(r"about [\d.]+ MiB more", text_)
    assert "the run so far, 15 s ago" in text_
    assert 80 >= max(map(len, lines))


def test_bars_bend_as_the_curve_does(whole: Known) -> None:
    """Lengths rise with the rates to an eighth of a column; the pool's own shows what it hits more, or less."""
    assert ["", "▌", "█▌", "████"] == [pool_lines.bar(share, 4) for share in (0.0, 0.125, 0.375, 1.0)]
    lines = shown(watching(whole.scrape, whole.sized))
    lengths = [len(re.findall("[█▏▎▍▌▋▊▉]", line[:38])) for line in lines if re.match("[> ] +[0-9]", line)]
    assert sorted(lengths) == lengths
    own = next(line for line in lines if line.startswith(">"))
    assert "▒" in own[:38]
    with recorded(4, slots=48, pool_curve="all") as run:
        worse = known(run, skill=0.3)
    lines = shown(watching(worse.scrape, worse.sized))
    own = next(line for line in lines if line.startswith(">"))
    assert "░" in own[:38]
    assert any(re.match(r"gain +-[\d.]+ points ░ under LRU", line) for line in lines)


def test_a_sample_says_so_and_how_sure_it_is(part: Known) -> None:
    """Two of eight layers, with the standard error of each rate, and a line for a size that is not exported."""
    lines = shown(watching(part.scrape, part.sized))
    assert "2 of 8 layers" in lines[0]
    error = part.size["phases"]["decode"]["errors"]["16"]
    assert any(re.match(rf"   16 +[\d.]+% ±{percent(error)} ", line) for line in lines)
    (own,) = (line for line in lines if line.startswith(">"))
    assert re.match(rf">  12 +{percent(part.size['phases']['decode']['simulated'])}%", own)
    assert any("! the pool has fewer" in line for line in lines)


def test_what_a_scrape_does_not_tell_is_said(part: Known) -> None:
    """Gain and knee stand in a snapshot only, and why that did not come."""
    watched = watching(part.scrape)
    lines = shown(watched)
    assert any(re.match(r"gain +- only in a snapshot", line) for line in lines)
    assert any(re.match(r"knee +- only in a snapshot", line) for line in lines)
    assert "the run so far, as scraped" == lines[-1]
    watched.size_failure = "answers 404 Not Found"
    assert "the run so far, as scraped; its snapshot: answers 404 Not Found" == shown(watched)[-1]


def test_without_a_pool_and_reads_the_reasons_stand_there() -> None:
    """The curve needs neither."""
    recorder = mt.Recorder()
    with mt.start(port=0, recorder=recorder, pool_curve="all") as telemetry:
        for number in range(40):
            recorder.forward(1)
            recorder.routed(0, {number % 20, (number + 1) % 20})
        found = pools.ask(telemetry.url.removesuffix("/metrics"))
        from conftest import scrape

        watched = Watched(telemetry.url)
        watched.take(at(scrape(telemetry), 1.0))
    watched.take_size(found, 1.0)
    lines = "\n".join(shown(watched))
    assert "actual   - no pool" in lines
    assert "gain     - no pool" in lines
    assert "bytes - reads are not recorded" in lines
    assert "PREFILL  - none yet" in lines


# -- the screen -----------------------------------------------------------------------------------------------


def test_c_and_4_show_the_page_and_only_there_a_snapshot_is_asked_for(whole: Known) -> None:
    """At once and again when it is old; not from another page, not while paused."""
    now = [60.0]
    asked: list[str] = []
    told = threading.Event()

    def ask(url: str) -> Sized:
        asked.append(url)
        told.set()
        return whole.sized

    watched = Watched(URL)
    app = TopApp([watched], clock=lambda: now[0], ask=ask)

    async def until_told(pilot: Any) -> str:
        assert told.wait(10)
        told.clear()
        for _ in range(100):
            await pilot.pause(0.01)
            if watched.sized is not None:
                break
        return await press(pilot)

    async def script(pilot: Any) -> None:
        app.take(0, whole.scrape, 60.0)
        await pilot.pause()
        assert [] == asked
        before = await press(pilot, "c")
        assert "LRU pools" in before
        shown_ = await until_told(pilot)
        assert f"knee     {whole.size['phases']['decode']['knee']} slots" in shown_
        assert 24 >= len(shown_.splitlines())
        assert "Quit" in shown_
        now[0] += SIZE_SECONDS - 1
        app.show()
        assert 1 == len(asked)
        now[0] += 1
        await press(pilot, "space")
        assert 1 == len(asked)
        await press(pilot, "space")
        await until_told(pilot)
        assert [URL, URL] == asked
        assert "LRU pools" not in await press(pilot, "1")
        now[0] += 2 * SIZE_SECONDS
        app.show()
        assert 2 == len(asked)
        assert "LRU pools" in await press(pilot, "4")

    drive(app, script)


def test_another_run_forgets_the_snapshot_of_the_one_before(whole: Known) -> None:
    """Also one that comes late."""
    watched = watching(whole.scrape, whole.sized)
    assert watched.sized is not None
    with recorded(4, seed=5) as run:
        run.passes("decode", 1, 4)
        watched.take(at(run.text(start=START + 70), 74.0))
    assert None is watched.sized
    watched.take_size(whole.sized, 75.0)
    assert None is watched.sized
    assert watched.wants_size(75.0)


def test_a_snapshot_that_fails_leaves_the_scrapes_figures(whole: Known) -> None:
    """With the reason."""

    def ask(url: str) -> Sized:
        raise ClientError("no answer in 5 s")

    app = TopApp([watching(whole.scrape)], clock=lambda: 61.0, ask=ask)

    async def script(pilot: Any) -> None:
        await pilot.press("c")
        for _ in range(100):
            await pilot.pause(0.01)
            if "no answer" in screen(app):
                break
        assert "its snapshot: no answer in 5 s" in screen(app)
        assert "- only in a snapshot" in screen(app)

    drive(app, script)


def test_once_prints_the_same() -> None:
    """Of the endpoint itself, in 80 columns."""
    with recorded(8, pool_curve="all") as run:
        work(run)
        (watched,) = watch_once([run.telemetry.url.removesuffix("/metrics")], 0.2)
        size = mt.report(run.snapshot())["pool_size"]
    lines = text(watched, watched.sized_at)
    assert 80 >= max(map(len, lines[1:]))
    assert any(re.match(rf"knee +{size['phases']['decode']['knee']} slots", line) for line in lines)
    assert any(re.match(rf">  16 +{percent(size['phases']['decode']['simulated'])}%", line) for line in lines)
