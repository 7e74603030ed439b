"""The server below the routes: accepts, bounds and ends connections, a thread for each."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import ssl
import threading
import time
from contextlib import suppress
from http.server import HTTPServer
from socketserver import BaseRequestHandler
from typing import Any

logger = logging.getLogger("moe_telemetry")

IDLE_SECONDS = 15.0
"""A connection on which no request is complete for so long is closed, so that it cannot hold a thread."""
ALONE_SECONDS = 1.0
"""The same of one that is served by the accepting thread, while others wait."""
REAP_SECONDS = 1.0
"""How often they are looked for; one that is silent throughout ends by itself."""
MAX_CONNECTIONS = 128
"""One more, and the connection that has been silent longest makes room, or the one that is sent to longest."""
MAX_ENDING = 32
"""Connections that were cut and whose threads have not noticed yet; with more, new ones are refused."""
RATE, BURST = 200.0, 256.0
"""Connections accepted a second, and at once; the system keeps further ones waiting. Each costs half a millisecond."""
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
"""Not epoll, whose descriptor would stay open in a forked child."""


class Connection:
    """One client. `socket` becomes the TLS one behind the handshake; `answering` while a reply is made and sent.

    `sending`: since when one is sent. `last`: the next request is the last that is answered.
    """

    def __init__(self, request: socket.socket) -> None:
        self.socket = request
        self.answering = False
        self.is_cut = False
        self.last = False
        self.sending: float | None = None
        self.thread: int | None = None
        self.since = time.monotonic()

    def cut(self) -> None:
        """End it from outside its thread, which then finds the end of the stream and closes the socket.

        Not by SSLSocket.shutdown, which would turn the other thread's next read into one of ciphertext.
        """
        self.is_cut = True
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


class _Pace:
    """Lets RATE of something through a second, and BURST at once."""

    def __init__(self) -> None:
        self._left = BURST
        self._at = time.monotonic()

    def wait(self) -> None:
        """Count one, and wait where there are too many."""
        now = time.monotonic()
        self._left = min(BURST, self._left + RATE * (now - self._at)) - 1.0
        self._at = now
        if self._left < 0.0:
            time.sleep(1.0 / RATE)


def _is_gone(client: socket.socket) -> bool:
    """Whether the other end has reset the connection, or ended it without a word.

    What it sent ahead of a reset can still be read, and does not make it worth an answer.
    """
    if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return True
    client.setblocking(False)
    try:
        return not client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


class Server(HTTPServer):
    """Listens from construction on; a subclass' `answer` serves a connection, in a thread of its own."""

    request_queue_size = 256

    def __init__(self, address: Any, family: socket.AddressFamily, tls: ssl.SSLContext | None = None) -> None:
        self.address_family = family
        self.tls = tls
        self.closing = False
        self._connections: set[Connection] = set()
        self._changed = threading.Condition()
        self._stopping = False
        self._wakes, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        try:
            super().__init__(address, BaseRequestHandler)
        except BaseException:
            self._wakes.close()
            self._wake.close()
            raise

    def answer(self, connection: Connection, client_address: Any) -> None:
        """Read and answer requests until the connection ends; what is raised ends it."""
        raise NotImplementedError

    # -- the accepting thread ----------------------------------------------------------------------------------

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

    def serve_forever(self, poll_interval: float = REAP_SECONDS) -> None:
        """Accept until `shutdown`, which ends the wait at once: the standard library's looks for it every half second,
        and wakes up for that also where nothing happens."""
        with _Selector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            reaped = time.monotonic()
            pace = _Pace()
            while not self._stopping:
                ready = [key.fileobj for key, _ in selector.select(poll_interval if self._connections else None)]
                if self._stopping:
                    break
                if self.socket in ready and self._accept():
                    pace.wait()
                if time.monotonic() - reaped >= poll_interval:
                    self._reap()
                    reaped = time.monotonic()

    def shutdown(self) -> None:
        """End `serve_forever` soon, without waiting for it."""
        self._stopping = True
        with suppress(OSError):
            self._wake.send(b"\0")

    def server_close(self) -> None:
        super().server_close()
        self._wake.close()
        self._wakes.close()

    def _accept(self) -> bool:
        """Take the next connection; whether there was one, and its client is still there."""
        try:
            request, client = self.get_request()
        except BlockingIOError:
            return False
        except OSError:
            # Out of descriptors, the listening socket stays readable: without a pause the loop would spin.
            time.sleep(0.1)
            return False
        if _is_gone(request):
            request.close()
            return False
        try:
            self.process_request(request, client)
        except Exception:
            logger.debug("connection from %s could not be served", client, exc_info=True)
            self.shutdown_request(request)
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        connection = Connection(request)
        if not self._admit(connection):
            self.shutdown_request(request)
            return
        try:
            threading.Thread(
                target=self._serve, args=(connection, client_address), name="moe-telemetry-connection", daemon=True
            ).start()
        except RuntimeError:
            # No more threads; or Python 3.12 behind the end of the main thread, which starts none while others run on.
            connection.last = True
            self._serve(connection, client_address)

    def _admit(self, connection: Connection) -> bool:
        with self._changed:
            if len(self._connections) - sum(each.is_cut for each in self._connections) >= MAX_CONNECTIONS:
                oldest = self._dispensable()
                if oldest is None:
                    return False
                oldest.cut()
            if self.closing or len(self._connections) >= MAX_CONNECTIONS + MAX_ENDING:
                return False
            self._connections.add(connection)
            return True

    def _dispensable(self) -> Connection | None:
        """The one that is silent longest, or else sent to longest; an answer that is being made is waited for."""
        known = [each for each in self._connections if not each.is_cut]
        if silent := [each for each in known if not each.answering]:
            return min(silent, key=lambda each: each.since)
        sending = [(each.sending, number) for number, each in enumerate(known) if each.sending is not None]
        return known[min(sending)[1]] if sending else None

    def _reap(self) -> None:
        """Cut those that send a request so slowly that their silence never lasts."""
        before = time.monotonic() - IDLE_SECONDS
        with self._changed:
            for connection in list(self._connections):
                if not connection.answering and connection.since < before:
                    connection.cut()

    # -- a connection's thread ---------------------------------------------------------------------------------

    def _serve(self, connection: Connection, client_address: Any) -> None:
        connection.thread = threading.get_ident()
        try:
            connection.socket.settimeout(ALONE_SECONDS if connection.last else IDLE_SECONDS)
            if self.tls is not None:
                # Here and not on the listening socket, where one client's handshake would hold up all others.
                wrapped = self.tls.wrap_socket(connection.socket, server_side=True, do_handshake_on_connect=False)
                connection.socket = wrapped  # before the handshake, so that a client silent in it can be cut
                wrapped.do_handshake()
            self.answer(connection, client_address)
        except Exception:
            logger.debug("connection from %s ended badly", client_address, exc_info=True)
        finally:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        with self._changed:  # closed inside, so that nobody cuts a descriptor that is somebody else's by then
            self.shutdown_request(connection.socket)
            self._connections.discard(connection)
            self._changed.notify_all()

    # -- the end -----------------------------------------------------------------------------------------------

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

    def abandon(self) -> None:
        """In a forked child: close what is the parent's, without the lock, which may be held here for ever."""
        for inherited in (self.socket, self._wake, self._wakes):
            inherited.close()
        for connection in list(self._connections):
            with suppress(OSError):
                os.close(connection.socket.detach())  # close() waits for files made from the socket
