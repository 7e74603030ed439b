"""Two snapshots compared: what was set up differently, and the differences that matter first."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from test_report import DAMAGED, snapshot_of

import moe_telemetry as mt
from moe_telemetry import cli, comparison, markdown
from moe_telemetry import recorder as rec
from moe_telemetry.comparison import Comparison, Difference, compare
from moe_telemetry.reports import lines
from moe_telemetry.testing import capture


def run_of(slots: int, hits: int, seconds: float = 0.05, tokens: int = 400, model: str = "demo") -> dict[str, Any]:
    """A run of decode passes in which `hits` of 10 routed experts are resident, and of one prefill pass."""
    with capture() as captured:
        rec.pool(0, capacity=slots)
        for _ in range(tokens):
            rec.forward(1)
            rec.routed(0, set(range(10)), resident=set(range(hits)), predicted=set(range(8)), ready=set(range(8)))
            rec.read("demand", 1_000_000 * (10 - hits), 0.002)
            rec.tokens(1)
            rec.forward_done(seconds)
        rec.forward(64)
        rec.routed(0, set(range(10)), resident=set(range(5)))
        rec.tokens(64)
        rec.forward_done(1.0)
        found = snapshot_of(captured)
    found["run"] = {**found["run"], "model": model, "run": f"slots-{slots}", "start_time": 1_700_000_000.0 + slots}
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def large() -> dict[str, Any]:
    return run_of(16, hits=9)


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return run_of(6, hits=5, seconds=0.1)


def by_name(found: Comparison, part: str = "decode") -> dict[str, Difference]:
    return {each.figure.name: each for each in found.parts[part]}


def test_what_was_set_up_differently_comes_first(large, small) -> None:
    """The pool, as one compares two runs with another pool size, and nothing that is the same."""
    assert [("pool, slots a layer", "16", "6")] == compare(large, small).setup
    other = run_of(16, hits=9, model="other")
    assert [("model", "demo", "other")] == compare(large, other).setup


def test_speed_leads_and_the_larger_differences_follow(large, small) -> None:
    """tok/s is what all others are about; then by how far a figure is from what counts as alike."""
    found = [each for each in compare(large, small).parts["decode"] if not each.alike]
    assert "tok/s in forward passes" == found[0].figure.name
    weights = [each.weight for each in found[1:]]
    assert sorted(weights, reverse=True) == weights
    names = [each.figure.name for each in found]
    assert names.index("hit rate of lookups") < names.index("B: never predicted") or "B: never predicted" not in names


def test_figures_are_those_of_the_snapshots(large, small) -> None:
    """Each figure is that of its run, in the unit that is named."""
    found = by_name(compare(large, small))
    assert (20.0, 10.0) == pytest.approx(
        (found["tok/s in forward passes"].first, found["tok/s in forward passes"].second)
    )
    assert (0.9, 0.5) == (found["hit rate of lookups"].first, found["hit rate of lookups"].second)
    assert (0.0, 1.0) == (found["unions above the pool"].first, found["unions above the pool"].second)
    assert (1.0, 5.0) == pytest.approx((found["demand reads"].first, found["demand reads"].second))
    assert (2.0, 2.0) == pytest.approx((found["a demand read"].first, found["a demand read"].second))


def test_better_and_worse(large, small) -> None:
    """A slower run with fewer hits is worse, the other way round better; a longer union is neither."""
    down, up = by_name(compare(large, small)), by_name(compare(small, large))
    for name in ("tok/s in forward passes", "hit rate of lookups", "demand reads"):
        assert (False, True) == (down[name].better, up[name].better)
    assert None is down["union p99"].better
    assert None is down["recall of the predictor"].better


def test_alike_is_less_than_a_point_or_five_percent() -> None:
    """What chance makes of two equal runs is named only."""
    found = by_name(compare(run_of(16, hits=9, seconds=0.1), run_of(16, hits=9, seconds=0.104)))
    assert all(each.alike for each in found.values())
    found = by_name(compare(run_of(16, hits=9, seconds=0.1), run_of(16, hits=9, seconds=0.106)))
    assert ["tok/s in forward passes"] == [name for name, each in found.items() if not each.alike]


def test_phases_are_compared_apart(large, small) -> None:
    """Prefill, which is the same in both, is alike while decode is not."""
    found = compare(large, small)
    assert all(each.alike for name, each in by_name(found, "prefill").items() if name != "unions above the pool")
    assert not by_name(found)["hit rate of lookups"].alike


def test_a_figure_of_one_run_only_is_said(large) -> None:
    """A runtime without a pool has no hit rate to compare."""
    with capture() as captured:
        for _ in range(200):
            rec.forward(1)
            rec.union(0, 10)
            rec.tokens(1)
            rec.forward_done(0.05)
        bare = snapshot_of(captured)
    text = comparison.lines(compare(large, bare), "a", "b")
    hits = [line.split() for line in text if "hit rate" in line]
    assert [["90.0%", "-", "only", "in", "A"], ["50.0%", "-", "only", "in", "A"]] == [words[4:] for words in hits]


def test_notes_say_what_it_means(large, small) -> None:
    """A pool that the largest union does not fit, one run twice, and runs too short to tell."""
    assert ["B: the largest decode union is 10 experts (seq 1), its smallest pool 6 slots"] == [
        note.split(":", 2)[0] + ":" + note.split(":", 2)[1] for note in compare(large, small).notes
    ]
    assert "same run" in compare(large, large).notes[0]
    assert "decode tokens are few" in " ".join(compare(large, run_of(16, 9, tokens=12)).notes)


def test_the_text_fits_80_columns_and_has_the_figures(large, small) -> None:
    """A line a figure; what differs stands above what is alike."""
    text = comparison.lines(compare(large, small), "a.json", "b.json")
    assert ["A  a.json", "B  b.json"] == text[:2]
    assert all(len(line) <= 80 for line in text if not line.startswith(("B:", "  alike")))
    assert any(
        line.split() == ["hit", "rate", "of", "lookups", "90.0%", "50.0%", "-40.0", "points,", "worse"] for line in text
    )
    assert any(line.split()[-2:] == ["-50%,", "worse"] for line in text if "tok/s" in line)
    alike = next(number for number, line in enumerate(text) if line.startswith("  alike, decode"))
    assert alike > next(number for number, line in enumerate(text) if "hit rate" in line)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [(0.0, 2.0, "from 0"), (2.0, 1.0, "-50%"), (1.0, 2.0, "+100%"), (1.0, 8.0, "x 8"), (None, 1.0, "only in B")],
)
def test_changes_are_told_as_people_do(first, second, words) -> None:
    """Percent to threefold, then the factor."""
    figure = comparison.Figure("stall", lambda run: None)
    assert words == comparison.change(Difference(figure, first, second, 0.0, None))


# -- Markdown and the command ---------------------------------------------------------------------------------


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown text, as cells; fails on a row that has another number of cells than its head."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    for table in found:
        assert 1 >= len({len(row) for row in table})
    return [table for table in found if table]


def test_markdown_of_a_report_has_its_figures(large, tmp_path, capsys) -> None:
    """Tables whose cells are those of the text."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(large))
    assert 0 == cli.main(["report", "--markdown", str(path)])
    summary, unions = tables(capsys.readouterr().out)
    assert ["", "prefill", "decode"] == summary[0]
    assert ["hit rate of lookups", "50.0%", "90.0%"] in summary
    assert ["decode", "1", "400", "10.00", "10", "10", "10", "0"] in unions


