"""The HTTP server: formats, routes, refusals, hosts, TLS, slow and many clients, hostile label values."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import PLAIN, fetch, keep_alive, raw, samples, scrape
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from moe_telemetry import ConfigurationError, connections, endpoint, readers

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
TEXT = "text/plain; version=0.0.4"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
EITHER = (OPENMETRICS, TEXT)
"""prometheus_client has read what is no version in both ways."""


# -- formats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, TEXT),
        ("*/*", TEXT),
        ("text/plain", TEXT),
        (PLAIN, TEXT),
        ("application/json", TEXT),
        ("", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0", OPENMETRICS),
        ("application/openmetrics-text; version=abc", EITHER),
        ("application/openmetrics-text; version=1.0.0\r\n Set-Cookie: a=b", EITHER),
        (";;,,=;q", TEXT),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        ("text/plain;version=1.0.0;escaping=allow-utf-8", ("text/plain; version=1.0.0", TEXT)),
    ],
)
def test_accept_chooses_the_format(accept: str | None, content_type: str | tuple[str, ...], start) -> None:
    """Each Accept header gets its content type, and a body that is valid in it."""
    port = start().port
    header = b"" if accept is None else f"Accept: {accept}\r\n".encode()
    answer = raw(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"\nSet-Cookie" not in head
    found = re.search(rb"Content-Type: (.*)\r\n", head)
    assert found is not None
    assert found[1].decode().startswith(content_type)
    assert b"charset=utf-8" in found[1]
    if found[1].decode().startswith(OPENMETRICS):
        assert body.endswith(b"# EOF\n")
        assert list(openmetrics_families(body.decode()))
    else:
        assert b"# EOF" not in body
        assert samples(body.decode())


@pytest.mark.parametrize(
    ("accept_encoding", "compressed"),
    [
        (None, False),
        ("gzip", True),
        ("GZIP", True),
        ("deflate, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("*", True),
        ("*;q=0", False),
        ("identity", False),
        ("gzip;q=abc", False),
        ("br, zstd", False),
    ],
)
def test_gzip_only_where_it_is_allowed(accept_encoding: str | None, compressed: bool, start) -> None:
    """The body is compressed exactly when Accept-Encoding allows gzip with a weight above 0."""
    headers = {} if accept_encoding is None else {"Accept_Encoding": accept_encoding}
    _, reply, body = fetch(f"{start().url}/metrics", **headers)
    assert ("gzip" if compressed else None) == reply["Content-Encoding"]
    assert samples((gzip.decompress(body) if compressed else body).decode())
    assert "Accept, Accept-Encoding" == reply["Vary"]


# -- routes and refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/nope", "/metricsx", "/metrics/", "/favicon.ico", "/../etc/passwd", "/%2e%2e", "//["]
)
def test_unknown_paths_are_not_found(path: str, start) -> None:
    """Anything but the four routes is 404 and shows no metric."""
    answer = raw(start().port, f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"moe_" not in answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("path", ["/metrics?name[]=x", "http://example.org/metrics", "/metrics#x"])
def test_query_and_absolute_uri_reach_the_route(path: str, start) -> None:
    """A query, a fragment and a proxy's absolute URI are still the route."""
    assert raw(start().port, f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/metrics", "/", "/snapshot", "/-/healthy", "/nope"])
def test_head_has_the_headers_of_get_and_no_body(path: str, start) -> None:
    """HEAD answers with GET's status and header names, and nothing behind them."""
    telemetry = start()
    connection = http.client.HTTPConnection("127.0.0.1", telemetry.port, timeout=10)
    seen = {}
    for method in ("GET", "HEAD"):
        connection.request(method, path)
        reply = connection.getresponse()
        body = reply.read()
        seen[method] = (reply.status, [name for name, _ in reply.getheaders()], reply.headers["Content-Type"])
    assert seen["GET"] == seen["HEAD"]
    assert b"" == body
    connection.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_not_allowed(method: str, start) -> None:
    """Every method but GET and HEAD is 405 and names what is allowed."""
    answer = raw(start().port, f"{method} /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc".encode())
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nAllow: GET, HEAD\r\n" in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 65_536 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(500)) + b"\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\r\n\r\n",
        b"garbage\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET /metrics SMTP\r\n\r\n",
        b"FOO /metrics HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00 / HTTP/1.1\r\n\r\n",
    ],
    ids=["long path", "many headers", "long header", "TLS hello", "garbage", "HTTP 9", "SMTP", "FOO", "binary"],
)
def test_malformed_requests_are_refused(request_bytes: bytes, start) -> None:
    """A request that is none gets a 4xx or 5xx without a stack trace, and the next scrape is answered."""
    telemetry = start()
    answer = raw(telemetry.port, request_bytes)
    assert re.match(rb"HTTP/1.\d (4\d\d|50[15]) ", answer), answer[:200]
    for trace in (b"Traceback", b'File "', b".py"):
        assert trace not in answer
    assert scrape(telemetry)


