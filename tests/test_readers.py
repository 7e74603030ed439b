"""An application's provider and ours: whose figures come out where, deltas, name clashes, and what stop() leaves."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import suppress
from http.client import HTTPException
from typing import Any

import pytest
from conftest import free_port, scrape, total
from opentelemetry import metrics as api
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider, ObservableCounter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.view import DropAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, Info, generate_latest

import moe_telemetry as mt
from moe_telemetry.catalog import BY_NAME, Kind
from moe_telemetry.providers import EXPORT_SECONDS

DELTA = {
    Counter: AggregationTemporality.DELTA,
    ObservableCounter: AggregationTemporality.DELTA,
    Histogram: AggregationTemporality.DELTA,
}


class Kept(MetricExporter):
    """Keeps what it is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batches: list[Any] = []

    def export(self, metrics_data: Any, timeout_millis: float = 10_000, **_: Any) -> MetricExportResult:
        self.batches.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
        pass


def by_name(data: Any) -> dict[str, Any]:
    """Metrics of one collection by name; fails when a name stands twice."""
    found: dict[str, Any] = {}
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                assert metric.name not in found, f"{metric.name} twice"
                found[metric.name] = metric
    return found


def value(data: Any, name: str, **labels: str) -> float:
    points = by_name(data)[name].data.data_points
    return sum(point.value for point in points if labels.items() <= dict(point.attributes).items())


def promtool(text: str) -> None:
    """Fails on what Prometheus could not read, and on a complaint about a name of ours."""
    if binary := shutil.which("promtool"):
        checked = subprocess.run([binary, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
        foreign = re.findall(r"^# HELP (\S+) The application's", text, re.MULTILINE)
        assert [] == [line for line in checked.stderr.splitlines() if line.split(" ")[0] not in foreign]


# -- whose figures come out where -----------------------------------------------------------------------------


def test_the_applications_instruments_come_out_of_our_endpoint(start, recorder) -> None:
    """On meter_provider= our endpoint shows the application's counters next to ours."""
    provider = MeterProvider()
    requests = provider.get_meter("app").create_counter("app.requests", "{request}", "Requests.")
    telemetry = start(meter_provider=provider, port=0)
    requests.add(3, {"route": "/x"})
    recorder.tokens(4)
    text = scrape(telemetry)
    assert 3 == total(text, "app_requests_total", route="/x")
    assert 4 == total(text, "moe_tokens_total")
    promtool(text)


def test_a_late_reader_sees_synchronous_instruments_from_then_on(start) -> None:
    """What the application counted before start() is not in our endpoint: 5 before and 5 after show 5."""
    provider = MeterProvider([InMemoryMetricReader()])
    requests = provider.get_meter("app").create_counter("app.requests")
    requests.add(5)
    telemetry = start(meter_provider=provider, port=0)
    requests.add(5)
    assert 5 == total(scrape(telemetry), "app_requests_total")


def test_observable_instruments_are_whole_in_a_late_reader(start) -> None:
    """An observable instrument shows its value whenever our reader came."""
    provider = MeterProvider()
    provider.get_meter("app").create_observable_counter("app.total", [lambda _: [api.Observation(42)]])
    assert 42 == total(scrape(start(meter_provider=provider, port=0)), "app_total")


def test_our_points_come_out_of_the_applications_readers(start, recorder) -> None:
    """In-memory, periodic and Prometheus readers of the application all show our figures, equal to the snapshot."""
    memory, exporter, registry = InMemoryMetricReader(), Kept(), CollectorRegistry()
    periodic = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    provider = MeterProvider([memory, periodic, PrometheusMetricReader(registry=registry)])
    telemetry = start(meter_provider=provider, num_layers=2)
    recorder.forward(1)
    recorder.routed(1, {1, 2, 3}, resident={1})
    recorder.forward_done(0.25)
    periodic.force_flush()
    for data in (memory.get_metrics_data(), exporter.batches[-1]):
        assert 2 == value(data, "moe.expert.lookups", layer="1", outcome="miss_unpredicted")
        (point,) = [
            each
            for each in by_name(data)["moe.forward.duration"].data.data_points
            if {"phase": "decode", "seq": "1"} == dict(each.attributes)
        ]
        assert (1, 0.25) == (point.count, point.sum)
        assert telemetry.snapshot()["metrics"].keys() == by_name(data).keys()
    text = generate_latest(registry).decode()
    assert 2 == total(text, "moe_expert_lookups_total", layer="1", outcome="miss_unpredicted")
    promtool(text)
    provider.shutdown()


def test_the_final_export_of_the_application_has_our_points(start, recorder) -> None:
    """provider.shutdown() while telemetry runs exports our last figures through the application's reader."""
    exporter = Kept()
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)])
    telemetry = start(meter_provider=provider, port=0)
    recorder.tokens(9)
    provider.shutdown()
    assert 9 == value(exporter.batches[-1], "moe.tokens")
    recorder.tokens(1)
    assert 10 == total(scrape(telemetry), "moe_tokens_total")


