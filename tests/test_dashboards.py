"""Panels: where they stand, what each says and how it is drawn."""

import re

import pytest

pytest.importorskip("grafana_foundation_sdk")

import promql_parser as p
from dashboards_seen import each_panel as each_panel_of
from dashboards_seen import panels, titled
from grafana_foundation_sdk.models.dashboard import Panel
from promql_checks import fill, matchers, selectors

from moe_telemetry import catalog as c
from moe_telemetry.monitoring import rules
from moe_telemetry.monitoring.config import Config
from moe_telemetry.monitoring.dashboards import build
from moe_telemetry.monitoring.kit import OUTCOME_COLOURS
from moe_telemetry.monitoring.layout import Band, Section, arrange

CONFIG = Config()
DASHBOARDS = build(CONFIG)
each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
each_panel = each_panel_of(DASHBOARDS)
BLENDED = {"clamp_min(1 - sum by (instance) (rate(moe_forward_duration_seconds_sum{S}[$__rate_interval])), 0)"}
"""Idle time is what neither phase has."""
GATE = re.compile(r" and on \(instance\) \((sum by \(instance\) \([^()]*\) > 0( or )?)+\)")
"""Whether an instance has ever recorded something, in whichever phase."""


def _rectangles(dashboard):
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


@each_dashboard
def test_nothing_overlaps_in_24_columns(dashboard):
    """Each cell of the grid belongs to one panel at most, rows and the panels inside collapsed ones included."""
    taken = {}
    for panel in _rectangles(dashboard):
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert taken.setdefault(cell, panel["id"]) == panel["id"]


@each_dashboard
def test_rows_leave_no_gap(dashboard):
    """Every line of the grid down to the last is full: a panel that is missing leaves a hole."""
    cells = sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in _rectangles(dashboard))
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in _rectangles(dashboard))
    assert 24 * height == cells


def test_a_collapsed_row_is_the_last():
    """Panels behind it would stand where its own do once it is opened."""
    with pytest.raises(ValueError, match="the last"):
        arrange([Section("a", (), collapsed=True), Section("b", ())])


def test_too_wide_a_band_is_refused():
    """25 columns are an error of generation and not a surprise on screen."""
    with pytest.raises(ValueError, match="25 columns"):
        arrange([Section("", (Band(1, ((Panel(), 12), (Panel(), 13))),))])


@each_dashboard
def test_ids_are_unique(dashboard):
    """Rows and panels have ids of their own, counted from 1."""
    ids = [panel["id"] for panel in _rectangles(dashboard)]
    assert list(range(1, len(ids) + 1)) == sorted(ids)


@each_panel
def test_panel_says_what_it_shows(panel):
    """Title, a description of some length that ends as a sentence, unit and the text for no data."""
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["title"]
    assert defaults["unit"]
    assert defaults["noValue"]
    assert len(panel["description"]) > 60
    assert panel["description"].endswith((".", "?"))


@each_panel
def test_panel_takes_its_datasource_from_the_variable(panel):
    """No uid stands in a panel or target, so a dashboard works wherever it is imported."""
    variable = {"type": "prometheus", "uid": "${datasource}"}
    assert [variable] * (1 + len(panel["targets"])) == [
        panel["datasource"],
        *(target["datasource"] for target in panel["targets"]),
    ]


@each_panel
def test_targets_are_told_apart(panel):
    """Each target has a refId of its own, a legend and a query; all of a panel are instant, or all a range."""
    refs = [target["refId"] for target in panel["targets"]]
    assert len(refs) == len(set(refs)) > 0
    assert all(target["legendFormat"] and target["expr"] for target in panel["targets"])
    assert 1 == len({target["instant"] for target in panel["targets"]})
    assert all(target["instant"] is not target["range"] for target in panel["targets"])


@each_panel
def test_rates_span_grafanas_window(panel):
    """Range vectors are over $__rate_interval, in instant queries also over $__range; no window is written out."""
    for target in panel["targets"]:
        windows = set(re.findall(r"\[(.*?)\]", re.sub(r'"[^"]*"', "", target["expr"])))
        assert windows <= {"$__rate_interval", *(["$__range"] if target["instant"] else [])}