def test_markdown_of_a_comparison(large, small, tmp_path, capsys) -> None:
    """Two files on the command line, B against A."""
    for name, found in (("a.json", large), ("b.json", small)):
        (tmp_path / name).write_text(json.dumps(found))
    sources = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert 0 == cli.main(["report", "--markdown", *sources])
    text = capsys.readouterr().out
    setup, decode, *_ = tables(text)
    assert ["pool, slots a layer", "16", "6"] in setup
    assert ["hit rate of lookups", "90.0%", "50.0%", "-40.0 points", "worse"] in decode
    assert f"- A: `{sources[0]}: demo on" in text
    assert 0 == cli.main(["report", *sources])
    assert "hit rate of lookups" in capsys.readouterr().out
    assert 0 == cli.main(["report", "--json", *sources])
    data = json.loads(capsys.readouterr().out)
    assert [mt.report(large), mt.report(small)] == data["reports"]
    assert "tok/s in forward passes" == data["differences"]["decode"][0]["figure"]


def test_names_do_not_break_markdown(small, tmp_path, capsys) -> None:
    """A model's name with bars, back ticks and line breaks stays one cell and one line."""
    evil = json.loads(json.dumps(small))
    evil["run"]["model"] = "a|b`c`\n# d"
    for name, found in (("a.json", small), ("b.json", evil)):
        (tmp_path / name).write_text(json.dumps(found))
    assert 0 == cli.main(["report", "--markdown", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    text = capsys.readouterr().out
    tables(text)
    assert "\n# d" not in text
    assert "`a¦b'c'?# d`" in text
    assert "plain" == markdown.cell("plain")


def test_report_of_host_and_port(start, capsys) -> None:
    """An endpoint without http:// is read as one, unless there is a file of that name."""
    telemetry = start()
    telemetry._recorder.routed(3, {1, 2}, resident={1})
    assert 0 == cli.main(["report", f"127.0.0.1:{telemetry.port}", "--json"])
    assert 2 == json.loads(capsys.readouterr().out)["overall"]["routed"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["a.json", "b.json", "c.json"], "takes one snapshot, or two to compare, not 3"),
        (["a.json", "nothing.json"], "cannot read nothing.json: No such file or directory"),
        (["127.0.0.1:9"], "cannot read 127.0.0.1:9: connection refused; is a run with telemetry at work there?"),
        (["--json", "--markdown", "a.json"], "not allowed with argument"),
        ([], "report needs a snapshot's file, an endpoint, or --trace"),
    ],
)
def test_what_cannot_be_reported_is_one_line(options, words, small, tmp_path, monkeypatch, capsys) -> None:
    """What is wrong and what to do, with exit status 2."""
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(json.dumps(small))
    try:
        status = cli.main(["report", *options])
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    assert (2, "", 1) == (status, printed.out, printed.err.count("\n"))
    assert words in printed.err