def test_a_provider_without_readers(start, recorder) -> None:
    """A provider nobody reads yet gets our endpoint, and process figures are left to the application."""
    telemetry = start(meter_provider=MeterProvider(), port=0)
    text = scrape(telemetry)
    assert "moe_run_info" in text
    assert "process_memory_usage" not in text
    assert "process.memory.usage" not in telemetry.snapshot()["metrics"]


def test_the_global_provider_is_left_alone(start) -> None:
    """start() never sets the process' provider."""
    before = api.get_meter_provider()
    start()
    assert before is api.get_meter_provider()


# -- one endpoint, one OTLP reader ----------------------------------------------------------------------------


def test_no_second_endpoint_next_to_the_applications(start, recorder) -> None:
    """Where the application serves Prometheus, nothing listens for us, and its registry shows our figures."""
    registry = CollectorRegistry()
    provider = MeterProvider([PrometheusMetricReader(registry=registry)])
    telemetry = start(meter_provider=provider)
    recorder.tokens(6)
    assert (None, None) == (telemetry.url, telemetry.port)
    assert 6 == total(generate_latest(registry).decode(), "moe_tokens_total")
    telemetry.stop(linger=30)


@pytest.mark.parametrize("options", [{"port": 0}, {"host": "127.0.0.1", "port": 0}])
def test_a_second_endpoint_where_one_is_asked_for(options: dict[str, Any], start) -> None:
    """With port or host given there is an endpoint all the same."""
    provider = MeterProvider([PrometheusMetricReader(registry=CollectorRegistry())])
    assert "moe_run_info" in scrape(start(meter_provider=provider, **options))