@each_panel
def test_no_panel_blends_phases(panel):
    """Each selector of a metric that has a phase names one, or its aggregation keeps them apart."""
    by_name = {name: metric for metric in c.CATALOG for name in _scraped(metric)}
    for target in panel["targets"]:
        ungated = GATE.sub("", target["expr"])
        if ungated.replace('job=~"$job",instance=~"$instance"', "S") in BLENDED:
            continue
        for selector, kept in selectors(p.parse(_filled(ungated))):
            metric = by_name.get(selector.name)
            if metric is not None and "phase" in metric.keys:
                one = [value for name, op, value in matchers(selector) if name == "phase" and "|" not in value]
                assert one or "phase" in kept, target["expr"]


def _scraped(metric):
    if metric.kind is c.Kind.HISTOGRAM:
        return [metric.prometheus + part for part in ("_sum", "_count", "_bucket")]
    return [metric.prometheus]


def _filled(query):
    return fill(query, rate_interval="20s", range="1h")


@each_panel
def test_everything_is_by_instance(panel):
    """Sums and quantiles of several hosts mean nothing; the heatmap's counts alone are added."""
    for target in panel["targets"]:
        aggregated = re.findall(r"\b(?:sum|min|max|bottomk) by \((.*?)\)", target["expr"])
        if panel["type"] != "heatmap":
            assert all("instance" in keys.split(", ") for keys in aggregated)


@each_panel
def test_lines_do_not_span_gaps(panel):
    """A gap stays one, and prefill and requests, which come in bursts, are points."""
    if panel["type"] == "timeseries":
        custom = panel["fieldConfig"]["defaults"]["custom"]
        bursts = panel["title"].startswith("Prefill") or "gen_ai" in panel["targets"][0]["expr"]
        assert (False, "points" if bursts else "line") == (custom["spanNulls"], custom["drawStyle"])


@each_panel
def test_numbers_map_nan_to_idle(panel):
    """A quantile of nothing is NaN, which a number would print."""
    if panel["type"] in ("stat", "bargauge"):
        special = [entry for entry in panel["fieldConfig"]["defaults"]["mappings"] if entry["type"] == "special"]
        assert [("nan", "idle")] == [
            (entry["options"]["match"], entry["options"]["result"]["text"]) for entry in special
        ]


