"""OpenTelemetry readers that add the cells' points to what they receive from the SDK (design D2)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import Counter as CounterInstrument
from opentelemetry.sdk.metrics import Histogram as HistogramInstrument
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    Metric,
    MetricExporter,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import InfoMetricFamily
from prometheus_client.core import Metric as PrometheusFamily

from .collection import CUMULATIVE, Source, Stream, Temporality
from .settings import printable

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
        taken: set[str] = set()
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                if scope.scope.name != SCOPE:
                    taken.update(name for metric in scope.metrics for name in _exposed(metric))
        first, *others = data.resource_metrics
        # What the SDK collected under our name made it collect at all; it is among our points, too.
        foreign = [scope for scope in first.scope_metrics if scope.scope.name != SCOPE]
        ours = list(self._free(self._stream.metrics(), taken))
        own = InstrumentationScope(SCOPE, self._source.store.identity.version)
        appended = ScopeMetrics(scope=own, metrics=ours, schema_url="")
        return MetricsData(resource_metrics=[replace(first, scope_metrics=[*foreign, appended]), *others])

    def _free(self, metrics: list[Metric], taken: set[str]) -> Iterator[Metric]:
        for metric in metrics:
            if not taken or taken.isdisjoint(_exposed(metric)):
                yield metric
            elif metric.name not in self._reported:
                self._reported.add(metric.name)
                self._source.store.lost["name_taken"] += 1


def _exposed(metric: Metric) -> tuple[str, ...]:
    """Names that a metric takes in an exposition, of its family and its samples: none must stand there twice."""
    base = re.sub(r"[^a-zA-Z0-9:]+", "_", metric.name)
    counter = isinstance(metric.data, Sum) and metric.data.is_monotonic
    if counter:
        base = base.removesuffix("_total")
    suffix = _UNIT_SUFFIX.get(metric.unit or "", "")
    base = base if base.endswith(suffix) else base + suffix
    if counter:
        return base, f"{base}_total"
    if isinstance(metric.data, Histogram):
        return base, f"{base}_bucket", f"{base}_count", f"{base}_sum"
    return (base,)


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
        self._target.update(
            (key.replace(".", "_"), printable(str(attributes[key]))) for key in _TARGET_KEYS if key in attributes
        )
        super()._receive_metrics(self._appender.appended(metrics_data), timeout_millis, **kwargs)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Leave the registry. A second call does nothing: both the application's provider and we may make it."""
        with suppress(KeyError):
            self._outer.unregister(self._exposed)
            super().shutdown(timeout_millis, **kwargs)


class _Collector:
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
        if any(family.name in ("target", "target_info") for family in families):  # an application's own instrument
            return families
        return [InfoMetricFamily("target", "Target metadata", value=dict(self._target)), *families]


class PushReader(PeriodicExportingMetricReader):
    """The SDK's periodic reader with our points, for an exporter that pushes (OTLP)."""

    def __init__(self, source: Source, exporter: MetricExporter, interval_millis: float | None = None) -> None:
        super().__init__(exporter, export_interval_millis=interval_millis)
        self._source = source
        self._ended = False
        self._appender = Appender(source, _temporality(self))

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        if self._source.alive:  # in a forked child the SDK starts the thread again, and the parent reports
            super()._receive_metrics(self._appender.appended(metrics_data), timeout_millis, **kwargs)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Export once more. A second call does nothing: both a provider and we may make it."""
        if not self._ended:
            self._ended = True
            super().shutdown(timeout_millis, **kwargs)


@dataclass
class _Wrapped:
    """An application's reader that has our points: those of the latest telemetry, the last of `appenders`."""

    restore: Callable[[], None]
    appenders: list[Appender]


_wrapped: dict[MetricReader, _Wrapped] = {}


def wrap(reader: MetricReader, source: Source) -> Callable[[], None]:
    """Give an application's own reader our points; the function returned undoes it, in whatever order."""
    wrapped = _wrapped.get(reader)
    if wrapped is None:
        wrapped = _wrapped[reader] = _redirect(reader)
    appender = Appender(source, _temporality(reader))
    wrapped.appenders.append(appender)

    def unwrap() -> None:
        wrapped.appenders.remove(appender)
        if not wrapped.appenders:
            wrapped.restore()
            _wrapped.pop(reader, None)

    return unwrap


def _redirect(reader: MetricReader) -> _Wrapped:
    before = vars(reader).get("_receive_metrics")
    receive = reader._receive_metrics
    appenders: list[Appender] = []

    def receive_appended(metrics_data: MetricsData, *args: Any, **kwargs: Any) -> None:
        latest = appenders[-1:]
        receive(latest[0].appended(metrics_data) if latest else metrics_data, *args, **kwargs)

    def restore() -> None:
        if vars(reader).get("_receive_metrics") is receive_appended:
            del reader._receive_metrics
            if before is not None:
                reader._receive_metrics = before  # type: ignore[method-assign]

    reader._receive_metrics = receive_appended  # type: ignore[method-assign]
    return _Wrapped(restore, appenders)
