"""What is asked of a meter provider, and of readers at their end; some of it the SDK has no public way to ask."""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import nullcontext

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource

from .readers import SCOPE, PrometheusReader, PushReader
from .settings import ConfigurationError, Settings

EXPORT_SECONDS = 3.0
"""How long stopping waits for last exports to receivers that may be unreachable, and for an application's callbacks."""


def resource(settings: Settings, port: int) -> Resource:
    """The environment's resource, with a name and an instance id where it gives none.

    The id is stable: a random one would make every restart a new set of series at an OTLP backend.
    """
    given_by_environment = Resource.create({})
    ours: dict[str, str] = {}
    if str(given_by_environment.attributes.get("service.name", "")).startswith("unknown_service"):
        ours["service.name"] = settings.runtime
    given = [pair.partition("=")[0].strip() for pair in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")]
    if "service.instance.id" not in given:
        ours["service.instance.id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{SCOPE}://{socket.gethostname()}:{port}"))
    return given_by_environment.merge(Resource(ours))


def readers_of(provider: MeterProvider) -> list[MetricReader]:
    """An application's readers, those added later too, without our own; the SDK has no public way to ask."""
    storages = getattr(getattr(provider, "_measurement_consumer", None), "_reader_storages", None)
    if not isinstance(provider, MeterProvider) or storages is None:
        raise ConfigurationError("meter_provider must be an opentelemetry.sdk.metrics.MeterProvider")
    return [reader for reader in storages if not isinstance(reader, (PrometheusReader, PushReader))]


def shut_down(reader: MetricReader) -> None:
    """Export once more, where the reader does, and end it."""
    reader.shutdown(timeout_millis=EXPORT_SECONDS * 1e3)


def remove_reader(provider: MeterProvider, reader: MetricReader) -> None:
    """Take our reader out, shut down before: a reader that is out already has nothing to export any more."""
    shut_down(reader)
    # The SDK would wait for an application's callback that hangs while it holds a lock of all providers.
    with getattr(getattr(provider, "_measurement_consumer", None), "_lock", nullcontext()):
        pass
    provider.remove_metric_reader(reader)


def flush(reader: MetricReader) -> None:
    """Let an application's reader export what it has, unless the application has shut it down."""
    if not getattr(reader, "_shutdown", False):
        reader.force_flush(timeout_millis=EXPORT_SECONDS * 1e3)