def test_the_environment_adds_no_second_otlp_reader(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_METRICS_EXPORTER=otlp is the application's affair on its own provider; otlp=True is ours."""
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    provider = MeterProvider([InMemoryMetricReader()])
    assert ["PrometheusReader"] == [type(each).__name__ for each in start(meter_provider=provider, port=0)._readers]


# -- delta ----------------------------------------------------------------------------------------------------


def test_a_delta_exporter_gets_true_deltas(start, recorder) -> None:
    """Deltas of counters and histograms add up to the totals, each from where the last one ended."""
    exporter = Kept(preferred_temporality=DELTA)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    provider = MeterProvider([reader])
    before = time.time_ns()
    telemetry = start(meter_provider=provider, num_layers=2, port=0)
    for size in (1, 0, 2, 3):
        for _ in range(size):
            recorder.forward(1)
            recorder.routed(1, {1, 2, 3}, resident={1})
            recorder.forward_done(0.25)
            recorder.tokens(5)
        reader.force_flush()
    provider.shutdown()
    sums: dict[Any, float] = defaultdict(float)
    buckets: dict[Any, list[int]] = {}
    last_end = defaultdict(int)
    for batch in exporter.batches:
        for name, metric in by_name(batch).items():
            if BY_NAME[name].kind is Kind.GAUGE:
                continue
            assert AggregationTemporality.DELTA is metric.data.aggregation_temporality
            for point in metric.data.data_points:
                key = (name, tuple(sorted(point.attributes.items())))
                assert before <= point.start_time_unix_nano < point.time_unix_nano
                assert last_end[key] <= point.start_time_unix_nano
                last_end[key] = point.time_unix_nano
                if hasattr(point, "value"):
                    assert 0 < point.value
                    sums[key] += point.value
                else:
                    sums[key] += point.sum
                    known = buckets.setdefault(key, [0] * len(point.bucket_counts))
                    buckets[key] = [a + b for a, b in zip(known, point.bucket_counts, strict=True)]
                    assert sum(point.bucket_counts) == point.count
    for name, metric in telemetry.snapshot()["metrics"].items():
        if metric["kind"] == "gauge":
            continue
        for series in metric["series"]:
            key = (name, tuple(sorted(series["labels"].items())))
            assert series.get("value", series.get("sum")) == pytest.approx(sums[key])
            if "buckets" in series and series["count"]:
                assert series["buckets"] == buckets[key]
    assert 30 == sums["moe.tokens", (("phase", "decode"),)]


def test_a_series_at_rest_has_no_delta_point(start, recorder) -> None:
    """A collection without events has no counter or histogram points."""
    reader = InMemoryMetricReader(preferred_temporality=DELTA)
    start(meter_provider=MeterProvider([reader]), port=0)
    recorder.tokens(1)
    reader.get_metrics_data()
    names = by_name(reader.get_metrics_data())
    assert {Kind.GAUGE} == {BY_NAME[name].kind for name in names}


def test_a_collection_between_a_hooks_count_and_its_sum_loses_nothing(start, recorder) -> None:
    """A sum that a delta saw before its count is part of the delta that has the count."""
    reader = InMemoryMetricReader(preferred_temporality=DELTA)
    telemetry = start(meter_provider=MeterProvider([reader]), port=0)
    cell = telemetry._store.phases["decode"].stall
    seen = []
    for step in (lambda: None, lambda: setattr(cell, "sum", cell.sum + 0.5), lambda: cell.counts.__setitem__(3, 1)):
        step()
        metric = by_name(reader.get_metrics_data()).get("moe.expert.stall.duration")
        seen += [(point.count, point.sum) for point in metric.data.data_points] if metric else []
    assert [(1, 0.5)] == seen


def test_cumulative_and_delta_readers_side_by_side(start, recorder) -> None:
    """Each reader has the temporality that it asked for."""
    delta, cumulative = InMemoryMetricReader(preferred_temporality=DELTA), InMemoryMetricReader()
    start(meter_provider=MeterProvider([delta, cumulative]), port=0)
    found = []
    for _ in range(3):
        recorder.tokens(2)
        found.append(
            (value(delta.get_metrics_data(), "moe.tokens"), value(cumulative.get_metrics_data(), "moe.tokens"))
        )
    assert [(2, 2), (2, 4), (2, 6)] == found


# -- stop -----------------------------------------------------------------------------------------------------


def test_stop_restores_the_applications_readers(start, recorder) -> None:
    """Behind stop() a reader's attributes are what they were, its data is without our points, and it goes on."""
    memory = InMemoryMetricReader()
    registry = CollectorRegistry()
    prometheus = PrometheusMetricReader(registry=registry)
    provider = MeterProvider([memory, prometheus])
    provider.get_meter("app").create_counter("app.requests").add(1)
    before = [dict(vars(reader)) for reader in (memory, prometheus)]
    for _ in range(10):
        telemetry = start(meter_provider=provider, port=0)
        recorder.tokens(1)
        assert 1 == value(memory.get_metrics_data(), "moe.tokens")
        assert 1 == total(scrape(telemetry), "moe_tokens_total")
        telemetry.stop()
        assert {"app.requests"} == set(by_name(memory.get_metrics_data()))
    assert before == [dict(vars(reader)) for reader in (memory, prometheus)]
    assert "moe_" not in generate_latest(registry).decode()
    assert 2 == len(provider._measurement_consumer._reader_storages)


def test_restarts_on_one_provider_are_silent(start, recorder, caplog: pytest.LogCaptureFixture) -> None:
    """Ten starts on one provider log no duplicate instrument and nothing else."""
    provider = MeterProvider([InMemoryMetricReader()])
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            with mt.start(meter_provider=provider, port=0, recorder=recorder) as telemetry:
                scrape(telemetry)
    assert [] == caplog.records


def test_a_wrapper_that_was_there_before_is_kept(start) -> None:
    """An application's own override on the instance works during and after telemetry."""
    memory = InMemoryMetricReader()
    calls = []
    original = memory._receive_metrics

    def override(data: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(len(by_name(data)))
        original(data, *args, **kwargs)

    memory._receive_metrics = override  # type: ignore[method-assign]
    telemetry = start(meter_provider=MeterProvider([memory]), port=0)
    assert value(memory.get_metrics_data(), "moe.run.info")
    assert 5 < calls[-1]
    telemetry.stop()
    assert override is memory._receive_metrics


def test_two_telemetries_on_one_provider(start) -> None:
    """The application's readers show the latest one, each endpoint its own, and stops in any order restore all."""
    memory = InMemoryMetricReader()
    provider = MeterProvider([memory])
    recorders = [mt.Recorder(), mt.Recorder()]
    first, second = (
        start(meter_provider=provider, port=0, recorder=each, model=f"m{number}")
        for number, each in enumerate(recorders)
    )
    recorders[0].tokens(1)
    recorders[1].tokens(20)
    for telemetry, tokens, model in ((first, 1, "m0"), (second, 20, "m1")):
        text = scrape(telemetry)
        assert tokens == total(text, "moe_tokens_total")
        assert [f'model="{model}"'] == re.findall(r'^moe_run_info{(model="\w+")', text, re.MULTILINE)
    assert 20 == value(memory.get_metrics_data(), "moe.tokens")
    first.stop()
    assert 20 == value(memory.get_metrics_data(), "moe.tokens")
    second.stop()
    assert "_receive_metrics" not in vars(memory)
    assert {} == by_name(memory.get_metrics_data())


def test_stop_behind_the_providers_shutdown(start, recorder, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever of provider and telemetry ends first, the other one ends without a message."""
    provider = MeterProvider([InMemoryMetricReader()])
    telemetry = start(meter_provider=provider, port=0)
    with caplog.at_level(logging.WARNING):
        provider.shutdown()
        telemetry.stop()
    assert [] == caplog.records


def test_our_push_reader_on_the_applications_provider_exports_a_last_time(
    start, recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """stop() pushes what was recorded since the last interval also where the provider is the application's."""
    exporter = Kept()
    monkeypatch.setattr("opentelemetry.exporter.otlp.proto.http.metric_exporter.OTLPMetricExporter", lambda: exporter)
    provider = MeterProvider()
    telemetry = start(meter_provider=provider, port=0, otlp=True)
    recorder.tokens(8)
    with caplog.at_level(logging.WARNING):
        telemetry.stop()
    assert [8] == [value(batch, "moe.tokens") for batch in exporter.batches]
    assert [] == caplog.records


def test_stop_exports_through_the_applications_push_reader_once_more(start, recorder) -> None:
    """What was recorded since the application's last export reaches its receiver before stop() takes our points out."""
    exporter = Kept()
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)])
    telemetry = start(meter_provider=provider, port=0)
    recorder.tokens(1000)
    telemetry.stop()
    provider.shutdown()
    assert [1000] == [value(batch, "moe.tokens") for batch in exporter.batches if by_name(batch)]


