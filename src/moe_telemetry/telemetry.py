"""Start and stop: owns the provider, the readers and the endpoint of one telemetry, and what the recorder feeds."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import ssl
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from types import TracebackType
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry

from . import catalog, hooks, processes, recording, snapshot
from .collection import Source
from .endpoint import Endpoint, abandon_all, tls_context
from .hooks import Recorder
from .otlp import otlp_reader
from .readers import SCOPE, PrometheusReader, PushReader, wrap
from .settings import ConfigurationError, Settings, resolve
from .store import Identity, Store
from .version import __version__

logger = logging.getLogger("moe_telemetry")

_live: list[Telemetry] = []
"""Running telemetries, the latest last; a recorder feeds the last one that has it."""
_switching = threading.RLock()
"""Held while `_live` and what recorders feed change together; re-entrant, since a signal handler may stop too."""
EXPORT_SECONDS = 3.0
"""How long stopping waits for a last export to a receiver that may be unreachable."""


class Telemetry:
    """A running telemetry; a context manager that stops it. Made by `start()`.

    Attributes: `url` of the endpoint without a trailing slash, and `port`; both None without an endpoint.
    """

    def __init__(self, store: Store, source: Source | None, recorder: Recorder) -> None:
        self.url: str | None = None
        self.port: int | None = None
        self._store = store
        self._source = source
        self._recorder = recorder
        self._endpoint: Endpoint | None = None
        self._readers: list[MetricReader] = []
        self._undo: list[Callable[[], object]] = []
        # Taken once and never given back: stop() never waits for it, not in a signal handler nor a forked child.
        self._stop_once = threading.Lock()
        self._pid = os.getpid()

    def snapshot(self) -> dict[str, Any]:
        """Exact totals now, after stop() too (keys: `snapshot.build`); no metrics where disabled."""
        return snapshot.build(self._store, [] if self._source is None else self._source.families())

    def stop(self, linger: float = 0.0) -> None:
        """Turn the hooks off, then the endpoint and the readers; a second call does nothing.

        With `linger` the endpoint keeps serving the final totals until one more scrape, at most `linger` seconds.
        """
        if self._source is None or os.getpid() != self._pid or not self._stop_once.acquire(blocking=False):
            return
        with _switching:
            _live.remove(self)
            _feed(self._recorder)
        self._store.ended = True  # a pass cut off here would age in every later snapshot
        if self._endpoint is not None and linger > 0:
            self._endpoint.wait_for_scrape(linger)
        self._unwind()

    def _unwind(self) -> None:
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:
                logger.warning("telemetry did not stop cleanly", exc_info=True)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(
    model: str | None = None,
    runtime: str | None = None,
    run: str | None = None,
    num_layers: int | Iterable[int] | None = None,
    host: str | None = None,
    port: int | None = None,
    layers: str | None = None,
    otlp: bool = False,
    registry: CollectorRegistry | None = None,
    meter_provider: MeterProvider | None = None,
    *,
    decode_seq_max: int | None = None,
    recorder: Recorder = hooks.recorder,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_client_ca: str | None = None,
) -> Telemetry:
    """Start telemetry: turn the hooks on and serve what they record.

    Args:
        model: the model's name, for the run info and the GenAI metrics (MOE_TELEMETRY_MODEL).
        runtime: the runtime's name (MOE_TELEMETRY_RUNTIME).
        run: a name for this run; the start time is added, so that each start is a run of its own
            (MOE_TELEMETRY_RUN).
        num_layers: number of MoE layers, or their ids: their counters then exist at 0 before the first event.
        host, port: where to serve; 127.0.0.1:9464 by default, port 0 takes a free one
            (OTEL_EXPORTER_PROMETHEUS_HOST, OTEL_EXPORTER_PROMETHEUS_PORT).
        layers: "all", or "off" to drop the label `layer` (MOE_TELEMETRY_LAYERS).
        otlp: also push over OTLP (extra `otlp`; OTEL_METRICS_EXPORTER=otlp does the same). The exporter takes its
            endpoint, protocol and interval from OpenTelemetry's variables.
        registry: a prometheus_client registry to expose, with what it holds already; an own one by default.
        meter_provider: an application's SDK provider. Its readers then export our points too, and our endpoint
            its instruments (synchronous ones from now on). The environment adds no OTLP reader to it, and no
            endpoint is opened where it has a Prometheus reader, unless `host` or `port` is given.
        decode_seq_max: a forward of at most so many tokens is decode where the phase is not named, 8 by default
            (MOE_TELEMETRY_DECODE_SEQ_MAX).
        recorder: the recorder to turn on. One recorder feeds one telemetry: a second start() takes it over until
            it is stopped.
        tls_cert, tls_key, tls_client_ca: PEM files to serve over TLS and to demand client certificates.

    Returns:
        The running telemetry. Under OTEL_SDK_DISABLED=true one that does nothing, with `url` None.

    Raises:
        ConfigurationError: a bad argument or variable, a taken port, a missing package. Nothing has changed then.
    """
    if not isinstance(recorder, Recorder):
        raise ConfigurationError(f"recorder must be a moe_telemetry.Recorder, not {type(recorder).__name__}")
    if registry is not None and not isinstance(registry, CollectorRegistry):
        raise ConfigurationError(f"registry must be a prometheus_client registry, not {type(registry).__name__}")
    settings = resolve(
        model=model,
        runtime=runtime,
        run=run,
        num_layers=num_layers,
        host=host,
        port=port,
        layers=layers,
        otlp=otlp,
        decode_seq_max=decode_seq_max,
    )
    for warning in settings.warnings:
        logger.warning(warning)
    store = Store(_identity(settings), settings.decode_seq_max, settings.layer_ids)
    if settings.disabled:
        return Telemetry(store, None, recorder)
    tls = _tls(tls_cert, tls_key, tls_client_ca)
    telemetry = Telemetry(store, Source(store, settings.layers, process=meter_provider is None), recorder)
    try:
        _expose(telemetry, settings, registry, meter_provider, tls)
    except BaseException:
        telemetry._unwind()
        raise
    with _switching:
        _live.append(telemetry)
        _feed(recorder)
    return telemetry


def _tls(cert: str | None, key: str | None, client_ca: str | None) -> ssl.SSLContext | None:
    if cert is not None:
        return tls_context(cert, key, client_ca)
    if key is not None or client_ca is not None:
        raise ConfigurationError("tls_key and tls_client_ca need tls_cert, or metrics would be served in the clear")
    return None


# -- building -------------------------------------------------------------------------------------------------


def _identity(settings: Settings) -> Identity:
    now = time.time()
    begin = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    run = f"{settings.run} {begin}" if settings.run else begin
    return Identity(settings.model, settings.runtime, run, __version__, start_time=now)


def _expose(
    telemetry: Telemetry,
    settings: Settings,
    registry: CollectorRegistry | None,
    provider: MeterProvider | None,
    tls: ssl.SSLContext | None,
) -> None:
    source = telemetry._source
    assert source is not None
    foreign = [] if provider is None else _readers_of(provider)
    endpoint = None
    # An application that serves Prometheus itself already shows our points there.
    if settings.explicit_endpoint or not any(isinstance(reader, PrometheusMetricReader) for reader in foreign):
        registry = CollectorRegistry(auto_describe=False) if registry is None else registry
        # First, so that a taken port changes nothing else.
        endpoint = Endpoint(registry, telemetry.snapshot, settings.host, settings.port, tls)
        telemetry._endpoint = endpoint
        telemetry._undo.append(endpoint.close)
    # Undone from the list's end, so behind the endpoint: no scrape sees the series gone.
    readers = telemetry._readers
    if settings.otlp or (settings.otlp_by_environment and provider is None):
        readers.append(otlp_reader(source))
    if registry is not None:
        readers.append(PrometheusReader(source, registry))
    telemetry._undo[:0] = [partial(reader.shutdown, timeout_millis=EXPORT_SECONDS * 1e3) for reader in readers]
    if provider is None:
        provider = MeterProvider(
            readers,
            resource=_resource(settings, endpoint),
            exemplar_filter=AlwaysOffExemplarFilter(),
            shutdown_on_exit=False,
        )
        telemetry._undo.insert(0, provider.shutdown)
    else:
        telemetry._undo[:0] = [wrap(reader, source) for reader in foreign]
        for reader in readers:
            provider.add_metric_reader(reader)
            telemetry._undo.insert(0, partial(_remove_reader, provider, reader))
    telemetry._undo.insert(0, _show_run(provider, source.store.identity))
    if endpoint is not None:
        endpoint.serve()
        telemetry.url, telemetry.port = endpoint.url, endpoint.port


def _resource(settings: Settings, endpoint: Endpoint | None) -> Resource:
    """The environment's resource, with a name and an instance id where it gives none.

    The id is stable: a random one would make every restart a new set of series at an OTLP backend.
    """
    resource = Resource.create({})
    ours: dict[str, str] = {}
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        ours["service.name"] = settings.runtime
    given = [pair.partition("=")[0].strip() for pair in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")]
    if "service.instance.id" not in given:
        port = settings.port if endpoint is None else endpoint.port
        ours["service.instance.id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{SCOPE}://{socket.gethostname()}:{port}"))
    return resource.merge(Resource(ours))


def _readers_of(provider: MeterProvider) -> list[MetricReader]:
    """An application's readers, those added later too, without our own; the SDK has no public way to ask."""
    storages = getattr(getattr(provider, "_measurement_consumer", None), "_reader_storages", None)
    if not isinstance(provider, MeterProvider) or storages is None:
        raise ConfigurationError("meter_provider must be an opentelemetry.sdk.metrics.MeterProvider")
    return [reader for reader in storages if not isinstance(reader, (PrometheusReader, PushReader))]