def test_a_failing_collector_is_an_error_without_a_trace(start, caplog: pytest.LogCaptureFixture) -> None:
    """What an application's collector raises ends as a plain 500 and in the log, not in the body."""

    class Broken:
        def describe(self):
            return []

        def collect(self):
            raise RuntimeError("secret")

    registry = CollectorRegistry()
    registry.register(Broken())
    status, _, body = fetch(f"{start(registry=registry).url}/metrics")
    assert (500, b"see the process' log\n") == (status, body)
    assert "secret" in caplog.text


def test_healthy_and_snapshot(start, recorder) -> None:
    """/-/healthy says so, and /snapshot is the telemetry's snapshot as JSON."""
    telemetry = start()
    recorder.tokens(7)
    assert 200 == fetch(f"{telemetry.url}/-/healthy")[0]
    _, headers, body = fetch(f"{telemetry.url}/snapshot")
    assert "application/json" == headers["Content-Type"]
    series = json.loads(body)["metrics"]["moe.tokens"]["series"]
    assert {"labels": {"phase": "decode"}, "value": 7} in series
    assert telemetry.snapshot()["metrics"]["moe.tokens"]["series"] == series


def test_page_links_and_totals_are_escaped(start, recorder) -> None:
    """The page shows links and totals, and a hostile model name as text."""
    telemetry = start(model="<script>alert(1)</script>", runtime='"><img src=x>', run="a&b")
    recorder.tokens(1234)
    _, headers, body = fetch(f"{telemetry.url}/")
    page = body.decode()
    assert headers["Content-Type"].startswith("text/html")
    assert "<script>" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<td>moe.tokens</td><td>phase=decode</td><td>1,234</td>" in page
    assert "href=/metrics" in page


# -- hosts ----------------------------------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize(
    ("host", "bound", "reached_at"),
    [
        (None, {"127.0.0.1"}, ["127.0.0.1"]),
        ("127.0.0.1", {"127.0.0.1"}, ["127.0.0.1"]),
        ("localhost", {"127.0.0.1", "::1"}, ["localhost"]),
        ("", {"127.0.0.1"}, ["127.0.0.1"]),
        ("0.0.0.0", {"0.0.0.0"}, ["127.0.0.1"]),
        pytest.param("::1", {"::1"}, ["::1"], marks=ipv6),
        pytest.param("::", {"::"}, ["::1", "127.0.0.1"], marks=ipv6),
    ],
)
def test_host_decides_where_it_listens(host: str | None, bound: set[str], reached_at: list[str], start) -> None:
    """The listening socket is the documented one: loopback by default, '::' for both families."""
    telemetry = start(host=host)
    assert telemetry._endpoint._server.socket.getsockname()[0] in bound
    for address in reached_at:
        connection = http.client.HTTPConnection(address, telemetry.port, timeout=10)
        connection.request("GET", "/metrics")
        assert 200 == connection.getresponse().status
        connection.close()


def test_default_is_not_reachable_from_outside(start) -> None:
    """On the default host another address of the machine is refused."""
    telemetry = start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; names the interface that would be used
        except OSError:
            pytest.skip("this machine has loopback only")
        outside = probe.getsockname()[0]
    if outside.startswith("127."):
        pytest.skip("this machine has loopback only")
    with pytest.raises(OSError):  # noqa: PT011
        socket.create_connection((outside, telemetry.port), timeout=2)


