"""OpenTelemetry readers that add the cells' points to what they receive from the SDK (design D2)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import Counter as CounterInstrument
from opentelemetry.sdk.metrics import Histogram as HistogramInstrument
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Metric,
    MetricExporter,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ScopeMetrics,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import InfoMetricFamily
from prometheus_client.core import Metric as PrometheusFamily
from prometheus_client.registry import Collector

from .collection import CUMULATIVE, Source, Stream, Temporality

SCOPE = "moe_telemetry"
_UNIT_SUFFIX = {"s": "_seconds", "By": "_bytes"}
_TARGET_KEYS = (
    "service.name",
    "service.namespace",
    "service.instance.id",
    "service.version",
    "deployment.environment.name",
    "deployment.environment",
    "host.name",
)
"""Resource attributes shown in target_info: named one by one, since a resource may hold the command line."""


class Appender:
    """Adds one telemetry's points to the metrics of one reader."""

    def __init__(self, source: Source, temporality: Temporality) -> None:
        self._source = source
        self._stream = Stream(source, temporality)
        self._reported: set[str] = set()

    def appended(self, data: MetricsData) -> MetricsData:
        """`data` with our points; where an application uses one of our names, its metric stays and ours goes."""
        if not self._source.alive or not data.resource_metrics:
            return data
        taken = {
            _exposed(metric.name, metric.unit or "")
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            if scope.scope.name != SCOPE
            for metric in scope.metrics
        }
        first, *others = data.resource_metrics
        foreign = [scope for scope in first.scope_metrics if scope.scope.name != SCOPE]
        own = [metric for scope in first.scope_metrics if scope.scope.name == SCOPE for metric in scope.metrics]
        ours = list(self._free([*own, *self._stream.metrics()], taken))
        scope = InstrumentationScope(SCOPE, self._source.store.identity.version)
        appended = ScopeMetrics(scope=scope, metrics=ours, schema_url="")
        return MetricsData(resource_metrics=[replace(first, scope_metrics=[*foreign, appended]), *others])

    def _free(self, metrics: list[Metric], taken: set[str]) -> Iterator[Metric]:
        for metric in metrics:
            if _exposed(metric.name, metric.unit or "") not in taken:
                yield metric
            elif metric.name not in self._reported:
                self._reported.add(metric.name)
                self._source.store.lost["name_taken"] += 1


def _exposed(name: str, unit: str) -> str:
    """A metric's name as scraped, without a counter's suffix: what must not stand twice in an exposition."""
    base = re.sub(r"[^a-zA-Z0-9:]+", "_", name).removesuffix("_total")
    suffix = _UNIT_SUFFIX.get(unit, "")
    return base if base.endswith(suffix) else base + suffix


def _temporality(reader: MetricReader) -> Temporality:
    """What the reader's exporter prefers; the SDK keeps it by instrument class and has no public way to ask."""
    preferred: dict[type, AggregationTemporality] = getattr(reader, "_instrument_class_temporality", {})

    def of(instrument: type) -> AggregationTemporality:
        return next((value for kind, value in preferred.items() if issubclass(kind, instrument)), CUMULATIVE)

    return Temporality(counter=of(CounterInstrument), histogram=of(HistogramInstrument))


class PrometheusReader(PrometheusMetricReader):
    """The SDK's Prometheus reader with our points, translated on each scrape of `registry`."""

    def __init__(self, source: Source, registry: CollectorRegistry) -> None:
        self._appender = Appender(source, Temporality())
        self._target: dict[str, str] = {}
        inner = CollectorRegistry(auto_describe=False)
        super().__init__(disable_target_info=True, scope_info_enabled=False, registry=inner)
        self._outer = registry
        self._exposed = _Collector(source, inner, self._target)
        registry.register(self._exposed)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        attributes = metrics_data.resource_metrics[0].resource.attributes
        self._target.update((key.replace(".", "_"), str(attributes[key])) for key in _TARGET_KEYS if key in attributes)
        super()._receive_metrics(self._appender.appended(metrics_data), timeout_millis, **kwargs)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Leave the registry. A second call does nothing: both the application's provider and we may make it."""
        with suppress(KeyError):
            self._outer.unregister(self._exposed)
            super().shutdown(timeout_millis, **kwargs)


class _Collector(Collector):
    """What the registry holds in place of the SDK's collector: one scrape at a time, none in a forked child.

    Collected by two scrapes at once the SDK's hands one of them everything twice; and a child's copy of the
    SDK's locks may be held for ever by a thread that does not exist there.
    """

    def __init__(self, source: Source, inner: CollectorRegistry, target: dict[str, str]) -> None:
        self._source = source
        self._inner = inner
        self._target = target
        self._scrape = threading.Lock()

    def describe(self) -> list[PrometheusFamily]:
        """Nothing: the registry would otherwise collect at registration to learn the names."""
        return []

    def collect(self) -> list[PrometheusFamily]:
        """The families now."""
        if not self._source.alive:
            return []
        with self._scrape:
            families = list(self._inner.collect())
            return [InfoMetricFamily("target", "Target metadata", value=dict(self._target)), *families]


class PushReader(PeriodicExportingMetricReader):
    """The SDK's periodic reader with our points, for an exporter that pushes (OTLP)."""

    def __init__(self, source: Source, exporter: MetricExporter, interval_millis: float | None = None) -> None:
        super().__init__(exporter, export_interval_millis=interval_millis)
        self._source = source
        self._appender = Appender(source, _temporality(self))

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        if self._source.alive:  # in a forked child the SDK starts the thread again, and the parent reports
            super()._receive_metrics(self._appender.appended(metrics_data), timeout_millis, **kwargs)


def wrap(reader: MetricReader, source: Source) -> Callable[[], None]:
    """Give an application's own reader our points; the function returned undoes it."""
    appender = Appender(source, _temporality(reader))
    before = vars(reader).get("_receive_metrics")
    receive = reader._receive_metrics

    def receive_appended(metrics_data: MetricsData, *args: Any, **kwargs: Any) -> None:
        receive(appender.appended(metrics_data), *args, **kwargs)

    def unwrap() -> None:
        if vars(reader).get("_receive_metrics") is receive_appended:
            del reader._receive_metrics
            if before is not None:
                reader._receive_metrics = before  # type: ignore[method-assign]

    reader._receive_metrics = receive_appended  # type: ignore[method-assign]
    return unwrap