def _remove_reader(provider: MeterProvider, reader: MetricReader) -> None:
    """Take our reader out, shut down before: a reader that is out already has nothing to export any more."""
    reader.shutdown(timeout_millis=EXPORT_SECONDS * 1e3)
    provider.remove_metric_reader(reader)


_shown: weakref.WeakKeyDictionary[MeterProvider, list[Identity]] = weakref.WeakKeyDictionary()
"""What each provider's run info shows: an observable instrument cannot be taken back, only fall silent."""


def _show_run(provider: MeterProvider, identity: Identity) -> Callable[[], None]:
    """Export the run info as an instrument of the SDK, without which it would collect nothing (design D2)."""
    shown = _shown.get(provider)
    if shown is None:
        shown = _shown.setdefault(provider, [])
        meter = provider.get_meter(SCOPE, identity.version)
        meter.create_observable_gauge(
            catalog.RUN_INFO.name, [partial(_observe_run, shown)], catalog.RUN_INFO.unit, catalog.RUN_INFO.help
        )
    shown.append(identity)
    return partial(shown.remove, identity)


def _observe_run(shown: list[Identity], _: CallbackOptions) -> Iterable[Observation]:
    for identity in shown[-1:]:
        values = (identity.model, identity.run, identity.runtime, identity.version)
        yield Observation(1, dict(zip(catalog.RUN_INFO.keys, values, strict=True)))


