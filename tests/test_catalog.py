"""The table of metrics: names, bounds and labels as they are scraped."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise

import pytest

from moe_telemetry import catalog, hooks
from moe_telemetry.catalog import BY_NAME, CATALOG, Kind

HISTOGRAMS = [metric for metric in CATALOG if metric.kind is Kind.HISTOGRAM]


def test_names_are_unique():
    """No two metrics share an OpenTelemetry or a Prometheus name."""
    assert len(CATALOG) == len(BY_NAME) == len({metric.prometheus for metric in CATALOG})


def test_every_metric_is_in_the_table():
    """The table holds each Metric of the module, in the order of their definition."""
    assert [v for v in vars(catalog).values() if isinstance(v, catalog.Metric)] == list(CATALOG)
    assert [metric for metric in CATALOG if metric.kind is Kind.COUNTER] == list(catalog.counters())


@pytest.mark.parametrize(
    ("count", "top", "bounds"),
    [
        (24, 8.388608, catalog.HOST_BOUNDS),
        (22, 20.97152, catalog.READ_BOUNDS),
        (39, 131.072, catalog.FORWARD_BOUNDS),
        (70, 512.0, catalog.UNION_BOUNDS),
        (22, 640.0, catalog.TTFT_BOUNDS),
        (16, 20.0, catalog.TPOT_BOUNDS),
        (21, 10485.76, catalog.REQUEST_BOUNDS),
    ],
)
def test_bounds_are_those_that_were_measured(count, top, bounds):
    """Each set of bounds has the designed number of buckets and reaches the designed top."""
    assert (count, pytest.approx(top, rel=1e-12)) == (len(bounds), bounds[-1])


@pytest.mark.parametrize("metric", HISTOGRAMS, ids=lambda metric: metric.name)
def test_bounds_are_ascending_floats(metric):
    """An int among the bounds would change how the exporter writes `le`."""
    assert {float} == {type(bound) for bound in metric.bounds}
    assert sorted(set(metric.bounds)) == list(metric.bounds)


def test_only_histograms_have_bounds():
    """A counter or gauge has no buckets, and no histogram is without."""
    assert {metric.name for metric in HISTOGRAMS} == {metric.name for metric in CATALOG if metric.bounds}


def test_forwards_of_eight_and_fifteen_tokens_a_second_are_told_apart():
    """Around a decode step's usual duration the buckets are the fourth root of two apart."""
    fine = [bound for bound in catalog.FORWARD_BOUNDS if 0.016 <= bound <= 2.0]
    assert 29 == len(fine)
    assert all(1.16 < above / below < 1.20 for below, above in pairwise(fine))


@pytest.mark.parametrize(
    ("prometheus", "name"),
    [
        ("moe_expert_lookups_total", "moe.expert.lookups"),
        ("moe_layer_calls_total", "moe.layer.calls"),
        ("moe_expert_union", "moe.expert.union"),
        ("moe_layer_union_max", "moe.layer.union.max"),
        ("moe_pool_capacity", "moe.pool.capacity"),
        ("moe_tokens_total", "moe.tokens"),
        ("moe_expert_read_bytes_total", "moe.expert.read"),
        ("moe_expert_read_duration_seconds", "moe.expert.read.duration"),
        ("moe_prefetch_wasted_bytes_total", "moe.prefetch.wasted"),
        ("mlx_memory_bytes", "mlx.memory"),
        ("moe_run_info", "moe.run.info"),
        ("moe_run_start_time_seconds", "moe.run.start.time"),
        ("moe_forward_active_seconds", "moe.forward.active"),
        ("process_cpu_time_seconds_total", "process.cpu.time"),
        ("gen_ai_server_time_to_first_token_seconds", "gen_ai.server.time_to_first_token"),
        ("moe_telemetry_dropped_total", "moe.telemetry.dropped"),
    ],
)
def test_prometheus_names_follow_the_exporter(prometheus, name):
    """Dots become underscores, then the unit, then `_total` behind counters."""
    assert prometheus == BY_NAME[name].prometheus


@pytest.mark.parametrize(
    ("label", "tokens"),
    [("1", 1), ("16", 16), ("32", 17), ("32", 32), ("64", 33), ("4096", 2049), ("4096", 4096), ("4096+", 4097)],
)
def test_seq_is_exact_and_then_a_power_of_two(label, tokens):
    """Sequence lengths to 16 have a value each, later ones share the next power of two, to 4096."""
    assert label == catalog.seq_label(tokens)


def test_seq_has_a_closed_set_of_values():
    """Whatever the length, its label is one of 25 values."""
    assert set(catalog.SEQ_VALUES) == {catalog.seq_label(tokens) for tokens in range(1, 5000)}
    assert 25 == len(catalog.SEQ_VALUES)


def test_no_unit_is_1():
    """The Python exporter and the Go collector name a gauge of unit 1 differently."""
    assert [] == [metric.name for metric in CATALOG if metric.unit not in ("s", "By") and metric.unit[0] != "{"]


def test_label_keys_are_valid():
    """Keys are Prometheus label names once dots are underscores, none is reserved, none occurs twice in a metric."""
    for metric in CATALOG:
        keys = [label.prometheus for label in metric.labels]
        assert len(keys) == len(set(keys))
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", key) for key in keys)
        assert set() == {"le", "quantile", "job", "instance"} & set(keys)


def test_only_known_labels_are_open():
    """Every label but these has a closed set of values, so that the number of series is bounded."""
    known = {"layer", "model", "run", "runtime", "version"}
    known |= {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"}
    assert known == {label.key for metric in CATALOG for label in metric.labels if not label.values}


def test_histograms_carry_no_layer():
    """A histogram by layer would multiply its buckets by the layers."""
    assert [] == [metric.name for metric in HISTOGRAMS if "layer" in metric.keys]


def test_a_label_is_found_by_its_key():
    """`Metric.label` gives the label of a key, and a KeyError for one the metric does not have."""
    assert catalog.OUTCOMES == catalog.LOOKUPS.label("outcome").values
    with pytest.raises(KeyError):
        catalog.LOOKUPS.label("seq")


def test_every_metric_has_one_sentence_of_help():
    """Help is not empty, ends with a full stop and has no line break, which a scrape would have to escape."""
    assert [] == [m.name for m in CATALOG if not m.help.endswith(".") or "\n" in m.help or "\\" in m.help]


def test_the_catalog_is_a_leaf():
    """It imports the standard library only, so that everything may import it."""
    tree = ast.parse(inspect.getsource(catalog))
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {name for node in nodes for name in ([node.module] if isinstance(node, ast.ImportFrom) else [])}
    assert {"__future__", "collections.abc", "dataclasses", "enum"} == imported
    assert all(isinstance(node, ast.ImportFrom) and node.level == 0 for node in nodes)


def test_the_label_hook_is_closed():
    """Its values are the recorder's hooks."""
    assert hooks.HOOKS == catalog.HOOK_ERRORS.label("hook").values
