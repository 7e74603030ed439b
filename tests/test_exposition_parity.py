"""Our endpoint's direct way to samples gives what the SDK's translation of our points gives."""

from __future__ import annotations

import golden_run
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest

import moe_telemetry as mt
from moe_telemetry import recorder as rec

VARYING = {*golden_run.VARYING_VALUES, "moe_telemetry_series", "moe_forward_active_seconds"}


def _families(registry: CollectorRegistry) -> dict[str, tuple[str, str, dict[tuple[str, ...], float]]]:
    """Type, help and samples by family."""
    found = {}
    for family in registry.collect():
        samples = {
            (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
            for sample in family.samples
        }
        if not any(family.name.startswith(name.removesuffix("_total")) for name in VARYING):
            found[family.name] = (family.type, family.documentation, samples)
    return found


def test_both_ways_from_series_to_samples_agree() -> None:
    """An application's own Prometheus reader, which gets OpenTelemetry points, shows what our endpoint shows."""
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=theirs)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    with mt.start(model="m", runtime="r", run="x", port=0, registry=ours, meter_provider=provider):
        golden_run.record(rec)
        theirs_now, ours_now = _families(theirs), _families(ours)
    provider.shutdown()
    ours_now.pop("target", None)
    assert len(theirs_now) > 30
    assert theirs_now == ours_now


def test_comparison_can_fail() -> None:
    """Two different recordings do not compare equal."""
    registry = CollectorRegistry()
    with mt.start(port=0, registry=registry):
        before = _families(registry)
        rec.tokens(1)
        assert before != _families(registry)
    assert b"moe_tokens" not in generate_latest(registry)