# -- the recorder, processes and exit -------------------------------------------------------------------------


def _feed(recorder: Recorder) -> None:
    """Let the recorder write to the latest telemetry that has it, or turn it off."""
    current = [telemetry for telemetry in _live if telemetry._recorder is recorder]
    if current:
        recording.attach(recorder, current[-1]._store)
    else:
        recording.detach(recorder)
    processes.mark(running=bool(_live))


def _collect_nothing(*_: object, **__: object) -> None:
    return None


def _after_fork_in_child() -> None:
    """Hooks become no-ops: counts of a child would reach nobody, and the parent's locks may be held here for ever."""
    global _switching  # noqa: PLW0603
    _switching = threading.RLock()
    abandon_all()
    if not _live:
        return
    for telemetry in _live:
        recording.detach(telemetry._recorder)
        for reader in telemetry._readers:
            reader._set_collect_callback(_collect_nothing)  # type: ignore[arg-type]  # the SDK takes None
    _live.clear()
    recording.renew_lock()
    processes.mark(running=False)
    # Not by logging: a handler's stream may have been locked by another thread of the parent.
    with suppress(OSError):
        os.write(2, b"moe_telemetry: hooks are off in this forked process; call start() in it to record here too\n")


@atexit.register
def _stop_all() -> None:
    for telemetry in reversed(_live.copy()):
        telemetry.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
