"""Hostile and many clients of an endpoint: each goes on until it is told to end (`abuse.py`, `tests/test_abuse.py`)."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class Event(Protocol):
    """Of threads or of processes."""

    def is_set(self) -> bool:
        """Whether it has come."""

    def wait(self, timeout: float | None = None) -> bool:
        """Until it comes, or so many seconds."""


Attack = Callable[[int, Event], None]
"""Takes the endpoint's port."""
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


def _connected(port: int, receive: int = 0) -> socket.socket:
    found = socket.socket()
    found.settimeout(20)
    if receive:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    found.connect(("127.0.0.1", port))
    return found


def _crowd(number: int, ended: Event, once: Callable[[], None]) -> None:
    """So many threads that do something again and again."""

    def loop() -> None:
        while not ended.is_set():
            with suppress(OSError, http.client.HTTPException):
                once()

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    ended.wait()


def half_requests(port: int, ended: Event) -> None:
    """200 connections that send half a request and stay; one that is cut comes again a second later."""

    def stay() -> None:
        with _connected(port) as client:
            client.sendall(GET[:20])
            client.settimeout(0.5)
            while not ended.is_set():
                with suppress(TimeoutError):
                    if not client.recv(1):
                        break
        ended.wait(1.0)

    _crowd(200, ended, stay)


def drips(port: int, ended: Event) -> None:
    """50 connections that send a byte of a request every half second."""

    def drip() -> None:
        with _connected(port) as client:
            for byte in GET * 100:
                client.sendall(bytes([byte]))
                if ended.wait(0.5):
                    return

    _crowd(50, ended, drip)


def scrapers(port: int, ended: Event) -> None:
    """50 clients that scrape without a pause, each on a connection that it keeps."""
    kept = threading.local()

    def once() -> None:
        if not hasattr(kept, "connection"):
            kept.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            kept.connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
            kept.connection.getresponse().read()
        except BaseException:
            kept.connection.close()
            del kept.connection
            raise

    _crowd(50, ended, once)


def snapshots(port: int, ended: Event) -> None:
    """20 clients that ask for the snapshot without a pause."""

    def once() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/snapshot")
        connection.getresponse().read()
        connection.close()

    _crowd(20, ended, once)


def slow_readers(port: int, ended: Event) -> None:
    """60 clients that ask for much and read a kilobyte a second."""

    def read() -> None:
        with _connected(port, receive=2048) as client:
            client.sendall(GET * 50)
            while not ended.wait(1.0) and client.recv(1024):
                pass

    _crowd(60, ended, read)


def large_headers(port: int, ended: Event) -> None:
    """8 clients that send headers of 64 KiB, and ten times that."""

    def send() -> None:
        for lines in (1, 10):
            with _connected(port) as client:
                client.sendall(b"GET /metrics HTTP/1.1\r\n" + (b"X: " + b"x" * 65_000 + b"\r\n") * lines + b"\r\n")
                while client.recv(65_536):
                    pass
        ended.wait(0.05)

    _crowd(8, ended, send)


def pipelines(port: int, ended: Event) -> None:
    """8 clients that send a hundred requests at once and read the answers."""

    def send() -> None:
        with _connected(port) as client:
            client.sendall(GET * 100)
            while client.recv(1 << 20) and not ended.is_set():
                pass

    _crowd(8, ended, send)


def vanishing(port: int, ended: Event) -> None:
    """8 clients that ask and are gone before the answer, by a reset."""

    def vanish() -> None:
        with _connected(port) as client:
            client.sendall(GET)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ended.wait(0.02)

    _crowd(8, ended, vanish)


ATTACKS: tuple[Attack, ...] = (
    *(half_requests, drips, scrapers, snapshots, slow_readers, large_headers, pipelines, vanishing),
)
