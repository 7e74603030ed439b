"""The report: the figures of SEED.md from a snapshot, as data, as text and from the command line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from profiling_state import pristine
from prometheus import prometheus

import moe_telemetry as mt
from moe_telemetry import cli, profiling, report_command, snapshot
from moe_telemetry import recorder as rec
from moe_telemetry.reports import ReportError, lines
from moe_telemetry.series import read
from moe_telemetry.testing import capture


@pytest.fixture(autouse=True)
def _pristine() -> Iterator[None]:
    pristine()
    yield
    pristine()


VERIFY = Counter({30: 90, 29: 60, 25: 850, 22: 1200, 20: 1500, 19: 4000, 18: 1010, 17: 390, 13: 900})
"""10,000 unions of mean 19.46, median 19, p99 29 and maximum 30, as published for K=3."""
PUBLISHED = {
    1: (Counter({10: 4800}), (10.0, 10, 10, 10)),
    3: (VERIFY, (19.46, 19, 29, 30)),
}


def feed_published(layers: int = 48) -> None:
    """The published table through note_union; the largest verify unions fall to layer 17."""
    for seq, (sizes, _) in PUBLISHED.items():
        for number, size in enumerate(sizes.elements()):
            profiling.note_union(seq, size, 17 if size >= 30 else number % layers)


def snapshot_of(captured: Any) -> dict[str, Any]:
    return snapshot.build(captured.store, read(captured.store))


def test_the_published_table_comes_back():
    """Mean, p50, p99 and maximum of each sequence length are those that were fed in, to the digit."""
    with capture() as captured:
        feed_published()
        found = mt.report(json.loads(json.dumps(snapshot_of(captured))))
    unions = found["phases"]["decode"]["unions"]
    assert ["1", "3"] == [union["seq"] for union in unions]
    for union in unions:
        figures = (union["mean"], union["p50"], union["p99"], union["max"])
        assert PUBLISHED[int(union["seq"])][1] == figures
    assert {"slots": 30, "seq": "3", "layer": "17"} == found["pool_floor"]
    assert "17" == unions[1]["max_layer"]
    assert 10_000 == sum(layer["count"] for layer in unions[1]["layers"].values())
    sizes = PUBLISHED[3][0]
    assert sizes[30] <= unions[1]["layers"]["17"]["count"]
    assert 30 == max(layer["max"] for layer in unions[1]["layers"].values())
    assert [] == found["phases"]["prefill"]["unions"]


def test_the_published_table_in_a_real_prometheus(tmp_path: Path, start):
    """The ceiling of histogram_quantile over the raw buckets is the same integer; the maxima are gauges."""
    telemetry = start(recorder=rec)
    feed_published()
    with prometheus(tmp_path, targets=[f"127.0.0.1:{telemetry.port}"]) as server:
        server.wait('moe_expert_union_count{seq="3"} == 10000')
        for seq, (_, (mean, p50, p99, largest)) in PUBLISHED.items():
            series = f'phase="decode",seq="{seq}"'
            quantile = f"ceil(histogram_quantile(%s, sum by (le) (moe_expert_union_bucket{{{series}}})))"
            assert p50 == server.value(quantile % "0.4999999")
            assert p99 == server.value(quantile % "0.9899999")
            assert largest == server.value(f"moe_expert_union_max{{{series}}}")
            assert largest == server.value(quantile % "1")
            assert mean == server.value(f"moe_expert_union_sum{{{series}}} / moe_expert_union_count{{{series}}}")


@pytest.fixture
def known() -> dict[str, Any]:
    """A snapshot of a run of which every figure is known."""
    with capture() as captured:
        rec.forward(1)
        rec.routed(0, {1, 2, 3, 4}, resident={1, 2}, predicted={1, 3, 9}, ready={3})
        rec.routed(5, {5, 6, 7, 8, 9}, resident={5}, predicted={5, 6, 7}, ready={7})
        rec.window(0.002)
        rec.window(0.004)
        rec.prefetch("predict", 0.5)
        rec.prefetch("predict", 1.5)
        rec.promote("take", 0.25)
        rec.forward(64)
        rec.routed(0, set(range(10)), resident=set(range(10)))
        found = snapshot_of(captured)
    found["run"]["start_time"] = 1_700_000_000.0
    found["time"] = "2023-11-14T22:15:00+00:00"  # 100 s later
    return json.loads(json.dumps(found))


def test_shares_of_lookups(known):
    """Hit and miss of the routed, A and B of the misses, timing and evicted of A: decode for itself."""
    wanted = {
        "routed": 9,
        "hit": 3 / 9,
        "miss": 6 / 9,
        "predicted": 3 / 6,
        "unpredicted": 3 / 6,
        "timing": 1 / 3,
        "evicted": 2 / 3,
    }
    assert wanted == mt.report(known)["phases"]["decode"]["lookups"]


def test_overall_is_blended_and_apart(known):
    """The blended totals stand beside the phases, never in them."""
    found = mt.report(known)
    assert (19, 13 / 19) == (found["overall"]["routed"], found["overall"]["hit"])
    assert (10, 1.0) == (found["phases"]["prefill"]["lookups"]["routed"], found["phases"]["prefill"]["lookups"]["hit"])


def test_recall_window_and_prefetch(known):
    """Recall, routed experts a call, the mean window, and the prefetch segments with their share of wall time."""
    found = mt.report(known)
    decode = found["phases"]["decode"]
    assert 100.0 == found["wall_seconds"]
    assert (5 / 9, 4.5, 3.0) == (decode["recall"], decode["mean_routed"], pytest.approx(decode["mean_window_ms"]))
    assert {"seconds": 2.0, "count": 2, "mean_ms": 1000.0, "wall_share": 0.02} == decode["prefetch"]["predict"]
    assert {"seconds": 0.25, "count": 1, "mean_ms": 250.0, "wall_share": 0.0025} == decode["promote"]["take"]
    assert {"seconds": 0, "count": 0, "mean_ms": None, "wall_share": 0.0} == decode["prefetch"]["submit"]


def test_union_by_layer(known):
    """Maximum, mean and count of each layer, and the layer of the largest union."""
    (union,) = mt.report(known)["phases"]["decode"]["unions"]
    layers = {"0": {"max": 4, "mean": 4.0, "count": 1}, "5": {"max": 5, "mean": 5.0, "count": 1}}
    assert (layers, "5", 5, 4.5) == (union["layers"], union["max_layer"], union["max"], union["mean"])


def test_text_holds_the_figures(known):
    """The text says the same figures, and marks what is blended."""
    text = "\n".join(lines(mt.report(known)))
    for part in (
        "hit 33.33 %, miss 66.67 %",
        "timing 33.33 %, evicted 66.67 %",
        "recall   55.56 %",
        "2.000 s, 2.00 % of the wall time, mean 1000.000 ms",
        "window   3.000 ms",
        "pool floor  5 slots",
        "overall (both phases blended",
    ):
        assert part in text
    assert "nan" not in text.lower()
    assert "None" not in text


def test_an_empty_run_reports_nothing():
    """A run without events has no figures, and no line about them."""
    with capture() as captured:
        found = mt.report(snapshot_of(captured))
    assert None is found["pool_floor"]
    assert None is found["phases"]["decode"]["recall"]
    assert 1 == len(lines(found))
    assert math.isfinite(found["wall_seconds"])


@pytest.mark.parametrize("form", ["text", "json"])
def test_command_reads_a_file(known, form, tmp_path, capsys):
    """`report FILE` prints the text, with --json the data."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(known))
    assert 0 == cli.main(["report", str(path), *(["--json"] if form == "json" else [])])
    out = capsys.readouterr().out
    assert mt.report(known) == json.loads(out) if form == "json" else "\n".join(lines(mt.report(known))) + "\n" == out


