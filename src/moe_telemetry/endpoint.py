"""The HTTP server on the serving host: `/metrics`, `/-/healthy`, `/snapshot` and a page of links.

Loopback unless asked otherwise. prometheus_client chooses the format and writes it (rendering); what is
here instead of its server is what that lacks: routes, HEAD, `gzip;q=0`, bounds on connections and their silence, on
header and on what many scrapes at once cost, a name lookup less.
"""

from __future__ import annotations

import gzip
import logging
import math
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from typing import Any, cast
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from . import connections
from .connections import Connection, Server
from .pages import accepts_gzip, encoder, page
from .rendering import render
from .rounds import Rounds
from .settings import ConfigurationError
from .snapshot import encoded

logger = logging.getLogger("moe_telemetry")

SEND_SECONDS = 5.0
"""A client has so long to take an answer."""
MAX_REQUESTS = 100
"""Answers on one connection, behind which it is closed: nobody holds one for ever."""
MAX_HEADER = 131_072
"""Bytes of a request line and its header: the standard library takes a hundred lines of 64 KiB each."""
MAX_WAITING = 112
"""Requests that wait for a reply to be made; a further one is refused at once, and the rest of the connections
(MAX_CONNECTIONS) are for the paths that cost nothing."""
TURN_SECONDS = 10.0
"""How long they wait: a reply before theirs may hang in an application's callback."""
FINISH_SECONDS = 3.0
"""How long `close` lets answers in progress finish."""
CHUNK = 65_536
"""Bytes sent at a time, each in what is left of SEND_SECONDS: TLS knows no deadline of more than one write."""
GZIP_LEVEL = 1
"""Prometheus asks for gzip each time; the default level costs several times the rendering."""
GZIP_LEAST = 1024
"""Bytes below which compression is not worth its header."""
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"

Snapshot = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Reply:
    """What is sent; `encoding` where `body` is compressed, `allow` the methods where one was refused."""

    status: HTTPStatus
    content_type: str
    body: bytes
    encoding: str = ""
    allow: str = ""


_BUSY = Reply(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, b"too many requests at a time\n")
_FAILED = Reply(HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, b"see the process' log\n")
_REFUSED = Reply(HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b"GET and HEAD only\n", allow="GET, HEAD")
_HEALTHY = Reply(HTTPStatus.OK, TEXT, b"moe_telemetry is healthy\n")
_NOT_HERE = Reply(HTTPStatus.NOT_FOUND, TEXT, b"not here; see /\n")