@pytest.mark.parametrize("form", [[], ["--json"], ["--markdown"]])
def test_a_damaged_snapshot_is_one_line(form, large, small, tmp_path, capsys) -> None:
    """Whatever stands in one of two snapshots, there is one line that names it, and exit status 2."""
    good = tmp_path / "good.json"
    good.write_text(json.dumps(large))
    for number, (change, value) in enumerate(DAMAGED):
        found = json.loads(json.dumps(small))
        try:
            change(found, value)
        except KeyError:
            continue
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(found))
        assert 2 == cli.main(["report", *form, str(good), str(path)]), value
        printed = capsys.readouterr()
        assert ("", 1) == (printed.out, printed.err.count("\n"))


@pytest.mark.parametrize("value", [math.inf, math.nan, "x", None, [], 10**400, -1.0])
def test_damage_that_only_a_comparison_reads_is_one_line(value, large, small, tmp_path, capsys) -> None:
    """Figures that a report leaves alone are checked where two are compared."""
    for name in ("moe.expert.read", "moe.pool.capacity", "moe.expert.evictions"):
        found = json.loads(json.dumps(small))
        found["metrics"][name]["series"] = [{"labels": {"phase": "decode", "source": "demand"}, "value": value}]
        for file, content in (("a.json", large), ("b.json", found)):
            (tmp_path / file).write_text(json.dumps(content))
        assert 2 == cli.main(["report", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
        assert 1 == capsys.readouterr().err.count("\n")


def test_the_report_begins_with_the_summary_that_run_ends_with(large) -> None:
    """One function tells the figures of a run, wherever they are told."""
    from moe_telemetry import summary

    told = summary.lines(large)
    text = lines(mt.report(large))
    assert told == text[2 : 2 + len(told)]
    assert "tok/s in forward passes" in told[2]