@pytest.mark.parametrize("path", ["", "/", "/snapshot", "/snapshot/"])
def test_command_reads_an_endpoint(path, start, capsys):
    """`report URL` asks for /snapshot, named or not."""
    telemetry = start()
    telemetry._recorder.routed(3, {1, 2}, resident={1})
    assert 0 == cli.main(["report", telemetry.url + path, "--json"])
    assert 2 == json.loads(capsys.readouterr().out)["overall"]["routed"]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"schema": 9, "run": {}, "metrics": {}, "unions": {}}', "damaged", None, "http", "refused"],
)
def test_bad_input_is_one_line(content, known, tmp_path, capsys, start):
    """What is no snapshot is said in one line, with exit status 2."""
    path = tmp_path / "run.json"
    source = str(path)
    if content == "damaged":
        del known["run"]["start_time"]
        content = json.dumps(known)
    if content == "http":
        source = start().url + "/nothing"
    elif content == "refused":
        source = "http://127.0.0.1:9/snapshot"
    elif content is not None:
        path.write_text(content)
    assert 2 == cli.main(["report", source])
    captured = capsys.readouterr()
    assert ("", 1) == (captured.out, captured.err.count("\n"))
    assert captured.err.startswith("moe-telemetry: ")


def _set(*path: str) -> Any:
    """A change of one place of a snapshot."""

    def change(found: dict[str, Any], value: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = value

    return change


def _deep() -> Any:
    found: Any = 1
    for _ in range(900):
        found = [found]
    return found


DAMAGED: list[Any] = [
    (_set("run"), value) for value in ({}, [], None, {"start_time": math.inf}, {"start_time": 10**400})
]
DAMAGED += [(_set("time"), value) for value in (1, "", "yesterday", None)]
DAMAGED += [(_set(part), value) for part in ("metrics", "unions") for value in ([], None, 1, "x", _deep())]
DAMAGED += [(_set("schema"), value) for value in ("1\n2", [], _deep())]
DAMAGED += [
    (_set("metrics", "moe.expert.lookups", "series"), value)
    for value in (
        [{"labels": {"phase": "decode", "outcome": "hit"}, "value": number}]
        for number in (math.inf, math.nan, 10**400, "x", None, [])
    )
]
DAMAGED += [
    (_set("metrics", "moe.prefetch.duration", "series"), value)
    for value in (
        [{"labels": {"phase": "decode", "stage": "predict"}, "count": count, "sum": total}]
        for count, total in ((math.inf, 1.0), (1, 10**400), (10**400, 1.0), (1, "x"))
    )
]
DAMAGED += [
    (_set("unions", "decode", "1"), value)
    for value in (
        *({"layers": {"0": {"10": times}}} for times in (math.inf, 10**400, -1, "x", 0.5)),
        *({"layers": {"0": {size: 1}}} for size in ("x", "1" * 5000, "")),
        *({"layers": []}, [], None, {}, {"layers": {"0": 1}}),
        {"layers": {}, "rest": {"count": 1}},
        {"layers": {}, "rest": {"count": 1, "sum": math.inf, "max": math.inf}},
    )
]


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_a_damaged_snapshot_is_one_line(number, form, known, tmp_path, capsys):
    """Whatever stands in a snapshot, there is one line and exit status 2."""
    change, value = DAMAGED[number]
    change(known, value)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(known))
    assert 2 == cli.main(["report", str(path), *form])
    captured = capsys.readouterr()
    assert ("", 1) == (captured.out, captured.err.count("\n"))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\x00", ""])