def test_an_exporter_that_raises_does_not_break_stop(start, recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application's exporter that fails in the last export, or in its flush, keeps nothing from being stopped."""
    exporter = Kept()
    monkeypatch.setattr(exporter, "force_flush", lambda **_: 1 / 0)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    telemetry = start(meter_provider=MeterProvider([reader]), port=0)
    telemetry.stop()
    assert "_receive_metrics" not in vars(reader)


def test_stop_does_not_wait_for_a_callback_that_hangs(start, caplog: pytest.LogCaptureFixture) -> None:
    """While an application's callback holds the SDK, stop() returns in time with one line, and our reader goes later.

    Another provider can be made meanwhile.
    """
    entered, leave = threading.Event(), threading.Event()

    def callback(_: object) -> list[Any]:
        entered.set()
        leave.wait(30)
        return []

    provider = MeterProvider([PeriodicExportingMetricReader(Kept(), export_interval_millis=3_600_000)])
    provider.get_meter("app").create_observable_gauge("app.gauge", [callback])
    telemetry = start(meter_provider=provider, port=0)

    def scraping() -> None:
        with suppress(OSError, HTTPException):  # cut by stop()
            scrape(telemetry, 30)

    threading.Thread(target=scraping, daemon=True).start()
    try:
        assert entered.wait(10)
        begin = time.monotonic()
        with caplog.at_level(logging.WARNING):
            telemetry.stop()
        assert EXPORT_SECONDS + 2 > time.monotonic() - begin
        assert 1 == len([each for each in caplog.records if each.name == "moe_telemetry"])
        start(port=0).stop()
    finally:
        leave.set()
    deadline = time.monotonic() + 10
    while len(provider._measurement_consumer._reader_storages) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert 1 == len(provider._measurement_consumer._reader_storages)


@pytest.mark.parametrize("pattern", ["*", "moe.*"])
def test_a_view_that_drops_all_drops_none_of_our_points(pattern: str, start, recorder) -> None:
    """Our endpoint and the application's readers show our figures whatever its views drop."""
    memory, registry = InMemoryMetricReader(), CollectorRegistry()
    provider = MeterProvider(
        [memory, PrometheusMetricReader(registry=registry)],
        views=[View(instrument_name=pattern, aggregation=DropAggregation())],
        resource=Resource({"service.name": "app"}),
    )
    telemetry = start(meter_provider=provider, port=0)
    provider.get_meter("app").create_counter("moe.app").add(1)
    recorder.tokens(7)
    text = scrape(telemetry)
    assert 7 == total(text, "moe_tokens_total") == total(generate_latest(registry).decode(), "moe_tokens_total")
    assert 'target_info{service_name="app"} 1.0\n' in text
    assert 7 == value(memory.get_metrics_data(), "moe.tokens")
    telemetry.stop()
    assert memory.get_metrics_data() is None


def test_an_application_may_use_our_scope(start) -> None:
    """Instruments that an application makes under our name come out as any other."""
    provider = MeterProvider()
    telemetry = start(meter_provider=provider, port=0)
    provider.get_meter("moe_telemetry").create_counter("app.requests").add(3)
    assert 3 == total(scrape(telemetry), "app_requests_total")


# -- an application's registry ---------------------------------------------------------------------------------


def test_families_come_once_where_the_application_exposes_on_that_registry(start, recorder) -> None:
    """The application's reader on the registry that we are given shows our points, and we add no second one."""
    registry = CollectorRegistry()
    provider = MeterProvider([PrometheusMetricReader(registry=registry)])
    provider.get_meter("app").create_counter("app.requests").add(3)
    telemetry = start(meter_provider=provider, port=0, registry=registry)
    recorder.tokens(5)
    text = scrape(telemetry)
    assert (3, 5) == (total(text, "app_requests_total"), total(text, "moe_tokens_total"))
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert sorted(set(types)) == sorted(types)


@pytest.mark.parametrize("kind", ["its own", "a collector's", "a reader's"])
def test_one_target_info_on_an_applications_registry(kind: str, start) -> None:
    """Where the registry shows target metadata already, ours stays away."""
    registry = CollectorRegistry(target_info={"a": "b"} if kind == "its own" else None)
    if kind == "a collector's":
        Info("target", "of the application", registry=registry).info({"a": "b"})
    if kind == "a reader's":
        provider = MeterProvider([PrometheusMetricReader(registry=registry)], resource=Resource({"a": "b"}))
        provider.get_meter("app").create_counter("app.requests").add(3)
    text = scrape(start(registry=registry))
    assert ['target_info{a="b"} 1.0'] == re.findall(r"^target_info.*$", text, re.MULTILINE)
    assert "moe_run_info" in text


# -- name clashes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "unit", "ours"),
    [
        ("counter", "moe.tokens", "{token}", "moe_tokens_total"),
        ("counter", "moe_tokens_total", "", "moe_tokens_total"),
        ("counter", "moe.tokens.total", "", "moe_tokens_total"),
        ("gauge", "moe.tokens.total", "", "moe_tokens_total"),
        ("gauge", "moe.tokens", "", "moe_tokens_total"),
        ("histogram", "moe.tokens", "", "moe_tokens_total"),
        ("gauge", "moe.run.info", "", "moe_run_info"),
        ("counter", "moe.expert.read", "By", "moe_expert_read_bytes_total"),
        ("counter", "moe.expert.read.bytes", "", "moe_expert_read_bytes_total"),
        ("histogram", "moe.forward.duration", "s", "moe_forward_duration_seconds"),
        ("histogram", "moe.forward.duration.seconds", "s", "moe_forward_duration_seconds"),
        ("gauge", "moe.forward.duration.seconds.count", "", "moe_forward_duration_seconds"),
        ("gauge", "moe_forward__duration", "s", "moe_forward_duration_seconds"),
        ("gauge", "moe.run.start.time", "s", "moe_run_start_time_seconds"),
        ("histogram", "moe.forward.duration", "seconds", "moe_forward_duration_seconds"),
        ("histogram", "moe.forward.duration", "{x}s", "moe_forward_duration_seconds"),
        ("gauge", "moe.forward", "duration seconds", "moe_forward_duration_seconds"),
        ("counter", "moe.expert.read", "bytes", "moe_expert_read_bytes_total"),
        ("counter", "moe.expert.read", "{a}By", "moe_expert_read_bytes_total"),
        ("gauge", "moe.run", "info", "moe_run_info"),
        ("gauge", "moe.run.info", "1", "moe_run_info"),
    ],
)
def test_the_applications_metric_wins_a_clash(kind: str, name: str, unit: str, ours: str, start, recorder) -> None:
    """One HELP and TYPE a name, the application's value, ours left out and counted once."""
    provider = MeterProvider()
    telemetry = start(meter_provider=provider, port=0)
    instrument = getattr(provider.get_meter("app"), f"create_{kind}")(name, unit, "The application's.")
    getattr(instrument, {"counter": "add", "gauge": "set", "histogram": "record"}[kind])(777)
    recorder.tokens(5)
    recorder.read("demand", 5, 0.5)
    for _ in range(3):
        if kind == "gauge":
            instrument.set(777)  # which SDK 1.44 forgets with each collection
        text = scrape(telemetry)
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert sorted(set(types)) == sorted(types)
    assert 1 <= text.count(" The application's.\n")
    assert " 777.0\n" in text
    assert f"# HELP {ours} {next(m.help for m in BY_NAME.values() if m.prometheus == ours)}\n" not in text
    assert 1 == total(text, "moe_telemetry_dropped_total", reason="name_taken")
    promtool(text)


