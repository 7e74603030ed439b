"""Start and stop: owns the provider, the readers and the endpoint of one telemetry, and what the recorder feeds."""

from __future__ import annotations

import atexit
import logging
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from prometheus_client import CollectorRegistry

from . import hooks, processes, recording, snapshot
from .collection import Source
from .endpoint import Endpoint, abandon_all
from .hooks import Recorder
from .otlp import otlp_reader
from .providers import EXPORT_SECONDS, flush, readers_of, remove_reader, resource, shut_down
from .readers import PrometheusReader, always_collect, wrap
from .routing_trace import RoutingTrace, TraceError
from .settings import ConfigurationError, Settings, resolve
from .store import Identity, Store
from .tls import server_context
from .version import __version__

logger = logging.getLogger("moe_telemetry")

_live: list[Telemetry] = []
"""Running telemetries, the latest last."""
_switching = threading.RLock()
"""Held while `_live` and what recorders feed change together; re-entrant, since a signal handler may stop too."""
LEAST_SECONDS = 1.0
"""How long it waits for them where answers in progress have taken that time already."""


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
        self._endings: list[Callable[[], object]] = []
        self._end_feed: Callable[[], None] | None = None
        self._unwound = 0.0
        self._snapshot_file: Path | None = None
        self._trace: RoutingTrace | None = None
        self._make_way: Callable[[], object] | None = None
        """What a later start in this process calls first: it may want the same port."""
        # Taken once and never given back: stop() never waits for it, not in a signal handler nor a forked child.
        self._stop_once = threading.Lock()
        self._pid = os.getpid()

    def snapshot(self) -> dict[str, Any]:
        """Exact totals now, after stop() too (keys: `snapshot.build`); no metrics where disabled.

        Counts what `routed_array` holds back of the calling thread's passes first.
        """
        self._store.drain()
        return snapshot.build(self._store, [] if self._source is None else self._source.families())

    def stop(self, linger: float = 0.0) -> None:
        """Turn the hooks off, then the endpoint and the readers; a second call does nothing.

        With `linger` the endpoint keeps serving the final totals until one more scrape, at most `linger` seconds; the
        snapshot file, where one was asked for, is written before.
        An application's push readers export once more before they lose our points. What does not come to an end
        within EXPORT_SECONDS, like an application's callback that hangs, is left to a thread and logged.

        Raises:
            ConfigurationError, TypeError: `linger` is no number of seconds. Nothing has changed then.
        """
        if not isinstance(linger, Real):
            raise TypeError(f"linger must be a number of seconds, not {type(linger).__name__}")
        if not 0 <= linger < math.inf:
            raise ConfigurationError(f"linger must be finite and not negative, not {linger}")
        if self._source is None or os.getpid() != self._pid or not self._stop_once.acquire(blocking=False):
            return
        try:
            self._finish()
            _logged(self._write_snapshot)
            if self._endpoint is not None and linger > 0 and not self._endpoint.in_own_thread():
                self._endpoint.wait_for_scrape(float(linger))
        finally:
            self._unwind()

    def _finish(self) -> None:
        """Record nothing more, and count what is held back: the totals are final."""
        self._silence()
        _logged(self._store.end)
        if self._trace is not None:
            _logged(self._trace.close)

    def _write_snapshot(self) -> None:
        if self._snapshot_file is not None:
            snapshot.write(self._snapshot_file, self.snapshot())

    def _write_trace(self, path: Path, limit: int) -> None:
        identity = self._store.identity
        run = {key: getattr(identity, key) for key in ("model", "runtime", "run", "version", "start_time")}
        try:
            self._trace = RoutingTrace(path, limit, run, self._store.curves)
        except TraceError as error:
            raise ConfigurationError(f"trace cannot be {str(path)!r}: {error}") from error
        self._undo.append(self._trace.close)
        self._trace.start()

    def _record(self) -> None:
        with _switching:
            self._undo.append(self._silence)
            self._end_feed = recording.feed(self._recorder, self._store)
            _live.append(self)
            processes.mark(running=True)

    def _silence(self) -> None:
        with _switching:
            if self._end_feed is not None:
                self._end_feed()
                self._end_feed = None
            if self in _live:
                _live.remove(self)
            processes.mark(running=bool(_live))

    def _unwind(self) -> None:
        """Undo every step, whatever one of them raises; what is no Exception goes on to the caller behind the last."""
        interrupt: BaseException | None = None
        self._unwound = time.monotonic()
        while self._undo:
            try:
                _logged(self._undo.pop())
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _end_readers(self) -> None:
        """Run what may wait for others side by side, until EXPORT_SECONDS behind the first step."""
        threads = []
        steps, self._endings = self._endings, []
        for step in steps:
            thread = threading.Thread(target=_logged, args=(step,), name="moe-telemetry-stop", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # an interpreter that ends starts no threads any more
                _logged(step)
            else:
                threads.append(thread)
        now = time.monotonic()
        deadline = max(self._unwound + EXPORT_SECONDS + 0.5, now + LEAST_SECONDS)  # behind the exporters' own deadline
        if self._in_own_thread():
            deadline = now  # it may hold what they wait for
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if deadline > now and any(thread.is_alive() for thread in threads):
            logger.warning(
                "telemetry is stopped, but a last export or an application's callback is not done within %.0f s: "
                "a thread waits for it",
                EXPORT_SECONDS,
            )

    def _in_own_thread(self) -> bool:
        """Whether a finalizer stops us in a thread that stopping would wait for."""
        pushing = [getattr(reader, "_daemon_thread", None) for reader in self._readers]
        return threading.current_thread() in pushing or (self._endpoint is not None and self._endpoint.in_own_thread())

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
    snapshot_file: str | os.PathLike[str] | None = None,
    pool_curve: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    trace_bytes: int | None = None,
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
        registry: a prometheus_client registry to expose, with what it holds already; an own one by default. One
            telemetry at a time can have it.
        meter_provider: an application's SDK provider. Its readers then export our points too, whatever its views
            drop, and our endpoint its instruments (synchronous ones from now on). The environment adds no OTLP
            reader to it, and no endpoint is opened where it has a Prometheus reader, unless `host` or `port` is
            given.
        decode_seq_max: a forward of at most so many tokens is decode where the phase is not named, 8 by default
            (MOE_TELEMETRY_DECODE_SEQ_MAX).
        snapshot_file: where stopping writes the totals, at the interpreter's end, too: what came behind the last
            scrape is then not lost (MOE_TELEMETRY_SNAPSHOT_FILE).
        pool_curve: of which layers to find out what pools of other sizes would have hit: "sample" (one of four), "all",
            or "off" (MOE_TELEMETRY_POOL_CURVE).
        trace: a file to which the routing of those layers is written, behind the runs that it has already:
            `moe-telemetry report --trace` finds out from it what other policies would have hit (MOE_TELEMETRY_TRACE).
        trace_bytes: how large that file may become, 64 MiB by default; what comes behind it is counted
            (MOE_TELEMETRY_TRACE_BYTES).
        recorder: the recorder to turn on. One recorder feeds one telemetry: a second start() takes it over until
            it is stopped.
        tls_cert, tls_key, tls_client_ca: PEM files to serve over TLS and to demand client certificates.

    Returns:
        The running telemetry. Under OTEL_SDK_DISABLED=true one that does nothing, with `url` None.

    Raises:
        ConfigurationError: a bad argument or variable, a taken port, a missing package. Nothing has changed then.
    """
    recording.check(recorder)
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
        snapshot_file=snapshot_file,
        pool_curve=pool_curve,
        trace=trace,
        trace_bytes=trace_bytes,
    )
    for warning in settings.warnings:
        logger.warning(warning)
    store = Store(_identity(settings), settings.decode_seq_max, settings.layer_ids, settings.pool_curve)
    if settings.disabled:
        return Telemetry(store, None, recorder)
    tls = server_context(tls_cert, tls_key, tls_client_ca)
    for each in _live.copy():
        if each._make_way is not None:
            each._make_way()
    telemetry = Telemetry(store, Source(store, settings.layers, process=meter_provider is None), recorder)
    telemetry._snapshot_file = settings.snapshot_file
    try:
        _expose(telemetry, settings, registry, meter_provider, tls)
        if settings.trace is not None:
            telemetry._write_trace(settings.trace, settings.trace_bytes)
        telemetry._record()
    except BaseException:
        telemetry._unwind()
        raise
    return telemetry


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
    foreign = [] if provider is None else readers_of(provider)
    endpoint = None
    # An application that serves Prometheus itself already shows our points there.
    if settings.explicit_endpoint or not any(isinstance(reader, PrometheusMetricReader) for reader in foreign):
        registry = CollectorRegistry(auto_describe=False) if registry is None else registry
        # First, so that a taken port changes nothing else.
        endpoint = Endpoint(registry, telemetry.snapshot, settings.host, settings.port, tls)
        telemetry._endpoint = endpoint
        telemetry._undo.append(endpoint.close)
    readers = telemetry._readers
    if settings.otlp or (settings.otlp_by_environment and provider is None):
        readers.append(otlp_reader(source))
        telemetry._endings.append(partial(shut_down, readers[-1]))
    if registry is not None and not any(getattr(reader, "_registry", None) is registry for reader in foreign):
        readers.append(PrometheusReader(source, registry))
        telemetry._endings.append(partial(shut_down, readers[-1]))
    # Undone from the list's end, so behind the endpoint: no scrape sees the series gone.
    telemetry._undo.insert(0, telemetry._end_readers)
    if provider is None:
        provider = MeterProvider(
            readers,
            resource=resource(settings, settings.port if endpoint is None else endpoint.port),
            exemplar_filter=AlwaysOffExemplarFilter(),
            shutdown_on_exit=False,
        )
        telemetry._undo.insert(0, provider.shutdown)
    else:
        for reader in foreign:
            telemetry._undo.insert(0, wrap(reader, source, provider))
        for number, reader in enumerate(readers):
            provider.add_metric_reader(reader)
            telemetry._endings[number] = partial(remove_reader, provider, reader)
    for reader in readers:
        always_collect(reader, provider, lambda: source.alive)
    if endpoint is not None:
        endpoint.serve()
        telemetry.url, telemetry.port = endpoint.url, endpoint.port
    # Last, since a start that fails exports nothing.
    telemetry._endings += [
        partial(flush, reader) for reader in foreign if isinstance(reader, PeriodicExportingMetricReader)
    ]


# -- processes and exit ---------------------------------------------------------------------------------------


def _logged(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception:
        logger.warning("telemetry did not stop cleanly", exc_info=True)


def _collect_nothing(*_: object, **__: object) -> None:
    return None


def _after_fork_in_child() -> None:
    """Hooks become no-ops: counts of a child would reach nobody, and the parent's locks may be held here for ever."""
    global _switching  # noqa: PLW0603
    _switching = threading.RLock()
    abandon_all()
    if not _live:
        return
    recording.abandon()
    for telemetry in _live:
        if telemetry._trace is not None:
            telemetry._trace.abandon()
        for reader in telemetry._readers:
            reader._set_collect_callback(_collect_nothing)  # type: ignore[arg-type]  # the SDK takes None
    _live.clear()
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
