"""Every query of the dashboards, by a real Prometheus that has scraped the demo under the rules."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("grafana_foundation_sdk")

from conftest import free_port
from dashboards_seen import each_target as each_target_of
from dashboards_seen import exact_unions, queries, targets, variable_query
from prometheus import prometheus
from promql_checks import OF_PROMETHEUS, Known, fill, problems

from moe_telemetry import catalog as c
from moe_telemetry.monitoring import rules
from moe_telemetry.monitoring.config import Config
from moe_telemetry.monitoring.dashboards import build

RUN_SECONDS = 42
SETTLED = 8
"""Seconds at either end of the run that panels over time leave out."""
CONFIG = Config().scaled(60)
WINDOW = "5s"
"""Grafana's $__rate_interval at a scrape interval of 1 s is at least 4 s."""

EMPTY = {
    "Alerts that fire": "a healthy run fires none",
    "Decode: experts served otherwise, share": "the demo serves all of them by their weights",
    "Prefill: experts served otherwise, share": "the same",
}
"""Panels without data in a healthy demo, and why."""
ABOVE_ONE = {
    "Where wall time goes": "a pass counts when it ends",
    "Prefill: stall share of forward time": "a stall counts when it ends, and its pass later",
    "host time by stage": "a stage counts when it ends",
    "Largest call since the start": "prefill's calls may be larger than the pool",
    "Mean experts per call, of the layer's pool": "prefill's calls may be larger than the pool",
}
"""Of unit percentunit, yet no parts of a whole."""
DASHBOARDS = build(CONFIG)
each_target = each_target_of(DASHBOARDS)