class Endpoint:
    """The server; `url` ends without a slash, `port` is the one bound (0 asks for any free one)."""

    def __init__(
        self, registry: CollectorRegistry, snapshot: Snapshot, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._server = _bind(registry, snapshot, host, port, tls)
        self.port: int = self._server.server_address[1]
        bound = str(self._server.server_address[0])
        shown = f"[{bound}]" if ":" in bound else bound
        self.url = f"{'http' if tls is None else 'https'}://{shown}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="moe-telemetry-http", daemon=True)
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
            self._server.shutdown()
            if threading.current_thread() is not self._thread and self._thread.is_alive():
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
        self._server.abandon()


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def abandon_all() -> None:
    """In a forked child: abandon what was open in the parent, also what it was just opening or closing."""
    for endpoint in list(_endpoints):
        endpoint.abandon()
    _endpoints.clear()


class _Server(Server):
    """What handlers share."""

    scraped = -math.inf
    """When the latest scrape began (time.monotonic) of those that were answered in full."""

    def __init__(
        self,
        address: Any,
        family: socket.AddressFamily,
        registry: CollectorRegistry,
        snapshot: Snapshot,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.registry = registry
        self.snapshot = snapshot
        self.waiting = threading.Semaphore(MAX_WAITING)
        # Apart: an application's collector that hangs shall not hold up the snapshot.
        self.scrapes: Rounds[Reply] = Rounds()
        self.snapshots: Rounds[Reply] = Rounds()
        super().__init__(address, family, tls)

    def answer(self, connection: Connection, client_address: Any) -> None:
        _Handler(connection, client_address, self)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # a request that is none is refused with a status line, too
    server_version = "moe_telemetry"
    sys_version = ""

    def __init__(self, connection: Connection, client_address: Any, server: _Server) -> None:
        self._state = connection
        self._answered = 0
        super().__init__(connection.socket, client_address, server)

    def setup(self) -> None:
        super().setup()
        self._header = _Header(self.rfile)
        self.rfile = cast(Any, self._header)

    def handle_one_request(self) -> None:
        self._header.left = MAX_HEADER
        super().handle_one_request()

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _refuse(self) -> None:
        self.close_connection = True  # a body may follow that nobody reads
        self._send(_REFUSED)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, with_body: bool) -> None:
        begin = time.monotonic()
        self._state.answering = True
        self._answered += 1
        try:
            impatient = self._header.has_more(self.connection)
        except OSError:  # gone already: nothing is made for it
            self.close_connection = True
            return
        if impatient or self._answered >= MAX_REQUESTS or self._state.last or self._has_body():
            self.close_connection = True
        try:
            reply = self._route()
            self._send(reply, with_body=with_body)
            if with_body and reply.status is HTTPStatus.OK and self._asked() == "/metrics":
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
        path, server = self._asked(), self.server
        if path == "/-/healthy":
            return _HEALTHY
        if path == "/metrics":
            encode, content_type = encoder(self.headers.get("Accept", ""))
            make = partial(render, server.registry, encode, content_type)
            return self._shared(path, server.scrapes, content_type, make)
        if path == "/snapshot":
            return self._shared(path, server.snapshots, JSON, lambda: encoded(server.snapshot()))
        if path == "/":
            return self._shared(path, server.snapshots, HTML, lambda: page(server.snapshot()).encode())
        return _NOT_HERE

    def _shared(self, path: str, rounds: Rounds[Reply], content_type: str, make: Callable[[], bytes]) -> Reply:
        """A reply that all who wait for one of its type get; or that there are too many, or that it failed."""
        zipped = accepts_gzip(self.headers.get("Accept-Encoding", ""))
        if not self.server.waiting.acquire(blocking=False):
            return _BUSY
        try:
            return rounds.ask((content_type, zipped), lambda: _made(path, content_type, zipped, make), TURN_SECONDS)
        except TimeoutError:
            return _BUSY
        finally:
            self.server.waiting.release()

    def _send(self, reply: Reply, with_body: bool = True) -> None:
        self.send_response(reply.status)
        if reply.allow:
            self.send_header("Allow", reply.allow)
        if reply.encoding:
            self.send_header("Content-Encoding", reply.encoding)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Vary", "Accept, Accept-Encoding")
        self.send_header("Content-Length", str(len(reply.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self._state.sending = begin = time.monotonic()
        try:
            self.connection.settimeout(SEND_SECONDS)
            self.end_headers()
            body = memoryview(reply.body)  # one body for all who share it
            for start in range(0, len(body) if with_body else 0, CHUNK):
                left = begin + SEND_SECONDS - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the client takes too long")
                self.connection.settimeout(left)
                self.wfile.write(body[start : start + CHUNK])
            self.connection.settimeout(connections.IDLE_SECONDS)
        finally:
            self._state.sending = None

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class _Header:
    """A request's stream that gives `left` bytes of lines, and a last one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.left = MAX_HEADER

    def readline(self, size: int = -1) -> bytes:
        """A line, as the stream's; LineTooLong, which is answered with 431, when the header is."""
        line: bytes = self._stream.readline(size)
        self.left -= len(line)
        if self.left < 0:
            raise LineTooLong("header")
        return line

    def has_more(self, connection: socket.socket) -> bool:
        """Whether the client sends on without waiting for its answer; OSError when it is gone.

        It gets one answer and the end of the connection: a client that pipelines would have a hundred in work.
        """
        connection.settimeout(0.0)
        try:
            return bool(self._stream.peek(1))
        except ssl.SSLWantReadError:
            return False
        finally:
            connection.settimeout(connections.IDLE_SECONDS)

    def close(self) -> None:
        self._stream.close()


def _made(path: str, content_type: str, zipped: bool, make: Callable[[], bytes]) -> Reply:
    """A reply of that type; what `make` raises is in the log and not in the reply."""
    try:
        body = make()
    except TimeoutError:  # its turn at a registry that others collect, too, did not come
        return _BUSY
    except Exception:
        logger.exception("%s could not be answered", path)
        return _FAILED
    if zipped and len(body) > GZIP_LEAST:
        return Reply(HTTPStatus.OK, content_type, gzip.compress(body, GZIP_LEVEL), encoding="gzip")
    return Reply(HTTPStatus.OK, content_type, body)


def _bind(registry: CollectorRegistry, snapshot: Snapshot, host: str, port: int, tls: ssl.SSLContext | None) -> _Server:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, ValueError):  # ValueError: a host with a NUL, or that IDNA cannot encode
        raise ConfigurationError(f"cannot serve metrics: the host {host!r} is no address of this machine") from None
    try:
        return _Server(address, family, registry, snapshot, tls)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigurationError(
            f"cannot serve metrics on {host} port {port}: {why}; choose another with port=, --port or "
            "OTEL_EXPORTER_PROMETHEUS_PORT (0 takes any free one)"
        ) from None