def test_no_clash_where_names_differ(start) -> None:
    """Metrics of the application whose names only resemble ours leave ours in place."""
    provider = MeterProvider()
    telemetry = start(meter_provider=provider, port=0)
    meter = provider.get_meter("app")
    meter.create_counter("moe.tokens.seen").add(1)
    meter.create_counter("app.moe.tokens").add(1)
    text = scrape(telemetry)
    assert "# TYPE moe_tokens_total counter" in text
    assert 0 == total(text, "moe_telemetry_dropped_total", reason="name_taken")


def test_an_instrument_called_target_info(start) -> None:
    """The application's own target.info replaces ours."""
    provider = MeterProvider()
    telemetry = start(meter_provider=provider, port=0)
    provider.get_meter("app").create_gauge("target.info").set(1, {"a": "b"})
    text = scrape(telemetry)
    assert 1 == text.count("# TYPE target_info ")
    assert 'target_info{a="b"} 1.0\n' in text


def test_a_port_that_is_taken_leaves_the_provider_alone(start) -> None:
    """A failed start has wrapped no reader and added none."""
    memory = InMemoryMetricReader()
    provider = MeterProvider([memory])
    port = free_port()
    start(port=port)
    with pytest.raises(mt.ConfigurationError):
        mt.start(meter_provider=provider, port=port, recorder=mt.Recorder())
    assert "_receive_metrics" not in vars(memory)
    assert 1 == len(provider._measurement_consumer._reader_storages)