@dataclass
class Run:
    """A demo that has ended, in a Prometheus that has all of it."""

    server: Any
    instance: str
    snapshot: dict[str, Any]
    begin: float
    end: float
    known: Known

    def fill(self, query: str, **chosen: str) -> str:
        """The query as Grafana sends it."""
        values = {
            "job": "moe",
            "instance": self.instance,
            "model": ".+",
            "layer": ".+",
        }
        values |= {"phase": "decode", "outcome": "miss_timing", "source": "prefetch"} | chosen
        return fill(query, rate_interval=WINDOW, range=f"{math.ceil(self.end - self.begin)}s", **values)

    def values(self, target: dict[str, Any], **chosen: str) -> list[list[float]]:
        """The values of each series: at the run's end, or over it."""
        query = self.fill(target["expr"], **chosen)
        if target["instant"]:
            found = self.server.api("query", query=query, time=str(self.end))["result"]
            return [[float(series["value"][1])] for series in found]
        times = {"start": str(self.begin + SETTLED), "end": str(self.end), "step": "1"}
        found = self.server.api("query_range", query=query, **times)["result"]
        return [[float(value) for _, value in series["values"]] for series in found]

    def at_the_end(self, query: str) -> dict[tuple[str, str], int]:
        """Whole numbers by phase and seq."""
        found = self.server.api("query", query=query, time=str(self.end))["result"]
        return {(series["metric"]["phase"], series["metric"]["seq"]): float(series["value"][1]) for series in found}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A healthy demo of some 40 s, its routing kept in arrays; ended by Ctrl-C, scraped every second until the last
    count is in."""
    folder = tmp_path_factory.mktemp("live")
    port, file, rule_file = free_port(), folder / "snapshot.json", folder / "rules.yml"
    rule_file.write_text(rules.render(CONFIG), encoding="utf-8")
    options = ["--device-routing", "--port", port, "--cache", folder / "cache", "--snapshot", file, "--linger", 20]
    command = [sys.executable, "-m", "moe_telemetry", "demo", *map(str, options)]
    instance = f"127.0.0.1:{port}"
    with prometheus(folder, targets=[instance], rules=[rule_file]) as server, (folder / "out").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "COLUMNS": "200"})
        try:
            server.wait(f"{c.TOKENS.prometheus}{{phase='decode'}} > 0", 60)
            begin = server.value(c.RUN_START_TIME.prometheus)
            time.sleep(RUN_SECONDS)
            known = _known(server)
            process.send_signal(signal.SIGINT)
            assert 0 == process.wait(60), (folder / "out").read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        end = _last_scrape(server)
        yield Run(server, instance, json.loads(file.read_text()), begin, end, known)


def _known(server):
    """What a scrape has, from the server that took it."""
    series = {}
    for sample in server.query('{job="moe"}'):
        name = sample["metric"].pop("__name__")
        for label, value in sample["metric"].items():
            series.setdefault(name, {}).setdefault(label, set()).add(value)
    recorded = {rule["record"] for group in rules.groups(CONFIG) for rule in group["rules"] if "record" in rule}
    # An alert may be pending at this moment, and none has ever fired.
    known = Known({name: labels for name, labels in series.items() if name not in recorded | OF_PROMETHEUS.keys()})
    known.free = {**known.free, **{name: {"phase", "outcome", "source", "model", "run"} for name in recorded}}
    return known


def _last_scrape(server):
    """The time of the last scrape that succeeded."""
    (series,) = server.api("query", query=f"{c.RUN_START_TIME.prometheus}[5m]")["result"]
    return series["values"][-1][0]


@each_target
def test_names_are_those_of_a_scrape(run, panel, target):
    """Each metric, label, label value and legend of a query exists in a scrape of the demo, in both phases."""
    for phase in c.PHASES:
        query = run.fill(target["expr"], phase=phase, instance=".+")
        assert [] == problems(query, run.known, target["legendFormat"])


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("moe_expert_lookups_total", "moe_expert_lookup_total"),
        ('outcome="hit"', 'outcome="hits"'),
        ('outcome="hit"', 'result="hit"'),
        ("sum by (instance)", "sum by (instance, source)"),
    ],
)
def test_a_renamed_name_is_found(run, was, now):
    """A metric, value or label that the scrape does not have is a problem, which the query as it stands has not."""
    (query,) = {
        run.fill(target["expr"], instance=".+")
        for panel, target in targets(DASHBOARDS)
        if panel["title"] == "Decode hit rate"
    }
    assert was in query
    assert ([], True) == (problems(query, run.known), bool(problems(query.replace(was, now), run.known)))


def test_a_renamed_metric_of_the_scrape_is_found(run):
    """Renaming any catalog metric at its source leaves queries without it."""
    asked = [run.fill(target["expr"], instance=".+") for _, target in targets(DASHBOARDS)]
    unnoticed = []
    for metric in c.CATALOG:
        gone = {name: labels for name, labels in run.known.series.items() if not name.startswith(metric.prometheus)}
        if not any(problems(query, Known(gone, run.known.free)) for query in asked):
            unnoticed.append(metric.name)
    assert [] == unnoticed


@each_target
def test_panel_has_data_in_a_healthy_run(run, panel, target):
    """At least one finite value, but for the panels that are listed with a reason."""
    finite = [value for values in run.values(target) for value in values if math.isfinite(value)]
    assert (panel["title"] not in EMPTY) is bool(finite)


@each_target
def test_shares_lie_in_0_to_1(run, panel, target):
    """A share of a whole is one, in both phases, for every outcome."""
    if panel["fieldConfig"]["defaults"]["unit"] != "percentunit" or any(word in panel["title"] for word in ABOVE_ONE):
        return
    for chosen in ({"phase": phase, "outcome": outcome} for phase in c.PHASES for outcome in c.OUTCOMES):
        values = [value for values in run.values(target, **chosen) for value in values]
        assert [] == [value for value in values if not -1e-9 <= value <= 1 + 1e-9]
        if not {"$phase", "$outcome"} & set(re.findall(r"\$\w+", target["expr"])):
            break


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_variables_find_values(run, dashboard):
    """Each query variable's selector and label exist, and it has a value in the run."""
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            query, label = variable_query(variable)
            assert [] == problems(run.fill(query, instance=".+"), run.known, f"{{{{{label}}}}}")
            found = run.server.api("query", query=run.fill(query), time=str(run.end))["result"]
            assert {""} < {"", *(series["metric"][label] for series in found)}


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_annotations_say_when(run, dashboard):
    """The labels of both annotations exist, and the run's start is the snapshot's, in milliseconds."""
    alerts, starts = dashboard["annotations"]["list"]
    for annotation in (alerts, starts):
        legend = annotation["titleFormat"] + annotation["textFormat"]
        assert [] == problems(run.fill(annotation["expr"], instance=".+"), run.known, legend)
    (found,) = run.server.api("query", query=run.fill(starts["expr"]), time=str(run.end))["result"]
    assert run.snapshot["run"]["start_time"] * 1000 == pytest.approx(float(found["value"][1]))


def test_unions_of_the_run_equal_the_snapshot(run):
    """The panels' p99 and max of the whole run, to the integer, for each phase and seq."""
    exact = exact_unions(run.snapshot)
    p99, largest = (
        run.at_the_end(run.fill(*queries(DASHBOARDS, f"Experts per layer call since the start: {which}").values()))
        for which in ("p99", "max")
    )
    assert len(exact) > 1
    assert exact == {key: (p99[key], largest[key]) for key in p99 | largest}
