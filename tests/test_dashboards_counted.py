"""The dashboards' queries over counts that the test itself recorded, in a real Prometheus."""

import math
import random
import time
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk")

from conftest import free_port
from dashboards_seen import each_target, exact_unions, queries, targets, titled, variable_query
from prometheus import prometheus
from promql_checks import fill

import moe_telemetry as mt
from moe_telemetry import catalog as c
from moe_telemetry.monitoring.config import Config
from moe_telemetry.monitoring.dashboards import build

DASHBOARDS = build(Config())
COUNTS = {"prefill": (6144, 1843), "decode": (98304, 92406)}
"""Lookups and hits: 30.0 % and 94.0 %, and 90.2 % of both together."""


def _there(lookups, hits):
    """Hits of each call of 8 experts, spread evenly."""
    return [(call + 1) * 8 * hits // lookups - call * 8 * hits // lookups for call in range(lookups // 8)]


BY_PREFETCH = {phase: sum(there > 0 for there in _there(*counts)) for phase, counts in COUNTS.items()}
ALL_HIT = {phase: _there(*counts).count(8) / (counts[0] // 8) for phase, counts in COUNTS.items()}


TRUE_ZEROS = {
    "Firing alerts": "there are no rules",
    "Forward pass in progress": "none is",
    "lookups by outcome": "lookups are recorded, and none had that outcome",
    "Share of outcome": "the same; its description says which outcomes need what",
    "Read latency": "a heatmap draws no count of 0",
    "layer calls with every expert resident": "no call had",
    "MLX memory": "of a process that has loaded MLX, and no arrays",
    "Records dropped by reason": "telemetry's own",
    "Hook errors": "telemetry's own",
}
"""Panels that may read 0 for a runtime that calls few hooks, and why: it is so."""


@dataclass
class Counted:
    """Two telemetries of the test's own, the first scraped at zero and again after all of its events, and bare
    ones that call few hooks."""

    server: Any
    instances: list[str]
    bare: list[str]
    snapshot: dict[str, Any]
    window: str
    now: float

    def query(self, promql: str, **chosen: str) -> list[dict[str, Any]]:
        """An instant query behind the last event, whose window reaches to before the first."""
        values = {"job": "moe", "instance": self.instances[0], "layer": ".+", "model": ".+", "phase": "decode"}
        values |= {"outcome": "hit", "source": "demand"} | chosen
        filled = fill(promql, rate_interval=self.window, range=self.window, **values)
        return self.server.api("query", query=filled, time=str(self.now))["result"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Counts that nothing disturbs: what a window shows is exactly what was recorded."""
    recorder, other, few, more = (mt.Recorder() for _ in range(4))
    with (
        mt.start(port=0, recorder=recorder, num_layers=2) as telemetry,
        mt.start(port=0, recorder=other, num_layers=2) as beside,
        mt.start(port=0, recorder=few, num_layers=2) as bare,
        mt.start(port=0, recorder=more, num_layers=2) as less_bare,
    ):
        instances = [f"127.0.0.1:{started.port}" for started in (telemetry, beside, bare, less_bare)]
        with prometheus(tmp_path_factory.mktemp("counted"), targets=instances) as server:
            _few(few)
            _more(more)
            for each in (recorder, other):
                each.pool(0, 8)
                for tokens, phase in ((1, "decode"), (3, "decode"), (4, "prefill"), (48, "prefill")):
                    each.forward(tokens, phase)
            server.wait(f"count({c.UNION.prometheus}_count) == 12")
            begin = time.time()
            time.sleep(1.5)
            _blend(recorder)
            _work(recorder)
            _unions(recorder)
            _unions(other)
            _few(few)
            _more(more)
            time.sleep(2.5)
            now = time.time()
            yield Counted(
                server, instances[:2], instances[2:], telemetry.snapshot(), f"{math.ceil(now - begin) + 1}s", now
            )


def _work(recorder):
    """Ten tokens of decode in half a second and forty of prefill in two, with what each took."""
    for phase, tokens, passes in (("decode", 1, 10), ("prefill", 4, 10)):
        recorder.pool(0, 8, 6)
        for _ in range(passes):
            recorder.forward(tokens, phase)
            recorder.prefetch("promote", 0.004)
            recorder.promote("place", 0.003)
            recorder.block("fetch", 0.02 * tokens)
            recorder.block_call()
            recorder.stall(0.01 * tokens)
            recorder.placed(3 * tokens)
            recorder.degraded("cpu", tokens)
            recorder.tokens(tokens, phase)
            recorder.forward_done(0.05 * tokens)
    recorder.speculation(proposed=8, accepted=6)


def _unions(recorder):
    sizes = random.Random(7)
    for tokens, phase, top in ((1, "decode", 10), (3, "decode", 30), (48, "prefill", 64)):
        recorder.forward(tokens, phase)
        for _ in range(2000):
            recorder.union(1, min(top, 4 + int(sizes.expovariate(0.12))))


def _blend(recorder):
    """What is resident is what was predicted; a prefetch brought the first of it, the rest is reuse."""
    for phase, (lookups, hits) in COUNTS.items():
        recorder.forward({"decode": 1, "prefill": 4}[phase], phase)
        for there in _there(lookups, hits):
            resident = set(range(there))
            recorder.routed(0, range(8), resident=resident, predicted=resident, ready=resident & {0})


def _few(recorder):
    """A runtime that says what it routes and how long a pass takes, and nothing else."""
    for tokens, phase in ((1, "decode"), (4, "prefill")):
        recorder.forward(tokens, phase)
        for layer in range(2):
            recorder.routed(layer, range(8), resident=set(range(7)))
        recorder.forward_done(0.05)


def _more(recorder):
    """One that counts tokens, predicts and promotes too, but says neither what is ready nor what it waits for."""
    for tokens, phase in ((1, "decode"), (4, "prefill")):
        recorder.forward(tokens, phase)
        for stage in ("predict", "submit", "promote"):
            recorder.prefetch(stage, 0.001)
        for layer in range(2):
            recorder.routed(layer, range(8), resident=set(range(7)), predicted=set(range(9)))
        recorder.tokens(tokens, phase)
        recorder.forward_done(0.05)


def test_unions_over_a_window_equal_the_snapshot(counted):
    """Over a window that begins at the zero samples, the panels' p99 and max are the snapshot's to the integer."""
    found = {}
    for phase in c.PHASES:
        asked = queries(DASHBOARDS, f"{phase.capitalize()}: experts per layer call by seq")
        for which in ("p99", "max"):
            for series in counted.query(asked[which]):
                key = phase, series["metric"]["seq"]
                found.setdefault(key, []).append(float(series["value"][1]))
    assert exact_unions(counted.snapshot) == {key: tuple(values) for key, values in found.items()}


def test_no_panel_shows_the_blend_of_phases(counted):
    """Of 30.0 % and 94.0 %, panels show each, and 90.2 %, which is both together, nowhere."""
    shown = set()
    for panel, target in targets(DASHBOARDS):
        if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
            for phase in c.PHASES:
                shown |= {round(float(series["value"][1]), 3) for series in counted.query(target["expr"], phase=phase)}
    assert {0.300, 0.940} <= shown
    assert not {0.902} & shown


@each_target(DASHBOARDS)
def test_instances_do_not_mix(counted, panel, target):
    """With both instances chosen, each has the figures that it has when it is chosen alone."""
    if panel["type"] == "heatmap" or "$instance" not in target["expr"]:
        return
    alone = [series for chosen in counted.instances for series in counted.query(target["expr"], instance=chosen)]
    both = counted.query(target["expr"], instance="|".join(counted.instances))
    assert _sorted(alone) == _sorted(both)


@each_target(DASHBOARDS)
@pytest.mark.parametrize("which", [0, 1], ids=["few", "more"])
def test_nothing_reads_0_that_was_never_recorded(counted, panel, target, which):
    """A runtime that calls few hooks sees no share, speed or rate of 0 for what the others would have told."""
    for outcome in ("hit", "miss_unpredicted"):
        for phase in c.PHASES:
            found = counted.query(target["expr"], instance=counted.bare[which], phase=phase, outcome=outcome)
            values = {_said(target, series): float(series["value"][1]) for series in found}
            zeros = [said for said, value in values.items() if value == 0]
            assert not zeros or any(title in panel["title"] for title in TRUE_ZEROS), zeros


def _said(target, series):
    return fill(target["legendFormat"].replace("{{", "$").replace("}}", ""), **series["metric"])


def _sorted(found):
    return sorted((sorted(series["metric"].items()), series["value"][1]) for series in found)


@pytest.mark.parametrize(
    ("title", "legend", "decode", "prefill"),
    [
        ("tok/s while active", "active", 20, 20),
        ("hit rate", "hit", 92406 / 98304, 1843 / 6144),
        ("predictor recall", "recall", 92406 / 98304, 1843 / 6144),
        ("recall and precision", "precision", 1, 1),
        ("stall per token", "stall", 0.01, 0.01),
        ("stall share of forward time", "stall", 0.2, 0.2),
        ("mean per stage", "promote", 0.004, 0.004),
        ("promote by step, per promote", "place", 0.003, 0.003),
        ("placed experts per token", "placed", 3, 3),
        ("MoE block by segment, per token", "fetch", 0.02, 0.02),
        ("MoE block calls per token", "calls", 1, 0.25),
        ("experts served otherwise, share", "cpu", 10 / 98304, 40 / 6144),
        ("lookups by outcome, share", "miss_unpredicted", 1 - 92406 / 98304, 1 - 1843 / 6144),
        (
            "hits by reuse and by prefetch",
            "reuse",
            (92406 - BY_PREFETCH["decode"]) / 98304,
            (1843 - BY_PREFETCH["prefill"]) / 6144,
        ),
        ("hits by reuse and by prefetch", "prefetch", BY_PREFETCH["decode"] / 98304, BY_PREFETCH["prefill"] / 6144),
        ("layer calls with every expert resident", "all", ALL_HIT["decode"], ALL_HIT["prefill"]),
    ],
)
def test_panel_shows_what_was_recorded(counted, title, legend, decode, prefill):
    """The formula of each ratio, by figures that were recorded: each phase its own."""
    for phase, expected in (("decode", decode), ("prefill", prefill)):
        panel = titled(DASHBOARDS, f"{phase.capitalize()}: {title}")
        shown = [
            float(series["value"][1])
            for target in panel["targets"]
            for series in counted.query(target["expr"])
            if _said(target, series).split()[0] == legend
        ]
        assert [pytest.approx(expected)] == shown


def test_an_unreachable_target_is_shown(tmp_path):
    """Before any scrape has succeeded the job is a choice, the target is down and no alert fires."""
    (job,) = [entry for entry in DASHBOARDS["moe-overview.json"]["templating"]["list"] if entry["name"] == "job"]
    query, label = variable_query(job)
    with prometheus(tmp_path, targets=[f"127.0.0.1:{free_port()}"]) as server:
        server.wait("up == 0")
        assert ["moe"] == [series["metric"][label] for series in server.query(fill(query, range="1h"))]
        for title, value in (("Up", "0"), ("Firing alerts", "0")):
            (shown,) = queries(DASHBOARDS, title).values()
            assert [value] == [series["value"][1] for series in server.query(fill(shown, job="moe"))]


def test_accepted_drafts_are_a_share_of_those_proposed(counted):
    """Six of eight."""
    (series,) = counted.query(queries(DASHBOARDS, "Speculation: drafts accepted")["accepted"])
    assert 0.75 == pytest.approx(float(series["value"][1]))
