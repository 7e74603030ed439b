"""OpenTelemetry readers that add the cells' points to what they receive from the SDK."""

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
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    Metric,
    MetricExporter,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
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
from .settings import ConfigurationError, printable
from .snapshot import run_info

SCOPE = "moe_telemetry"
TURN_SECONDS = 10.0
"""How long a scrape waits for its turn: one waits for an application's callbacks, which may hang."""
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
        taken = taken_names(data)
        ours = [metric for metric in self._stream.metrics() if self.free(catalog.BY_NAME[metric.name], taken)]
        own = InstrumentationScope(SCOPE, self._source.store.identity.version)
        first, *others = data.resource_metrics
        scopes = [*first.scope_metrics, ScopeMetrics(scope=own, metrics=ours, schema_url="")]
        return MetricsData(resource_metrics=[replace(first, scope_metrics=scopes), *others])

    @property
    def alive(self) -> bool:
        """False in a forked child."""
        return self._source.alive

    def free(self, metric: catalog.Metric, taken: set[str]) -> bool:
        """Whether no foreign metric has a name of ours; counted once a metric where one has."""
        if not taken or taken.isdisjoint(_exposed(metric.name, metric.unit, metric.kind)):
            return True
        if metric.name not in self._reported:
            self._reported.add(metric.name)
            self._source.store.lost["name_taken"] += 1
        return False


def taken_names(data: MetricsData) -> set[str]:
    """The names that an application's metrics take in an exposition."""
    taken: set[str] = set()
    for metric in (each for resource in data.resource_metrics for s in resource.scope_metrics for each in s.metrics):
        taken.update(_exposed(metric.name, metric.unit or "", _kind(metric)))
    return taken


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
    suffix = _unit_suffix(unit)
    base = base if base.endswith(suffix) else base + suffix
    if kind is Kind.COUNTER:
        return base, f"{base}_total"
    if kind is Kind.HISTOGRAM:
        return base, f"{base}_bucket", f"{base}_count", f"{base}_sum"
    return (base,)


def _unit_suffix(unit: str) -> str:
    """What the exporter appends for a unit: without annotations, in words or in UCUM's letters."""
    plain = re.sub(r"{.*}", "", unit)
    if plain in UNIT_SUFFIX:
        return UNIT_SUFFIX[plain]
    word = re.sub(r"[^a-zA-Z0-9:]+", "_", plain).strip("_")
    return f"_{word}" if word not in ("", "1") else ""


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
        holder = _registries.setdefault(registry, self)
        if holder is not self and holder._source.alive:
            raise ConfigurationError("registry is used by a running telemetry: stop that, or give each its own")
        _registries[registry] = self
        super().__init__(disable_target_info=True, scope_info_enabled=False, registry=inner)
        self._outer = registry
        self._exposed = _Collector(self, inner)
        registry.register(self._exposed)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        attributes = metrics_data.resource_metrics[0].resource.attributes
        for key in _TARGET_KEYS:
            if key in attributes:
                self._target[key.replace(".", "_")] = printable(str(attributes[key]))
        taken = taken_names(metrics_data)
        families = [run_info(self._source.store), *self._source.families()]
        self._ours = [self._exposition.family(each) for each in families if self._appender.free(each.metric, taken)]
        super()._receive_metrics(metrics_data, timeout_millis, **kwargs)

    def families(self, foreign: list[PrometheusFamily]) -> list[PrometheusFamily]:
        """The target's metadata, an application's families and ours of the collection just made."""
        ours, self._ours = self._ours, []
        own = any(family.name in ("target", "target_info") for family in foreign)  # an application's instrument
        if own or _has_target(self._outer):
            return [*foreign, *ours]
        return [InfoMetricFamily("target", "Target metadata", value=dict(self._target)), *foreign, *ours]

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Leave the registry. A second call does nothing: both the application's provider and we may make it."""
        if _registries.get(self._outer) is self:
            del _registries[self._outer]
        with suppress(KeyError):
            self._outer.unregister(self._exposed)
            super().shutdown(timeout_millis, **kwargs)


_registries: dict[CollectorRegistry, PrometheusReader] = {}
"""Which reader exposes on a registry: a second one would show every name twice."""


def _has_target(registry: CollectorRegistry) -> bool:
    """Whether an application's registry shows a target_info: of its own, a collector's or an OpenTelemetry reader's."""
    collectors = list(getattr(registry, "_collector_to_names", ()))
    return "target_info" in getattr(registry, "_names_to_collectors", ()) or any(
        getattr(collector, "_disable_target_info", None) is False for collector in collectors
    )


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
        if not self._scrape.acquire(timeout=TURN_SECONDS):
            raise TimeoutError("another scrape did not end")
        try:
            return self._reader.families(list(self._inner.collect()))
        finally:
            self._scrape.release()


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


def wrap(reader: MetricReader, source: Source, provider: MeterProvider) -> Callable[[], None]:
    """Give an application's own reader our points; the function returned undoes it, in whatever order."""
    wrapped = _wrapped.get(reader)
    if wrapped is None:
        wrapped = _wrapped[reader] = _redirect(reader, provider)
    appender = Appender(source, _temporality(reader))
    wrapped.appenders.append(appender)

    def unwrap() -> None:
        wrapped.appenders.remove(appender)
        if not wrapped.appenders:
            wrapped.restore()
            _wrapped.pop(reader, None)

    return unwrap


def _redirect(reader: MetricReader, provider: MeterProvider) -> _Wrapped:
    before = vars(reader).get("_receive_metrics")
    receive = reader._receive_metrics
    appenders: list[Appender] = []

    def receive_appended(metrics_data: MetricsData, *args: Any, **kwargs: Any) -> None:
        latest = appenders[-1:]
        receive(latest[0].appended(metrics_data) if latest else metrics_data, *args, **kwargs)

    forget = always_collect(reader, provider, lambda: bool(appenders) and appenders[-1].alive)

    def restore() -> None:
        forget()
        if vars(reader).get("_receive_metrics") is receive_appended:
            del reader._receive_metrics
            if before is not None:
                reader._receive_metrics = before  # type: ignore[method-assign]

    reader._receive_metrics = receive_appended  # type: ignore[method-assign]
    return _Wrapped(restore, appenders)


def always_collect(reader: MetricReader, provider: MeterProvider, wanted: Callable[[], bool]) -> Callable[[], None]:
    """Let a reader receive data, for us to add to, also where the SDK has none; the function returned undoes it.

    The SDK collects nothing while no instrument has a value, and where a View drops them all.
    """
    collect: Any = reader._collect

    def collect_something(*args: Any, **kwargs: Any) -> Any:
        data = None if collect is None else collect(*args, **kwargs)
        if data is not None or not wanted():
            return data
        resource = provider._sdk_config.resource
        return MetricsData([ResourceMetrics(resource, [], resource.schema_url)])

    reader._set_collect_callback(collect_something)

    def restore() -> None:
        if reader._collect is collect_something:
            reader._set_collect_callback(collect)

    return restore
