"""OpenTelemetry readers that add the cells' points to what they receive from the SDK (design D2)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
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

from . import catalog
from .catalog import UNIT_SUFFIX, Kind
from .collection import CUMULATIVE, Source, Stream, Temporality
from .exposition import Exposition
from .settings import printable
from .snapshot import run_info

SCOPE = "moe_telemetry"
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
        foreign, taken = without_ours(data)
        ours = [metric for metric in self._stream.metrics() if self.free(catalog.BY_NAME[metric.name], taken)]
        own = InstrumentationScope(SCOPE, self._source.store.identity.version)
        first, *others = foreign.resource_metrics
        scopes = [*first.scope_metrics, ScopeMetrics(scope=own, metrics=ours, schema_url="")]
        return MetricsData(resource_metrics=[replace(first, scope_metrics=scopes), *others])

    def free(self, metric: catalog.Metric, taken: set[str]) -> bool:
        """Whether no foreign metric has a name of ours; counted once a metric where one has."""
        if not taken or taken.isdisjoint(_exposed(metric.name, metric.unit, metric.kind)):
            return True
        if metric.name not in self._reported:
            self._reported.add(metric.name)
            self._source.store.lost["name_taken"] += 1
        return False


def without_ours(data: MetricsData) -> tuple[MetricsData, set[str]]:
    """An application's metrics, and the names they take in an exposition.

    What the SDK collected under our name only made it collect at all; the run info is among our points, too.
    """
    taken: set[str] = set()
    resources = []
    for resource in data.resource_metrics:
        scopes = [scope for scope in resource.scope_metrics if scope.scope.name != SCOPE]
        for metric in (metric for scope in scopes for metric in scope.metrics):
            taken.update(_exposed(metric.name, metric.unit or "", _kind(metric)))
        resources.append(replace(resource, scope_metrics=scopes))
    return MetricsData(resource_metrics=resources), taken


def _kind(metric: Metric) -> Kind:
    """What the exporter makes of a metric: a sum that may fall is a gauge."""
    if isinstance(metric.data, Sum):
        return Kind.COUNTER if metric.data.is_monotonic else Kind.GAUGE
    return Kind.HISTOGRAM if isinstance(metric.data, Histogram) else Kind.GAUGE


def _exposed(name: str, unit: str, kind: Kind) -> tuple[str, ...]:
    """Names that a metric takes in an exposition, of its family and its samples: none must stand there twice."""
    base = re.sub(r"[^a-zA-Z0-9:]+", "_", name)
    if kind is Kind.COUNTER:
        base = base.removesuffix("_total")
    suffix = UNIT_SUFFIX.get(unit, "")
    base = base if base.endswith(suffix) else base + suffix
    if kind is Kind.COUNTER:
        return base, f"{base}_total"
    if kind is Kind.HISTOGRAM:
        return base, f"{base}_bucket", f"{base}_count", f"{base}_sum"
    return (base,)


def _temporality(reader: MetricReader) -> Temporality:
    """What the reader's exporter prefers; the SDK keeps it by instrument class and has no public way to ask."""
    preferred: dict[type, AggregationTemporality] = getattr(reader, "_instrument_class_temporality", {})

    def of(instrument: type) -> AggregationTemporality:
        return next((value for kind, value in preferred.items() if issubclass(kind, instrument)), CUMULATIVE)

    return Temporality(counter=of(CounterInstrument), histogram=of(HistogramInstrument))


class PrometheusReader(PrometheusMetricReader):
    """The SDK's Prometheus reader with our series, on each scrape of `registry`.

    The SDK translates an application's metrics. Ours go from series to samples at once: as points through the SDK
    they cost as much again as reading and rendering them.
    """

    def __init__(self, source: Source, registry: CollectorRegistry) -> None:
        self._source = source
        self._appender = Appender(source, Temporality())
        self._exposition = Exposition()
        self._target: dict[str, str] = {}
        self._ours: list[PrometheusFamily] = []
        inner = CollectorRegistry(auto_describe=False)
        super().__init__(disable_target_info=True, scope_info_enabled=False, registry=inner)
        self._outer = registry
        self._exposed = _Collector(self, inner)
        registry.register(self._exposed)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        attributes = metrics_data.resource_metrics[0].resource.attributes
        for key in _TARGET_KEYS:
            if key in attributes:
                self._target[key.replace(".", "_")] = printable(str(attributes[key]))
        foreign, taken = without_ours(metrics_data)
        families = [run_info(self._source.store), *self._source.families()]
        self._ours = [self._exposition.family(each) for each in families if self._appender.free(each.metric, taken)]
        super()._receive_metrics(foreign, timeout_millis, **kwargs)

    def families(self, foreign: list[PrometheusFamily]) -> list[PrometheusFamily]:
        """The target's metadata, an application's families and ours of the collection just made."""
        ours, self._ours = self._ours, []
        if any(family.name in ("target", "target_info") for family in foreign):  # an application's own instrument
            return [*foreign, *ours]
        return [InfoMetricFamily("target", "Target metadata", value=dict(self._target)), *foreign, *ours]

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

    def __init__(self, reader: PrometheusReader, inner: CollectorRegistry) -> None:
        self._reader = reader
        self._inner = inner
        self._scrape = threading.Lock()

    def describe(self) -> list[PrometheusFamily]:
        """Nothing: the registry would otherwise collect at registration to learn the names."""
        return []

    def collect(self) -> list[PrometheusFamily]:
        """The families now."""
        if not self._reader._source.alive:
            return []
        with self._scrape:
            return self._reader.families(list(self._inner.collect()))


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
