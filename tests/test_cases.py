"""The situations of docs/cases.md: each has tests that exist; those that no other module has are here."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import samples, scrape
from monitoring.scenarios import SCENARIOS
from opentelemetry.sdk.metrics import MeterProvider
from prometheus import prometheus

from moe_telemetry import catalog
from moe_telemetry.monitoring.config import Config
from moe_telemetry.monitoring.recording import rules

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
CASES = {
    row.group(1): re.findall(r"`(test_\w+\.py)::(test_\w+)(?:\[([^`]+)\])?`", row.group(0))
    for row in re.finditer(r"^\| (C\d\d) \|.*$", TABLE, re.MULTILINE)
}


# -- the table ----------------------------------------------------------------------------------------------------


def test_the_table_has_every_case() -> None:
    """C01 to C26, each once."""
    assert [f"C{number:02}" for number in range(1, 27)] == re.findall(r"^\| (C\d\d) \|", TABLE, re.MULTILINE)


@pytest.mark.parametrize("case", CASES)
def test_every_test_of_a_case_exists(case: str) -> None:
    """A test that is renamed or removed is missed here; of a scenario the name is looked up, too."""
    assert CASES[case]
    for file, name, parameter in CASES[case]:
        defined = {node.name for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")))
                   if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert name in defined, f"{file}::{name}"
        assert not parameter or parameter in SCENARIOS
    own = re.compile(rf"test_{case.lower()}_")
    here = {name for name in globals() if own.match(name)}
    assert here <= {name for _, name, _ in CASES[case]}


# -- those that no other module has -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_PROMETHEUS_PORT", "abc"),
        ("OTEL_EXPORTER_PROMETHEUS_PORT", "99999"),
        ("OTEL_EXPORTER_PROMETHEUS_HOST", "no such host"),
        ("MOE_TELEMETRY_LAYERS", "some"),
        ("MOE_TELEMETRY_DECODE_SEQ_MAX", "0"),
        ("MOE_TELEMETRY_SNAPSHOT_FILE", "/no/such/folder/file"),
    ],
)
def test_c05_a_bad_value_of_each_variable_is_one_line(variable: str, value: str, start, monkeypatch) -> None:
    """start() fails with one sentence and nothing else, and works again without the variable."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=re.escape(value)) as raised:
        start(port=None if variable.endswith("PORT") else 0)
    assert "\n" not in str(raised.value)
    monkeypatch.delenv(variable)
    assert scrape(start())


NAME = re.compile(r"\b(?:moe|gen_ai)_[a-z0-9_]+|\b(?:moe|gen_ai)(?:\.[a-z_]+)+")
"""What looks like a metric in a page: as scraped, or OpenTelemetry's."""
NO_METRICS = ("moe_telemetry", "moe_intermediate_size", "moe.yml")


def test_c08_pages_use_names_that_are_scraped() -> None:
    """Each metric that a page names is in the catalog, by either name, or is recorded by a rule."""
    known = {name for metric in catalog.CATALOG for name in (metric.name, metric.prometheus)}
    known |= {metric.prometheus + end for metric in catalog.CATALOG for end in ("_bucket", "_count", "_sum")}
    known |= {label.prometheus for metric in catalog.CATALOG for label in metric.labels}
    known |= {metric.name.rpartition(".")[0] for metric in catalog.CATALOG}  # moe.pool.*
    recorded = {str(rule["record"]) for rule in rules(Config())}
    named = [
        (page.name, found)
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for found in sorted(set(NAME.findall(page.read_text(encoding="utf-8"))))
    ]
    assert 100 < len(named)
    assert [] == [
        (page, name)
        for page, name in named
        if name not in known and not any(name in each for each in recorded) and not name.startswith(NO_METRICS)
    ]