@each_panel
def test_outcomes_have_their_colours(panel):
    """Wherever outcomes of lookups are lines or areas, each has its one colour."""
    legends = [target["legendFormat"].removesuffix(" {{instance}}") for target in panel["targets"]]
    of_lookups = "{{outcome}}" in legends and "moe_expert_lookups" in panel["targets"][0]["expr"]
    shown = set(OUTCOME_COLOURS) if of_lookups else set(OUTCOME_COLOURS) & set(legends)
    coloured = {
        override["matcher"]["options"]: entry["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
        for entry in override["properties"]
        if entry["id"] == "color"
    }
    assert {outcome: OUTCOME_COLOURS[outcome] for outcome in shown} == {
        outcome: coloured.get(f"/^{outcome}( |$)/") for outcome in shown
    }


def test_layers_sort_as_numbers():
    """The variable's values, and the rows of a history by leading zeros."""
    (layer,) = [v for v in DASHBOARDS["moe-layers.json"]["templating"]["list"] if v["name"] == "layer"]
    assert 3 == layer["sort"]
    histories = [panel for panel in panels(DASHBOARDS["moe-layers.json"]) if panel["type"] == "status-history"]
    assert histories
    for panel in histories:
        assert panel["targets"][0]["expr"].startswith("label_replace(label_replace(")


@pytest.mark.parametrize(
    ("uid", "title", "name", "value"),
    [
        ("moe-overview", "Decode: predictor recall", "recall_low", 0.123),
        ("moe-overview", "Decode: hit rate", "hit_rate_low", 0.123),
        ("moe-overview", "Decode: tok/s while active", "decode_slow", 0.123),
        ("moe-overview", "Decode: stall share of forward time", "decode_stalled", 0.123),
        ("moe-overview", "Forward pass in progress", "forward_hung", 123.0),
        ("moe-prefetch", "Decode: predicted, and missed all the same", "prefetch_late", 0.123),
        ("moe-prefetch", "Decode: predicted, and missed all the same", "eviction_thrash", 0.123),
        ("moe-prefetch", "Decode: window against read latency", "read_latency", 0.123),
        ("moe-host", "MLX memory in use, of its limit", "mlx_memory", 0.123),
    ],
)
def test_thresholds_come_from_the_config(uid, title, name, value):
    """The alert's threshold is the panel's, whatever it is set to."""
    changed = build(CONFIG.with_threshold(name, value))[f"{uid}.json"]
    (panel,) = [panel for panel in panels(changed) if panel["title"] == title]
    assert value in [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]


def test_prefill_has_its_own_limit_of_a_hung_pass():
    """The default colours are decode's, and an override has prefill's."""
    panel = titled(DASHBOARDS, "Forward pass in progress")
    (override,) = panel["fieldConfig"]["overrides"]
    (thresholds,) = override["properties"]
    assert ("/^prefill( |$)/", CONFIG.thresholds.forward_hung_prefill) == (
        override["matcher"]["options"],
        thresholds["value"]["steps"][1]["value"],
    )


def test_a_restart_of_another_host_is_told_apart():
    """Runs are named with their instance."""
    (target,) = titled(DASHBOARDS, "Model · runtime · run")["targets"]
    assert "{{instance}}" in target["legendFormat"]


@pytest.mark.parametrize(
    "title",
    ["Run age", "Experts per layer call since the start: p99", "Experts per layer call since the start: max"],
)
def test_a_finished_run_is_not_said_to_be_missing(title):
    """These show the run at the range's end, so a range that ends behind it has none."""
    assert "no run now: end the range inside the run" == titled(DASHBOARDS, title)["fieldConfig"]["defaults"]["noValue"]


def test_bars_stand_in_order():
    """The series of an instant query come in no order, those of a range query by their labels."""
    found = [panel for panel in panels(DASHBOARDS["moe-layers.json"]) if panel["type"] == "bargauge"]
    assert [True] * 2 == [panel["targets"][0]["range"] for panel in found]


@pytest.mark.parametrize("figure", ["recall", "hit_rate", "tokens_per_second"])
def test_usual_value_is_drawn(figure):
    """The baseline of each drop alert is a thin grey line beside what it judges."""
    titles = {"recall": "predictor recall", "hit_rate": "hit rate", "tokens_per_second": "tok/s while active"}
    panel = titled(DASHBOARDS, f"Decode: {titles[figure]}")
    (target,) = [target for target in panel["targets"] if target["legendFormat"].startswith("usual")]
    assert target["expr"].startswith(rules.usual(CONFIG, figure))
    (override,) = [entry for entry in panel["fieldConfig"]["overrides"] if "usual" in entry["matcher"]["options"]]
    assert {"mode": "fixed", "fixedColor": "#8e8e8e"} == override["properties"][0]["value"]


def test_worst_five_are_of_the_range():
    """As a range query it would give the five worst of each moment."""
    (target,) = titled(DASHBOARDS, "Worst five layers by hit rate")["targets"]
    assert (True, "table") == (target["instant"], target["format"])
    assert "bottomk by (instance) (5, " in target["expr"]
    assert "$__rate_interval" not in target["expr"]


def test_heatmap_takes_buckets_apart():
    """Its format says so, and its series are told apart by nothing but le."""
    (panel,) = [panel for panel in panels(DASHBOARDS["moe-host.json"]) if panel["type"] == "heatmap"]
    (target,) = panel["targets"]
    assert ("heatmap", "{{le}}") == (target["format"], target["legendFormat"])
    assert target["expr"].startswith("sum by (le) (")
