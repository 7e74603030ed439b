"""OTLP: what a receiver gets equals the snapshot, and one that cannot be reached harms nothing."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from conftest import free_port, scrape, total

import moe_telemetry as mt

service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")


class Receiver(ThreadingHTTPServer):
    """Decodes what is pushed to /v1/metrics."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert "/v1/metrics" == self.path
        self.server.requests.append(service.ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def points(request: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], Any]:
    """Every point of a request by name and attributes; fails on one that stands twice."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    labels = tuple(sorted((each.key, each.value.string_value) for each in point.attributes))
                    assert (metric.name, labels) not in found
                    found[metric.name, labels] = point
    return found


def number(point: Any) -> float:
    return getattr(point, point.WhichOneof("value"))


def record(recorder: mt.Recorder) -> None:
    recorder.pool(0, capacity=8, resident=4)
    for tokens in (1, 1, 3):
        recorder.forward(tokens)
        recorder.routed(0, {1, 2, 3}, resident={1}, predicted={2}, ready={2})
        recorder.read("demand", 4096, 0.002)
        recorder.tokens(tokens)
        recorder.forward_done(0.125)
    recorder.request(0.5, 4.5, 9)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_what_is_pushed_equals_the_snapshot(
    by: str, receiver: Receiver, start, recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stop() pushes the final figures: every counter and histogram of the snapshot, without minimum and maximum."""
    if by == "environment":
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    telemetry = start(num_layers=2, **({"otlp": True} if by == "argument" else {}))
    record(recorder)
    telemetry.stop()
    found = points(receiver.requests[-1])
    snapshot = telemetry.snapshot()["metrics"]
    assert set(snapshot) == {name for name, _ in found}
    checked = 0
    for name, metric in snapshot.items():
        for series in metric["series"]:
            point = found[name, tuple(sorted(series["labels"].items()))]
            if metric["kind"] == "histogram":
                assert series["count"] == point.count
                assert series["sum"] == point.sum
                assert series["buckets"] == list(point.bucket_counts)
                assert metric["bounds"] == list(point.explicit_bounds)
                assert (False, False) == (point.HasField("min"), point.HasField("max"))
            elif metric["kind"] == "counter" and not name.startswith("process."):
                assert series["value"] == number(point)
            checked += 1
    assert len(found) == checked
    assert 5 == number(found["moe.tokens", (("phase", "decode"),)])


def test_resource_names_the_service_and_a_stable_instance(receiver: Receiver, start) -> None:
    """The pushed resource has the runtime as service name, and the instance id of the scrape."""
    telemetry = start(otlp=True, runtime="rt")
    text = scrape(telemetry)
    telemetry.stop()
    (resource,) = receiver.requests[-1].resource_metrics
    found = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert "rt" == found["service.name"]
    assert f'service_instance_id="{found["service.instance.id"]}"' in text


def test_points_are_cumulative_from_the_start_of_the_run(receiver: Receiver, start, recorder) -> None:
    """Sums and histograms are cumulative, monotonic, and begin when the run began."""
    telemetry = start(otlp=True)
    record(recorder)
    telemetry.stop()
    begin = int(telemetry.snapshot()["run"]["start_time"] * 1e9)
    for resource in receiver.requests[-1].resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                if kind == "gauge":
                    continue
                assert 2 == getattr(metric, kind).aggregation_temporality
                assert kind == "histogram" or metric.sum.is_monotonic
                assert {begin} == {point.start_time_unix_nano for point in getattr(metric, kind).data_points}


def test_delta_is_asked_for_by_the_environment(
    receiver: Receiver, start, recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With OpenTelemetry's preference for delta two pushes add up to the total."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    telemetry = start(otlp=True)
    (push,) = [reader for reader in telemetry._readers if hasattr(reader, "_exporter")]
    recorder.tokens(3)
    push.force_flush()
    recorder.tokens(4)
    telemetry.stop()
    key = ("moe.tokens", (("phase", "decode"),))
    assert [3, 4] == [number(points(request)[key]) for request in receiver.requests]


def test_it_pushes_by_itself(receiver: Receiver, start, recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval of OpenTelemetry's variable is kept while nobody stops anything."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    start(otlp=True)
    deadline = time.monotonic() + 10
    while len(receiver.requests) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert 3 <= len(receiver.requests)


def test_an_unreachable_receiver_harms_nothing(start, recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nobody listening hooks and scrapes are as ever, and stop() returns within a few seconds."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    telemetry = start(otlp=True)
    begin = time.monotonic()
    for _ in range(20):
        recorder.tokens(1)
        assert scrape(telemetry)
    assert 5 > time.monotonic() - begin
    assert 20 == total(scrape(telemetry), "moe_tokens_total")
    begin = time.monotonic()
    telemetry.stop()
    assert 6 > time.monotonic() - begin


def test_a_receiver_that_never_answers_harms_nothing(start, recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a receiver that accepts and is silent, the same."""
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        telemetry = start(otlp=True)
        recorder.tokens(1)
        begin = time.monotonic()
        assert 1 == total(scrape(telemetry), "moe_tokens_total")
        telemetry.stop()
        assert 6 > time.monotonic() - begin


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", r"OTLP protocol 'http/json' is not one of http/protobuf, grpc"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "smoke", r"OTLP protocol 'smoke' is not one of"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", r"pip install opentelemetry-exporter-otlp-proto-grpc"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-5", r"OTLP cannot be configured: "),
    ],
)
def test_a_bad_setting_is_a_clear_error_and_changes_nothing(
    variable: str, value: str, message: str, recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A protocol or an interval that is none fails at start; the registry stays as it was."""
    from prometheus_client import CollectorRegistry

    if value == "grpc":
        try:
            import opentelemetry.exporter.otlp.proto.grpc  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("the exporter for gRPC is installed")
    monkeypatch.setenv(variable, value)
    registry = CollectorRegistry()
    threads = set(threading.enumerate())  # one of an exporter in the test before may end meanwhile
    with pytest.raises(mt.ConfigurationError, match=message) as raised:
        mt.start(port=0, otlp=True, recorder=recorder, registry=registry)
    assert "\n" not in str(raised.value)
    assert [] == list(registry.collect())
    assert (set(), mt.Recorder) == (set(threading.enumerate()) - threads, type(recorder))
