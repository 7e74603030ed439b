"""Every query of the dashboards, by a real Prometheus that has scraped the demo under the rules."""

import json
import math
import os
import random
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
from prometheus import prometheus
from promql_checks import Known, fill, problems

import moe_telemetry as mt
from moe_telemetry import catalog as c
from moe_telemetry.monitoring import rules
from moe_telemetry.monitoring.config import Config
from moe_telemetry.monitoring.dashboards import build
from moe_telemetry.monitoring.panel_page import rows
from moe_telemetry.monitoring.promql import Q99, QMAX

RUN_SECONDS = 42
SETTLED = 8
"""Seconds at either end of the run that panels over time leave out."""
CONFIG = Config().scaled(60)
WINDOW = "5s"
"""Grafana's $__rate_interval at a scrape interval of 1 s is at least 4 s."""

EMPTY = {
    "Alerts that fire": "a healthy run fires none",
    "Busiest expert's load by layer": "the demo keeps no token counts by expert",
}
"""Panels without data in a healthy demo, and why."""
ABOVE_ONE = {
    "Where wall time goes": "a pass counts when it ends",
    "host time by stage": "a stage counts when it ends",
    "Largest call since the start": "prefill's calls may be larger than the pool",
    "Mean experts per call, of the layer's pool": "prefill's calls may be larger than the pool",
}
"""Of unit percentunit, yet no parts of a whole."""
UNSEEN = {c.LOAD_PEAK: "layer"}
"""What the demo does not export at all, with the label that it would have."""

DASHBOARDS = build(CONFIG)
TARGETS = [
    pytest.param(panel, target, id=f"{dashboard['uid']}-{panel['id']}{target['refId']}")
    for dashboard in DASHBOARDS.values()
    for _, panels in rows(dashboard)
    for panel in panels
    for target in panel["targets"]
]
each_target = pytest.mark.parametrize(("panel", "target"), TARGETS)


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
    """A healthy demo of some 40 s, ended by Ctrl-C, scraped every second until the last count is in."""
    folder = tmp_path_factory.mktemp("live")
    port, file, rule_file = free_port(), folder / "snapshot.json", folder / "rules.yml"
    rule_file.write_text(rules.render(CONFIG), encoding="utf-8")
    options = ["--port", port, "--cache", folder / "cache", "--snapshot", file, "--linger", 20]
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
    known = Known({name: labels for name, labels in series.items() if name not in recorded})
    for metric, label in UNSEEN.items():
        assert metric.prometheus not in known.series
        known.series[metric.prometheus] = {label: set()}
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
        for panel, target in (parameter.values for parameter in TARGETS)
        if panel["title"] == "Decode hit rate"
    }
    assert was in query
    assert ([], True) == (problems(query, run.known), bool(problems(query.replace(was, now), run.known)))


def test_a_renamed_metric_of_the_scrape_is_found(run):
    """Renaming any catalog metric at its source leaves queries without it."""
    queries = [run.fill(target["expr"], instance=".+") for _, target in (parameter.values for parameter in TARGETS)]
    unnoticed = []
    for metric in c.CATALOG:
        gone = {name: labels for name, labels in run.known.series.items() if not name.startswith(metric.prometheus)}
        if not any(problems(query, Known(gone, run.known.free)) for query in queries):
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
            query, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
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


def _exact(snapshot):
    """p99 by nearest rank and maximum of the exact union sizes, by phase and seq label."""
    sizes: dict[tuple[str, str], dict[int, int]] = {}
    for phase, by_seq in snapshot["unions"].items():
        for seq, found in by_seq.items():
            into = sizes.setdefault((phase, c.seq_label(int(seq))), {})
            for counts in found["layers"].values():
                for size, times in counts.items():
                    into[int(size)] = into.get(int(size), 0) + times
    exact = {}
    for key, counts in sizes.items():
        rank, seen = math.ceil(0.99 * sum(counts.values())), 0
        for size in sorted(counts):
            seen += counts[size]
            if seen >= rank:
                exact[key] = (size, max(counts))
                break
    return exact