@pytest.mark.parametrize("host", ["no.such.invalid", "256.0.0.1", "a\0b", "x" * 300, "\ud800", "[::1]", "a b"])
def test_a_bad_host_is_one_clear_sentence(host: str, start) -> None:
    """A host that is no address of this machine fails at start with one line that names it."""
    with pytest.raises(ConfigurationError, match=r"host .* is no address of this machine") as raised:
        start(host=host)
    assert "\n" not in str(raised.value)


def test_an_address_of_another_machine_is_a_clear_error(start) -> None:
    """An address that is not ours fails with the address and the reason."""
    with pytest.raises(ConfigurationError, match=r"cannot serve metrics on 192\.0\.2\.1 port 0: "):
        start(host="192.0.2.1")


# -- many and slow clients ------------------------------------------------------------------------------------


def test_concurrent_scrapes_are_complete(start, recorder) -> None:
    """Twelve scrapes at once, while hooks record, are each whole and without a line twice."""
    telemetry = start(num_layers=12)
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            recorder.forward(1)
            recorder.routed(3, {1, 2}, resident={1})
            recorder.forward_done(0.01)

    recorder.routed(3, {1, 2}, resident={1})
    recorder.forward_done(0.01)
    names = set(samples(scrape(telemetry)))
    worker = threading.Thread(target=work)
    worker.start()
    try:
        with ThreadPoolExecutor(12) as pool:
            texts = list(pool.map(scrape, [telemetry] * 24, [30] * 24))
    finally:
        done.set()
        worker.join()
    for text in texts:
        lines = text.splitlines()
        assert len(set(lines)) == len(lines)
        assert names == set(samples(text)) & names


def test_silent_connections_do_not_hold_up_a_scrape(start) -> None:
    """With more connections that send nothing than there may be, a scrape is answered at once."""
    telemetry = start()
    crowd = connections.MAX_CONNECTIONS + 8
    silent = [socket.create_connection(("127.0.0.1", telemetry.port), 10) for _ in range(crowd)]
    try:
        begin = time.monotonic()
        for _ in range(3):
            assert scrape(telemetry, timeout=5)
        assert 3 > time.monotonic() - begin
        kept = [each for each in telemetry._endpoint._server._connections if not each.is_cut]
        assert connections.MAX_CONNECTIONS >= len(kept)
    finally:
        for connection in silent:
            connection.close()


def test_dripping_connections_do_not_hold_up_a_scrape(start) -> None:
    """Nor do as many that have sent half a request line."""
    telemetry = start()
    crowd = connections.MAX_CONNECTIONS + 8
    dripping = [socket.create_connection(("127.0.0.1", telemetry.port), 10) for _ in range(crowd)]
    try:
        for connection in dripping:
            try:
                connection.sendall(b"GET /met")
            except OSError:
                continue
        assert scrape(telemetry, timeout=5)
    finally:
        for connection in dripping:
            connection.close()


