"""The HTTP server on the serving host: `/metrics`, `/-/healthy`, `/snapshot` and a page of links.

Loopback unless asked otherwise (design D14). prometheus_client renders; what is here instead of its server is
what that lacks: routes, HEAD, `gzip;q=0`, a bound on connections and on their silence, a name lookup less.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from .pages import accepts_gzip, encoder, page
from .settings import ConfigurationError

logger = logging.getLogger("moe_telemetry")

IDLE_SECONDS = 15.0
"""A connection that is silent for so long is closed, so that it cannot hold a thread."""
SEND_SECONDS = 5.0
"""A client has so long to take an answer."""
MAX_CONNECTIONS = 32
"""One more, and the connection that has been silent longest makes room, or the one that is sent to longest."""
MAX_REQUESTS = 100
"""Answers on one connection, behind which it is closed: a client that pipelines cannot hold it."""
MAX_SCRAPES = 4
"""Scrapes that run or wait at a time; a further one is refused at once, so that the other paths stay reachable."""
FINISH_SECONDS = 3.0
"""How long `close` lets answers in progress finish."""
CHUNK = 65_536
"""Bytes sent at a time, each in what is left of SEND_SECONDS: TLS knows no deadline of more than one write."""
GZIP_LEVEL = 1
"""Prometheus asks for gzip each time; the default level costs several times the rendering."""

Snapshot = Callable[[], dict[str, Any]]
Reply = tuple[HTTPStatus, str, bytes]

_BUSY: Reply = (HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", b"too many scrapes at a time\n")


class Endpoint:
    """The server; `url` ends without a slash, `port` is the one bound (0 asks for any free one)."""

    def __init__(
        self, registry: CollectorRegistry, snapshot: Snapshot, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._server = _bind(registry, snapshot, host, port)
        self.port: int = self._server.server_address[1]
        bound = str(self._server.server_address[0])
        self._server.tls = tls
        shown = f"[{bound}]" if ":" in bound else bound
        self.url = f"{'http' if tls is None else 'https'}://{shown}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="moe-telemetry-http", daemon=True
        )
        _endpoints.add(self)

    def serve(self) -> None:
        """Begin to answer; the port is bound and connections queue up since construction."""
        self._thread.start()

    def wait_for_scrape(self, seconds: float) -> bool:
        """Wait for a scrape that begins from now on to be answered in full; False when none was in time."""
        now = time.monotonic()
        while self._server.scraped < now:
            if time.monotonic() >= now + seconds:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """Free the port, let answers in progress finish, and end every connection.

        Called in a thread of ours, by a finalizer say, it does not wait for that thread.
        """
        try:
            if threading.current_thread() is self._thread:
                with suppress(RuntimeError):  # no thread starts while the interpreter ends, and this one ends with it
                    threading.Thread(target=self._server.shutdown, name="moe-telemetry-stop", daemon=True).start()
            elif self._thread.is_alive():
                self._server.shutdown()
                self._thread.join(timeout=FINISH_SECONDS)
        finally:
            try:
                self._server.server_close()
            finally:
                self._server.end_connections(0 if self.in_own_thread() else FINISH_SECONDS)

    def in_own_thread(self) -> bool:
        """Whether the current thread is the server's or one of its connections'."""
        return threading.current_thread() is self._thread or self._server.in_connection()

    def abandon(self) -> None:
        """In a forked child: close the inherited sockets, or the port stays taken when the parent ends."""
        self._server.socket.close()
        self._server.abandon_connections()


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def abandon_all() -> None:
    """In a forked child: abandon what was open in the parent, also what it was just opening or closing."""
    for endpoint in list(_endpoints):
        endpoint.abandon()
    _endpoints.clear()


class _Connection:
    """One client. `socket` becomes the TLS one behind the handshake; `answering` while a reply is made and sent.

    `sending`: since when one is sent.
    """

    def __init__(self, request: socket.socket) -> None:
        self.socket = request
        self.answering = False
        self.sending: float | None = None
        self.thread: int | None = None
        self.since = time.monotonic()

    def cut(self) -> None:
        """End it from outside its thread, which then finds the end of the stream and closes the socket.

        Not by SSLSocket.shutdown, which would turn the other thread's next read into one of ciphertext.
        """
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


class _Server(HTTPServer):
    request_queue_size = 64
    tls: ssl.SSLContext | None = None
    scraped = -math.inf
    """When the latest scrape began (time.monotonic) of those that were answered in full."""

    def __init__(self, address: Any, family: socket.AddressFamily, registry: CollectorRegistry, snapshot: Snapshot):
        self.address_family = family
        self.registry = registry
        self.snapshot = snapshot
        self.closing = False
        self._connections: set[_Connection] = set()
        self._changed = threading.Condition()
        self.scrapes = threading.Semaphore(MAX_SCRAPES)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            # '::' stands for every address of both families here, whatever the system's default.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        # A client may be gone between select and accept, which would then wait and keep `close` waiting.
        self.socket.setblocking(False)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except BlockingIOError:
            raise
        except OSError:
            # Out of descriptors, the listening socket stays readable: without a pause the loop would spin.
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        connection = _Connection(request)
        if not self._admit(connection):
            self.shutdown_request(request)
            return
        try:
            threading.Thread(
                target=self._serve, args=(connection, client_address), name="moe-telemetry-connection", daemon=True
            ).start()
        except RuntimeError:  # no more threads, or the interpreter is shutting down
            self._end(connection)

    def _admit(self, connection: _Connection) -> bool:
        with self._changed:
            if len(self._connections) >= MAX_CONNECTIONS:
                oldest = self._dispensable()
                if oldest is None:
                    return False
                oldest.cut()
                self._connections.discard(oldest)
            if self.closing:
                return False
            self._connections.add(connection)
            return True

    def _dispensable(self) -> _Connection | None:
        """The one that is silent longest, or else sent to longest; an answer that is being made is waited for."""
        known = list(self._connections)
        if silent := [each for each in known if not each.answering]:
            return min(silent, key=lambda each: each.since)
        sending = [(each.sending, number) for number, each in enumerate(known) if each.sending is not None]
        return known[min(sending)[1]] if sending else None

    def _serve(self, connection: _Connection, client_address: Any) -> None:
        connection.thread = threading.get_ident()
        try:
            connection.socket.settimeout(IDLE_SECONDS)
            if self.tls is not None:
                # Here and not on the listening socket, where one client's handshake would hold up all others.
                wrapped = self.tls.wrap_socket(connection.socket, server_side=True, do_handshake_on_connect=False)
                connection.socket = wrapped  # before the handshake, so that a client silent in it can be cut
                wrapped.do_handshake()
            _Handler(connection, client_address, self)
        except Exception:
            logger.debug("connection from %s ended badly", client_address, exc_info=True)
        finally:
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        with self._changed:  # closed inside, so that nobody cuts a descriptor that is somebody else's by then
            self.shutdown_request(connection.socket)
            self._connections.discard(connection)
            self._changed.notify_all()

    def end_connections(self, seconds: float) -> None:
        """End the silent ones, or a client that keeps its connection would be served past the end; then the others."""
        with self._changed:
            self.closing = True
            for connection in list(self._connections):
                if not connection.answering:
                    connection.cut()
            self._changed.wait_for(lambda: not self._connections, seconds)
            for connection in list(self._connections):
                if connection.thread != threading.get_ident():
                    connection.cut()

    def in_connection(self) -> bool:
        """Whether the current thread serves a connection."""
        return any(connection.thread == threading.get_ident() for connection in list(self._connections))

    def abandon_connections(self) -> None:
        """In a forked child: close what is the parent's, without the lock, which may be held here for ever."""
        for connection in list(self._connections):
            with suppress(OSError):
                os.close(connection.socket.detach())  # close() waits for files made from the socket


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # a request that is none is refused with a status line, too
    server_version = "moe_telemetry"
    sys_version = ""

    def __init__(self, connection: _Connection, client_address: Any, server: _Server) -> None:
        self._state = connection
        self._answered = 0
        super().__init__(connection.socket, client_address, server)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _refuse(self) -> None:
        self.close_connection = True  # a body may follow that nobody reads
        self._send((HTTPStatus.METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", b"GET and HEAD only\n"), allow=True)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, with_body: bool) -> None:
        begin = time.monotonic()
        self._state.answering = True
        self._answered += 1
        if self._answered >= MAX_REQUESTS or self._has_body():
            self.close_connection = True
        try:
            try:
                reply = self._route()
            except Exception:
                logger.exception("%s could not be answered", self.path[:80])
                reply = (HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", b"see the process' log\n")
            self._send(reply, with_body=with_body)
            if with_body and reply[0] is HTTPStatus.OK and self._asked() == "/metrics":
                self.server.scraped = max(self.server.scraped, begin)
        finally:
            self._state.since = time.monotonic()
            self._state.answering = False
            if self.server.closing:
                self.close_connection = True

    def _has_body(self) -> bool:
        """Whether a body follows, which nobody reads and which must not be taken for the next request."""
        return self.headers.get("Content-Length", "0").strip() != "0" or "Transfer-Encoding" in self.headers

    def _asked(self) -> str:
        """The path asked for, without the query; also of an absolute URI, which a proxy sends."""
        try:
            return urlsplit(self.path).path
        except ValueError:
            return ""

    def _route(self) -> Reply:
        path = self._asked()
        if path == "/metrics":
            return self._scrape()
        if path == "/-/healthy":
            return HTTPStatus.OK, "text/plain; charset=utf-8", b"moe_telemetry is healthy\n"
        if path == "/snapshot":
            return HTTPStatus.OK, "application/json", json.dumps(self.server.snapshot()).encode()
        if path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", page(self.server.snapshot()).encode()
        return HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"not here; see /\n"

    def _scrape(self) -> Reply:
        if not self.server.scrapes.acquire(blocking=False):
            return _BUSY
        try:
            encode, content_type = encoder(self.headers.get("Accept", ""))
            return HTTPStatus.OK, content_type, encode(self.server.registry)
        except TimeoutError:  # its turn did not come
            return _BUSY
        finally:
            self.server.scrapes.release()

    def _send(self, reply: Reply, with_body: bool = True, allow: bool = False) -> None:
        status, content_type, body = reply
        self.send_response(status)
        if allow:
            self.send_header("Allow", "GET, HEAD")
        if len(body) > 1024 and accepts_gzip(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, GZIP_LEVEL)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", content_type)
        self.send_header("Vary", "Accept, Accept-Encoding")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self._state.sending = begin = time.monotonic()
        try:
            self.connection.settimeout(SEND_SECONDS)
            self.end_headers()
            for start in range(0, len(body) if with_body else 0, CHUNK):
                left = begin + SEND_SECONDS - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the client takes too long")
                self.connection.settimeout(left)
                self.wfile.write(body[start : start + CHUNK])
            self.connection.settimeout(IDLE_SECONDS)
        finally:
            self._state.sending = None

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _bind(registry: CollectorRegistry, snapshot: Snapshot, host: str, port: int) -> _Server:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, ValueError):  # ValueError: a host with a NUL, or that IDNA cannot encode
        raise ConfigurationError(f"cannot serve metrics: the host {host!r} is no address of this machine") from None
    try:
        return _Server(address, family, registry, snapshot)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigurationError(
            f"cannot serve metrics on {host} port {port}: {why}; choose another with port=, --port or "
            "OTEL_EXPORTER_PROMETHEUS_PORT (0 takes any free one)"
        ) from None