def test_c09_promtool_accepts_a_clash(start, recorder) -> None:
    """An application's counter of one of our names: one HELP and TYPE, and promtool has no complaint."""
    provider = MeterProvider()
    counter = provider.get_meter("application").create_counter("moe.tokens", description="Tokens of the application.")
    telemetry = start(meter_provider=provider, port=0)
    counter.add(3)
    recorder.tokens(5)
    scrape(telemetry)
    text = scrape(telemetry)  # the first one has found the clash
    assert 1 == text.count("# TYPE moe_tokens_total counter")
    assert 1 == samples(text)["moe_telemetry_dropped_total", (("reason", "name_taken"),)]
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (0, "") == (checked.returncode, checked.stderr)


def test_c18_slow_reads_are_not_all_in_the_top_bucket(start, recorder, tmp_path: Path) -> None:
    """A hundred reads of 3.2 s: the p99 of a real Prometheus lies in the bucket around it, far below the top."""
    telemetry = start()
    with prometheus(tmp_path, targets=[f"127.0.0.1:{telemetry.port}"], interval="250ms") as server:
        server.wait("moe_expert_read_duration_seconds_count == 0")
        for _ in range(100):
            recorder.read("demand", 1 << 20, 3.2)
        buckets = 'moe_expert_read_duration_seconds_bucket{phase="decode",source="demand"}'
        server.wait(f'{buckets.replace("}", "")},le="+Inf"}} == 100')
        p99 = server.value(f"histogram_quantile(0.9899999, {buckets})")
    below = max(bound for bound in catalog.READ_BOUNDS if bound < 3.2)
    above = min(bound for bound in catalog.READ_BOUNDS if bound >= 3.2)
    assert below < p99 <= above
    assert above < catalog.READ_BOUNDS[-1] / 2


def test_c21_the_cache_is_a_gauge_of_its_own(start) -> None:
    """Arrays in use, the cache behind them and the peak are told apart, and clearing empties the cache."""
    telemetry = start()

    def gauge(name: str, **labels: str) -> float:
        return samples(scrape(telemetry))[name, tuple(labels.items())]

    large = mx.zeros((16 << 20,), dtype=mx.uint8)
    mx.eval(large)
    active = gauge("mlx_memory_bytes", kind="active")
    assert 16 << 20 <= active
    del large
    freed, cache = gauge("mlx_memory_bytes", kind="active"), gauge("mlx_memory_bytes", kind="cache")
    assert active - (16 << 20) >= freed
    assert 16 << 20 <= cache
    assert active <= gauge("mlx_memory_peak_bytes")
    mx.clear_cache()
    assert 0 == gauge("mlx_memory_bytes", kind="cache")
    assert "Not the process' resident memory" in catalog.MLX_MEMORY.help


@pytest.mark.parametrize("uid", [Config().datasource_uid, "abc123"], ids=["provisioned", "by hand"])
@pytest.mark.parametrize("path", sorted((ROOT / "dashboards" / "grafana").glob("*.json")), ids=lambda path: path.stem)
def test_c22_every_panel_finds_its_datasource_both_ways(path: Path, uid: str) -> None:
    """With Grafana's one Prometheus of that uid chosen for the variable, each reference is to it, and none is left."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    (variable,) = [each for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
    assert "prometheus" == variable["query"]
    # What a variable of data sources becomes: the current value where there is such a source, else the first.
    chosen = variable["current"]["value"] if variable.get("current", {}).get("value") == uid else uid
    references = list(_references(dashboard))
    resolved = {
        (each.get("type"), re.sub(r"\$\{" + variable["name"] + r"\}", chosen, each["uid"])) for each in references
    }
    assert len(dashboard["panels"]) <= len(references)
    assert {("prometheus", uid)} == resolved - {("grafana", "-- Grafana --"), ("datasource", "grafana")}


def _references(node: Any):
    if isinstance(node, dict):
        if isinstance(node.get("datasource"), dict):
            yield node["datasource"]
        for part in node.values():
            yield from _references(part)
    elif isinstance(node, list):
        for part in node:
            yield from _references(part)