def test_a_silent_client_is_disconnected(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that sends nothing is closed after the idle time, and its thread ends."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.3)
    telemetry = start()
    begin = time.monotonic()
    assert b"" == raw(telemetry.port, b"", timeout=10)
    assert 3 > time.monotonic() - begin
    while telemetry._endpoint._server._connections:  # the client sees the end before the thread has gone
        assert 10 > time.monotonic() - begin
        time.sleep(0.01)


def test_it_answers_where_no_thread_can_be_started(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Python 3.12 when the main thread has ended and others run on: one answer a connection."""
    telemetry = start()
    monkeypatch.setattr(connections, "ALONE_SECONDS", 0.2)
    monkeypatch.setattr(connections.threading, "Thread", _no_thread)
    with socket.create_connection(("127.0.0.1", telemetry.port), 10) as silent:
        status, headers, body = fetch(f"{telemetry.url}/metrics")
        assert (200, "close") == (status, headers["Connection"])
        assert b"moe_run_info" in body
        assert b"" == silent.recv(1)
    with socket.create_connection(("127.0.0.1", telemetry.port), 10) as connection:
        connection.sendall(2 * b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        with connection.makefile("rb") as stream:
            assert 1 == stream.read().count(b"HTTP/1.1 200")


def _no_thread(*_: object, **__: object) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_connections_that_do_not_end_are_not_made_room_for(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many cut connections as may be ending, a new one is refused; once they have ended it is answered."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(connections, "MAX_ENDING", 1)
    telemetry = start()
    server = telemetry._endpoint._server
    leave = threading.Event()
    answer = server.answer
    monkeypatch.setattr(server, "answer", lambda *_: leave.wait(20))
    clients = [socket.create_connection(("127.0.0.1", telemetry.port), 10) for _ in range(4)]
    clients[3].settimeout(10)
    assert b"" == clients[3].recv(1)
    assert 3 == len(server._connections)
    assert 1 <= sum(each.is_cut for each in server._connections)
    monkeypatch.setattr(server, "answer", answer)
    leave.set()
    assert scrape(telemetry)
    for client in clients:
        client.close()


def test_a_client_that_does_not_read_is_disconnected(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks and never reads costs one thread for the time to send, and no scrape of others."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(endpoint, "SEND_SECONDS", 0.5)
    telemetry = start()
    telemetry._endpoint._server.snapshot = lambda: {"large": "x" * 8_000_000}
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect(("127.0.0.1", telemetry.port))
        deaf.sendall(b"GET /snapshot HTTP/1.1\r\n\r\n")
        assert scrape(telemetry)
        deadline = time.monotonic() + 60
        while telemetry._endpoint._server._connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not telemetry._endpoint._server._connections


def test_deaf_clients_on_every_connection_make_room(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each connection taken by a client that asks for much and never reads, others are answered."""
    monkeypatch.setattr(endpoint, "SEND_SECONDS", 60.0)  # none of them goes by itself
    telemetry = start()
    server = telemetry._endpoint._server
    server.snapshot = lambda: {"large": "x" * 8_000_000}
    deaf = []
    try:
        for crowd in (endpoint.MAX_WAITING, connections.MAX_CONNECTIONS):  # no more may wait at a time
            while len(deaf) < crowd:
                client = socket.socket()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                client.connect(("127.0.0.1", telemetry.port))
                client.sendall(b"GET /snapshot HTTP/1.1\r\n\r\n")
                deaf.append(client)
            deadline = time.monotonic() + 30
            sent_to = 0
            while sent_to < crowd and time.monotonic() < deadline:
                time.sleep(0.02)
                sent_to = sum(each.sending is not None for each in list(server._connections))
            assert crowd == sent_to
        begin = time.monotonic()
        assert 200 == fetch(f"{telemetry.url}/-/healthy")[0]
        assert scrape(telemetry)
        assert 3 > time.monotonic() - begin
    finally:
        for client in deaf:
            client.close()


def test_a_client_that_reads_byte_by_byte_is_disconnected(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes a little of its answer all the time has no more time for it than one that takes nothing."""
    monkeypatch.setattr(endpoint, "SEND_SECONDS", 0.5)
    telemetry = start()
    telemetry._endpoint._server.snapshot = lambda: {"large": "x" * 8_000_000}
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", telemetry.port))
        slow.sendall(b"GET /snapshot HTTP/1.1\r\n\r\n")
        deadline = time.monotonic() + 20
        connected = True
        while connected and time.monotonic() < deadline:
            try:
                slow.recv(256)
            except OSError:
                break
            time.sleep(0.01)
            connected = bool(telemetry._endpoint._server._connections)
        assert not telemetry._endpoint._server._connections


def test_a_request_that_never_ends_is_cut(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of a request every now and then does not hold a connection: the request as a whole has its time."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.4)
    telemetry = start()
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", telemetry.port), 10) as drip:
        drip.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        with pytest.raises(OSError):  # noqa: PT011, PT012
            while time.monotonic() - begin < 8:
                drip.sendall(b"x")
                time.sleep(0.05)
    assert 5 > time.monotonic() - begin


def test_a_header_is_bounded_as_a_whole(start) -> None:
    """Ninety lines of 60 KB, each of which is allowed, are refused before they fill the memory."""
    port = start().port
    before = psutil.Process().memory_info().rss
    with socket.create_connection(("127.0.0.1", port), 10) as bomb:
        bomb.sendall(b"GET /metrics HTTP/1.1\r\n")
        sent = 0
        with suppress(OSError):
            for number in range(90):
                bomb.sendall(b"X-%d: " % number + b"x" * 60_000 + b"\r\n")
                sent += 60_000
        answer = b""
        with suppress(OSError):
            answer = bomb.recv(65_536)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    assert 4_000_000 > sent or answer.startswith(b"HTTP/1.1 431 ")
    assert 3_000_000 > psutil.Process().memory_info().rss - before


def test_a_connection_has_a_bounded_number_of_answers(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody holds a connection for ever: the last of its answers says that it is closed."""
    monkeypatch.setattr(endpoint, "MAX_REQUESTS", 5)
    connection = http.client.HTTPConnection("127.0.0.1", start().port, timeout=10)
    closes = []
    for _ in range(5):
        connection.request("GET", "/-/healthy")
        reply = connection.getresponse()
        reply.read()
        closes.append(reply.getheader("Connection"))
    assert [None, None, None, None, "close"] == closes


@pytest.mark.parametrize("path", [b"/metrics", b"/-/healthy", b"/nope"])
def test_a_client_that_pipelines_gets_one_answer(path: bytes, start) -> None:
    """Of two hundred requests sent at once the first is answered, and the connection closed."""
    answers = raw(start().port, (b"GET " + path + b" HTTP/1.1\r\n\r\n") * 200)
    assert 1 == answers.count(b"HTTP/1.1 ")
    assert 1 == answers.count(b"Connection: close\r\n")


def test_nothing_is_made_for_a_client_that_is_gone(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that resets its connection behind the request costs no collection."""
    telemetry = start()
    made: list[object] = []
    ask = telemetry._endpoint._server.scrapes.ask
    monkeypatch.setattr(telemetry._endpoint._server.scrapes, "ask", lambda *args: made.append(args) or ask(*args))
    parse = endpoint._Handler.parse_request

    def parse_late(self) -> bool:
        time.sleep(0.2)  # the reset is there by then
        return parse(self)

    monkeypatch.setattr(endpoint._Handler, "parse_request", parse_late)
    with socket.create_connection(("127.0.0.1", telemetry.port), 10) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    deadline = time.monotonic() + 5
    while telemetry._endpoint._server._connections and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [] == made
    assert scrape(telemetry)
    assert 1 == len(made)


def test_a_client_that_is_gone_before_its_turn_is_not_accepted() -> None:
    """Neither one that reset its connection, whatever it had sent, nor one that ended it without a word; who has only
    ended its own side behind a request is answered."""
    served: list[bytes] = []

    class Server(connections.Server):
        def answer(self, connection: connections.Connection, client_address: object) -> None:
            served.append(connection.socket.recv(100))

    server = Server(("127.0.0.1", 0), socket.AF_INET)

    def ask(said: bytes) -> socket.socket:
        client = socket.create_connection(server.server_address, 10)
        client.sendall(said)
        return client

    for said in (b"", b"gone"):
        reset = ask(said)
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
    ask(b"").close()
    half = ask(b"half")
    half.shutdown(socket.SHUT_WR)
    waiting = ask(b"here")
    accepting = threading.Thread(target=server.serve_forever)
    accepting.start()
    assert b"" == half.recv(1)
    assert b"" == waiting.recv(1)
    server.shutdown()
    accepting.join(10)
    server.server_close()
    for client in (half, waiting):
        client.close()
    assert [b"half", b"here"] == sorted(served)


@pytest.mark.parametrize("header", [b"Content-Length: 35", b"Transfer-Encoding: chunked"])
def test_a_body_is_not_the_next_request(header: bytes, start) -> None:
    """A GET that has a body is answered, and its body is not."""
    answer = raw(
        start().port, b"GET /nope HTTP/1.1\r\n" + header + b"\r\n\r\nGET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    assert 1 == answer.count(b"HTTP/1.1 ")
    assert b"healthy" not in answer
    assert b"Connection: close\r\n" in answer


class Hanging:
    """A collector of an application that hangs until it is told to leave."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Semaphore(0), threading.Event()

    def describe(self):
        return []

    def collect(self):
        self.entered.release()
        self.leave.wait(20)
        return []


def test_more_than_may_wait_are_refused_at_once(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """While four scrapes wait for one that hangs, a fifth gets 503, and health is answered; then there is room."""
    monkeypatch.setattr(endpoint, "MAX_WAITING", 5)
    hanging, registry = Hanging(), CollectorRegistry()
    registry.register(hanging)
    telemetry = start(registry=registry)
    waiting = telemetry._endpoint._server.waiting
    with ThreadPoolExecutor(5) as pool:
        try:
            asked = [pool.submit(scrape, telemetry, 30) for _ in range(5)]
            assert hanging.entered.acquire(timeout=10)
            deadline = time.monotonic() + 10
            while waiting._value and time.monotonic() < deadline:
                time.sleep(0.01)
            begin = time.monotonic()
            assert (503, b"too many requests at a time\n") == fetch(f"{telemetry.url}/metrics")[::2]
            assert 200 == fetch(f"{telemetry.url}/-/healthy")[0]
            assert 3 > time.monotonic() - begin
        finally:
            hanging.leave.set()
        assert all("moe_run_info" in each.result() for each in asked)
    assert scrape(telemetry)


def test_a_scrape_that_hangs_holds_up_no_snapshot(start) -> None:
    """While an application's collector hangs, snapshot and page are answered."""
    hanging, registry = Hanging(), CollectorRegistry()
    registry.register(hanging)
    telemetry = start(registry=registry)
    with ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(scrape, telemetry, 30)
            assert hanging.entered.acquire(timeout=10)
            assert [200, 200] == [fetch(telemetry.url + path, 3)[0] for path in ("/snapshot", "/")]
        finally:
            hanging.leave.set()
        assert asked.result()


@pytest.mark.parametrize("where", [endpoint, readers])
def test_a_scrape_does_not_wait_for_ever_for_its_turn(where, start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a scrape that hangs in an application's callback another one gets 503 when its time is over."""
    monkeypatch.setattr(where, "TURN_SECONDS", 0.2)
    entered, leave = threading.Event(), threading.Event()

    def callback(_: object) -> list:
        entered.set()
        leave.wait(20)
        return []

    provider = MeterProvider()
    provider.get_meter("app").create_observable_gauge("app.gauge", [callback])
    registry = CollectorRegistry()
    telemetry = start(meter_provider=provider, port=0, registry=registry)
    by_the_application = where is readers  # which collects the registry itself
    target, arguments = (generate_latest, (registry,)) if by_the_application else (fetch, (f"{telemetry.url}/metrics",))
    first = threading.Thread(target=target, args=arguments)
    first.start()
    try:
        assert entered.wait(10)
        assert 503 == fetch(f"{telemetry.url}/metrics")[0]
    finally:
        leave.set()
        first.join(10)


def test_a_connection_is_kept_for_the_next_scrape(start, recorder) -> None:
    """Prometheus' connection is used again, and the second scrape shows what was recorded in between."""
    telemetry = start()
    connection = keep_alive(telemetry)
    before = connection.sock
    recorder.tokens(3)
    connection.request("GET", "/metrics", headers={"Accept": PLAIN})
    assert b'moe_tokens_total{phase="decode"} 3.0\n' in connection.getresponse().read()
    assert before is connection.sock
    connection.close()


def test_a_kept_connection_ends_with_the_endpoint(start, recorder) -> None:
    """A client that keeps its connection is not served by a stopped telemetry, so it finds the next one."""
    first = start()
    port = first.port
    connection = keep_alive(first)
    first.stop()
    start(port=port)
    recorder.tokens(5)
    connection.sock.settimeout(5)
    assert b"" == connection.sock.recv(1)
    connection.close()
    connection.request("GET", "/metrics", headers={"Accept": PLAIN})
    assert b'moe_tokens_total{phase="decode"} 5.0\n' in connection.getresponse().read()
    connection.close()


# -- TLS ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's and a client's self-signed certificate with their keys."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl binary, which makes the certificates, is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client", "stranger"):
        subprocess.run(
            f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name} "
            f"-addext subjectAltName=IP:127.0.0.1 -keyout {name}.key -out {name}.pem".split(),
            cwd=folder,
            check=True,
            capture_output=True,
        )
    return folder


def over_tls(telemetry, certificates: Path, client: str | None = None) -> bytes:
    context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
    if client is not None:
        context.load_cert_chain(certificates / f"{client}.pem", certificates / f"{client}.key")
    with urllib.request.urlopen(f"{telemetry.url}/metrics", timeout=10, context=context) as reply:
        return reply.read()


def test_tls_serves_over_https_only(certificates: Path, start) -> None:
    """With a certificate the URL is https, a client that trusts it scrapes, and plain HTTP gets nothing."""
    telemetry = start(tls_cert=str(certificates / "server.pem"), tls_key=str(certificates / "server.key"))
    assert telemetry.url.startswith("https://127.0.0.1:")
    silent = socket.create_connection(("127.0.0.1", telemetry.port), 10)  # a handshake that never comes
    assert b"moe_run_info" in over_tls(telemetry, certificates)
    assert b"moe_" not in raw(telemetry.port, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert b"moe_run_info" in over_tls(telemetry, certificates)
    begin = time.monotonic()
    telemetry.stop()
    assert 3 > time.monotonic() - begin
    silent.close()


def test_tls_demands_the_clients_certificate(certificates: Path, start) -> None:
    """With a client CA only a client that shows a certificate of it is answered."""
    telemetry = start(
        tls_cert=str(certificates / "server.pem"),
        tls_key=str(certificates / "server.key"),
        tls_client_ca=str(certificates / "client.pem"),
    )
    assert b"moe_run_info" in over_tls(telemetry, certificates, "client")
    for client in (None, "stranger"):
        with pytest.raises((OSError, urllib.error.URLError)):
            over_tls(telemetry, certificates, client)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls_cert": "/no/such.pem"}, r"cannot serve metrics over TLS: .*No such file.*'/no/such.pem'"),
        ({"tls_cert": __file__, "tls_key": "/no/key"}, r"cannot serve metrics over TLS: .*No such file.*'/no/key'"),
        ({"tls_cert": __file__}, r"cannot serve metrics over TLS: .*test_endpoint.py: "),
        ({"tls_key": "key.pem"}, r"tls_key and tls_client_ca need tls_cert"),
        ({"tls_client_ca": "ca.pem"}, r"tls_key and tls_client_ca need tls_cert"),
    ],
)
def test_bad_tls_settings_fail_at_start(options: dict[str, str], message: str, start) -> None:
    """A missing or broken file, or a client CA without a certificate, is an error and never plain HTTP."""
    with pytest.raises(ConfigurationError, match=message):
        start(**options)


# -- hostile values -------------------------------------------------------------------------------------------

HOSTILE = {
    "newline": "a\nb\r\nmoe_fake_total 1\n# EOF\n",
    "quote": 'a"} 1\nmoe_fake_total{x="',
    "backslash": "a\\nb\\",
    "long": "x" * 10_000,
    "surrogate": "a\ud800b",
    "NUL": "a\0b",
    "HTML": "<b>&amp;",
    "control": "\x1b[31m\x7f\x85\u2028",
    "emoji": "\U0001f600é中",
    "empty": "",
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_still_give_a_valid_scrape(value: str, start, recorder) -> None:
    """Whatever model, runtime and run are called, every format is valid and shows one run and no invented sample."""
    telemetry = start(model=value, runtime=value, run=value)
    recorder.request(0.1, 1.0, 3)
    text = scrape(telemetry)
    found = samples(text)
    assert 1 == sum(name == "moe_run_info" for name, _ in found)
    assert not any(name.startswith("moe_fake") for name, _ in found)
    _, _, body = fetch(f"{telemetry.url}/metrics", Accept=OPENMETRICS)
    # Split by the format's line end only: a label may hold what Python takes for another.
    assert 1 == body.decode().split("\n").count("# EOF")
    for path in ("/", "/snapshot"):
        assert 200 == fetch(telemetry.url + path)[0]
    if promtool := shutil.which("promtool"):
        checked = subprocess.run([promtool, "check", "metrics"], input=text.encode(), capture_output=True, check=False)
        assert (0, b"") == (checked.returncode, checked.stderr)


def test_an_ordinary_name_is_shown_as_it_is(start) -> None:
    """Quotes, backslashes and newlines in a model's name survive the scrape."""
    name = 'org/model "8bit" C:\\x\nsecond é'
    found = [dict(labels) for sample, labels in samples(scrape(start(model=name))) if sample == "moe_run_info"]
    assert [name] == [labels["model"] for labels in found]
