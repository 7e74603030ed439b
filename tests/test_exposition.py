"""The scrape as a whole: against a golden text, promtool, the OpenMetrics parser and the catalog."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import golden_run
import pytest
from conftest import samples, scrape
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from moe_telemetry.catalog import CATALOG, Kind

GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"
FULL_SCRAPE_LINES = 2_600
FOREIGN = {"target_info"}
"""Families of a scrape that are not the catalog's."""


@pytest.fixture(scope="module")
def text() -> str:
    return golden_run.scraped("text")


@pytest.fixture(scope="module")
def openmetrics() -> str:
    return golden_run.scraped("openmetrics")


def promtool(text: str) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed")
    return subprocess.run([binary, "check", "metrics"], input=text, text=True, capture_output=True, check=False)


def test_scrape_is_the_golden_text(text: str, request: pytest.FixtureRequest) -> None:
    """The golden run is scraped as the committed text, sample by sample."""
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text


def test_promtool_has_no_complaint(text: str) -> None:
    """`promtool check metrics` accepts the golden scrape without a word."""
    checked = promtool(text)
    assert (0, "", "") == (checked.returncode, checked.stdout, checked.stderr)


def test_promtool_would_complain() -> None:
    """The check above can fail: promtool refuses a second TYPE line."""
    assert 0 != promtool("# TYPE a gauge\na 1\n# TYPE a gauge\na 2\n").returncode


def test_openmetrics_is_read_by_the_reference_parser(text: str, openmetrics: str) -> None:
    """OpenMetrics ends with EOF and holds, for prometheus_client's own parser, the samples of the text format."""
    assert openmetrics.endswith("\n# EOF\n")
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in openmetrics_families(openmetrics)
        for sample in family.samples
    }
    assert samples(text) == found


def test_every_metric_of_the_catalog_is_there(text: str) -> None:
    """The golden run reaches every metric, and nothing but the target's metadata is not the catalog's."""
    declared = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert {metric.prometheus for metric in CATALOG} | FOREIGN == declared


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
def test_names_kinds_labels_and_help_are_the_catalogs(metric, text: str) -> None:
    """Each metric has the kind, the help and exactly the label keys that the catalog says."""
    assert f"# TYPE {metric.prometheus} {metric.kind.value}\n" in text
    assert f"# HELP {metric.prometheus} {metric.help}\n" in text
    suffixes = {"_bucket": {"le"}, "_count": set(), "_sum": set()} if metric.kind is Kind.HISTOGRAM else {"": set()}
    for suffix, extra in suffixes.items():
        lines = re.findall(rf"^{metric.prometheus}{suffix}(?:{{(.*)}})? ", text, re.MULTILINE)
        assert lines, f"no sample of {metric.name}{suffix}"
        wanted = {label.prometheus for label in metric.labels} | extra
        assert [wanted] * len(lines) == [set(re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', line)) for line in lines]


@pytest.mark.parametrize("metric", [metric for metric in CATALOG if metric.bounds], ids=lambda metric: metric.name)
def test_bounds_are_the_catalogs(metric, text: str) -> None:
    """Each histogram has the catalog's bounds, as floats, and +Inf."""
    found = re.findall(rf'^{metric.prometheus}_bucket{{.*?le="([^"]+)"', text, re.MULTILINE)
    assert {*metric.bounds, float("inf")} == {float(bound) for bound in found}
    assert all("." in bound or "e" in bound or bound == "+Inf" for bound in found)


def test_units_are_the_catalogs(openmetrics: str) -> None:
    """OpenMetrics' UNIT lines name seconds and bytes where the catalog does, and nothing else."""
    wanted = {
        metric.prometheus.removesuffix("_total"): {"s": "seconds", "By": "bytes"}[metric.unit]
        for metric in CATALOG
        if metric.unit in ("s", "By")
    }
    assert wanted == dict(re.findall(r"^# UNIT (\S+) (\S+)", openmetrics, re.MULTILINE))


def test_label_values_are_in_their_closed_sets(text: str) -> None:
    """No label of a closed set shows a value that the catalog does not list."""
    closed = {
        (metric.prometheus, label.prometheus): set(label.values)
        for metric in CATALOG
        for label in metric.labels
        if label.values
    }
    for name, labels in samples(text):
        for key, value in labels:
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            assert value in closed.get((family, key), {value}), f"{name} {key}={value}"


def test_a_full_scrape_is_bounded(start, recorder) -> None:
    """Twelve layers with everything recorded in both phases and three lengths stay under the line budget."""
    telemetry = start(num_layers=12)
    for phase in ("prefill", "decode"):
        for tokens in (1, 3, 4):
            recorder.forward(tokens, phase=phase)
            for layer in range(12):
                recorder.pool(layer, capacity=8, resident=8)
                recorder.routed(layer, {1, 2, 3}, resident={1}, predicted={2}, ready={2})
                recorder.evicted(layer)
            recorder.forward_done(0.1)
    lines = scrape(telemetry).splitlines()
    assert FULL_SCRAPE_LINES > len(lines)
    assert 1_500 < len(lines), "the scrape is not the full one"


def test_a_scrape_before_any_event_has_no_ratio_and_no_nan(start) -> None:
    """Right after start counters stand at 0, gauges without a value are absent, and nothing is NaN."""
    text = scrape(start(num_layers=2))
    assert "NaN" not in text
    assert 'moe_layer_calls_total{layer="1",phase="decode",residency="partial"} 0.0\n' in text
    assert 'moe_forward_duration_seconds_count{phase="decode",seq="1"} 0.0\n' in text
    for absent in ("moe_pool_capacity", "moe_expert_lookups", "moe_predictor", "moe_forward_active", "_ratio"):
        assert absent not in text
