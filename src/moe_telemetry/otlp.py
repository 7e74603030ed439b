"""The OTLP reader, behind the extra `otlp`."""

from __future__ import annotations

import os
from importlib import import_module

from opentelemetry.sdk.metrics.export import MetricExporter

from .collection import Source
from .readers import PushReader
from .settings import ConfigurationError

_PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}


def otlp_reader(source: Source) -> PushReader:
    """A periodic reader with OpenTelemetry's OTLP exporter, configured by OTEL_EXPORTER_OTLP_* variables."""
    variables = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name].strip() for name in variables if os.environ.get(name)), "http/protobuf")
    if protocol not in _PROTOCOLS:
        raise ConfigurationError(f"OTLP protocol {protocol!r} is not one of {', '.join(_PROTOCOLS)}")
    kind = _PROTOCOLS[protocol]
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.metric_exporter")
    except ImportError:
        extra = (
            "pip install 'moe-telemetry[otlp]'"
            if kind == "http"
            else "pip install opentelemetry-exporter-otlp-proto-grpc"
        )
        raise ConfigurationError(f"OTLP over {protocol} needs a package that is not installed: {extra}") from None
    try:
        exporter: MetricExporter = module.OTLPMetricExporter()
        return PushReader(source, exporter)
    except ValueError as error:
        raise ConfigurationError(f"OTLP cannot be configured: {error}") from None