def test_what_json_cannot_read_is_one_line(content, tmp_path, capsys):
    """Nesting without an end, and numbers without one."""
    path = tmp_path / "run.json"
    path.write_text(content)
    assert 2 == cli.main(["report", str(path)])
    assert 1 == capsys.readouterr().err.count("\n")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_is_absent_is_left_out(form, known, tmp_path, capsys):
    """A run without its names, and lengths without a call, are no damage."""
    known["run"] = {"start_time": known["run"]["start_time"]}
    known["unions"]["decode"] |= {"3": {"layers": {}}, "4": {"layers": {"0": {}}}, "5": {"layers": {"0": {"9": 0}}}}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(known))
    assert 0 == cli.main(["report", str(path), *form])
    assert ["1"] == [union["seq"] for union in mt.report(known)["phases"]["decode"]["unions"]]
    assert "" == capsys.readouterr().err


def test_a_snapshot_without_an_end_is_refused(tmp_path, capsys, monkeypatch):
    """No more than 64 MiB are read."""
    assert 64 << 20 == report_command.MAX_BYTES
    monkeypatch.setattr(report_command, "MAX_BYTES", 1 << 20)
    path = tmp_path / "run.json"
    path.write_bytes(b" " * ((1 << 20) + 1))
    assert 2 == cli.main(["report", str(path)])
    assert "larger than 1 MiB" in capsys.readouterr().err


def test_report_refuses_other_data():
    """report() raises ReportError, a ValueError, for what is no snapshot."""
    with pytest.raises(ValueError, match="no snapshot") as caught:
        mt.report({"metrics": {}})
    assert ReportError is caught.type


@pytest.mark.parametrize(
    ("requests", "words"),
    [(1, "1 request of 0.50 s, 100.0 ms to the first token, 50.0 ms an output token"), (1_234, "1,234 requests of ")],
)
def test_one_request_is_no_mean(requests, words):
    """One has its figures, of several there are means."""
    with capture() as captured:
        for _ in range(requests):
            rec.request(0.1, 0.5, 9)
    (line,) = [
        line for line in lines(mt.report(snapshot.build(captured.store, read(captured.store)))) if "request" in line
    ]
    assert line.startswith(words)
    assert (requests > 1) == line.endswith(" (means)")