def _unions(of):
    return f"sum by (phase, seq, le) ({of})"


def test_unions_of_the_run_equal_the_snapshot(run):
    """p99 and max of the whole run, to the integer, for each phase and seq."""
    exact = _exact(run.snapshot)
    bucket = f"{c.UNION.prometheus}_bucket"
    p99 = run.at_the_end(f"ceil(histogram_quantile({Q99}, {_unions(bucket)}))")
    largest = run.at_the_end(f"ceil(histogram_quantile({QMAX}, {_unions(bucket)}))")
    gauge = run.at_the_end(f"max by (phase, seq) ({c.UNION_MAX.prometheus})")
    assert len(exact) > 1
    assert exact == {key: (p99[key], largest[key]) for key in p99} == {key: (p99[key], gauge[key]) for key in gauge}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A telemetry of the test's own, scraped at zero before anything happens and again after all of it has."""
    folder = tmp_path_factory.mktemp("counted")
    recorder = mt.Recorder()
    with (
        mt.start(port=0, recorder=recorder, num_layers=2) as telemetry,
        prometheus(folder, targets=[f"127.0.0.1:{telemetry.port}"]) as server,
    ):
        recorder.pool(0, 8)
        for tokens, phase in ((1, "decode"), (3, "decode"), (4, "prefill"), (48, "prefill")):
            recorder.forward(tokens, phase)
        server.wait(f"{c.UNION.prometheus}_count", 20)
        begin = time.time()
        time.sleep(2.5)
        _blend(recorder)
        unions = random.Random(7)
        for tokens, phase, top in ((1, "decode", 10), (3, "decode", 30), (48, "prefill", 64)):
            recorder.forward(tokens, phase)
            for _ in range(2000):
                recorder.union(1, min(top, 4 + int(unions.expovariate(0.12))))
        time.sleep(2.5)
        seconds = math.ceil(time.time() - begin) + 1
        yield server, telemetry.snapshot(), f"127.0.0.1:{telemetry.port}", f"{seconds}s"


def _blend(recorder):
    """Prefill with 1,843 hits of 6,144, decode with 92,406 of 98,304, and recall the same."""
    for phase, tokens, lookups, hits in (("prefill", 4, 6144, 1843), ("decode", 1, 98304, 92406)):
        recorder.forward(tokens, phase)
        for call in range(lookups // 8):
            there = (call + 1) * 8 * hits // lookups - call * 8 * hits // lookups
            recorder.routed(0, range(8), resident=set(range(there)), predicted=set(range(there)))


def test_unions_over_a_window_equal_the_snapshot(counted):
    """Over a window that begins at the zero samples, rates give the snapshot's p99 and max to the integer."""
    server, snapshot, _, window = counted
    of = _unions(f"rate({c.UNION.prometheus}_bucket[{window}])")
    found = {}
    for q in (Q99, QMAX):
        for series in server.query(f"ceil(histogram_quantile({q}, {of}))"):
            found.setdefault((series["metric"]["phase"], series["metric"]["seq"]), []).append(float(series["value"][1]))
    assert _exact(snapshot) == {key: tuple(values) for key, values in found.items() if not math.isnan(values[0])}


def test_no_panel_shows_the_blend_of_phases(counted):
    """Of 30.0 % and 94.0 %, panels show each, and 90.2 %, which is both together, nowhere."""
    server, _, instance, window = counted
    shown = set()
    for panel, target in (parameter.values for parameter in TARGETS):
        if panel["fieldConfig"]["defaults"]["unit"] != "percentunit":
            continue
        for phase in c.PHASES:
            values = {"job": "moe", "instance": instance, "layer": ".+"}
            values |= {"phase": phase, "outcome": "hit", "source": "demand", "model": ".+"}
            query = fill(target["expr"], rate_interval=window, range=window, **values)
            shown |= {round(float(series["value"][1]), 3) for series in server.query(query)}
    assert {0.300, 0.940} <= shown
    assert not {0.902} & shown
