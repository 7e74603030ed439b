"""Reading an endpoint from outside: addresses as people type them, and requests that end."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import free_port

from moe_telemetry.client import DEFAULT_URL, ClientError, base_url, get


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("127.0.0.1:9464", DEFAULT_URL),
        ("127.0.0.1", DEFAULT_URL),
        ("http://127.0.0.1:9464/metrics", DEFAULT_URL),
        (" http://127.0.0.1:9464/snapshot/ ", DEFAULT_URL),
        ("gpu-1:1234", "http://gpu-1:1234"),
        ("https://gpu.example", "https://gpu.example"),
        ("http://gpu.example/moe/metrics", "http://gpu.example/moe"),
        ("[::1]:9464", "http://[::1]:9464"),
        ("http://[::1]/", "http://[::1]"),
    ],
)
def test_addresses_as_people_type_them(given: str, base: str) -> None:
    """A URL with or without our paths, or host:port; the default port where there is no URL."""
    assert base == base_url(given)


@pytest.mark.parametrize(
    "given",
    [
        "",
        " ",
        "ftp://x",
        "http://",
        "host:port",
        "host:99999",
        "http://a b",
        "file:///etc/passwd",
        "u:p@h:1",
        "a\nb",
        "[::1",
        "\x1b[0m",
    ],
)
def test_what_is_no_address_is_refused(given: str) -> None:
    """In one line that says what to give."""
    with pytest.raises(ClientError, match=r"^[^\n]*give http://host:port or host:port$"):
        base_url(given)


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """An address where `answer` deals with the one connection that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                with suppress(OSError):
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        thread.join(5)


def reason(url: str, **options: float) -> str:
    with pytest.raises(ClientError) as caught:
        get(url, "text/plain", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


def test_a_server_that_never_answers() -> None:
    """The request is over when its time is."""
    with server(lambda connection: time.sleep(0.5)) as url:
        assert "no answer in 0.2 s" == reason(url, seconds=0.2)


def test_a_server_that_answers_drop_by_drop() -> None:
    """Each byte comes in time, the whole does not."""

    def drip(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        for _ in range(60):
            connection.sendall(b"x")
            time.sleep(0.05)

    begin = time.monotonic()
    with server(drip) as url:
        assert "did not finish its answer in 0.3 s" == reason(url, seconds=0.3)
    assert time.monotonic() - begin < 5


def test_an_answer_without_an_end() -> None:
    """No more is read than is taken."""

    def flood(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65_536)

    with server(flood) as url:
        assert "answers with more than 1 MiB" == reason(url, most=1 << 20)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"HTTP/1.1 503 too\x1b[31m busy\r\n\r\n", "answers 503"),
        (b"SSH-2.0-OpenSSH\r\n", "ssh-2.0-openssh"),
        (b"", "remote end closed connection"),
        (HEAD + b"x", "ended before its answer did"),
    ],
)
def test_answers_that_are_none(sent: bytes, words: str) -> None:
    """A reason in a few words, with nothing that a terminal obeys."""
    with server(lambda connection: connection.sendall(sent)) as url:
        told = reason(url, seconds=2.0)
    assert words in told
    assert told.isprintable()


def test_nobody_there() -> None:
    """The system's own words."""
    assert "connection refused" == reason(f"http://127.0.0.1:{free_port()}/metrics")


def test_a_certificate_that_is_not_trusted(tmp_path: Path, start, monkeypatch) -> None:
    """What to do is said, and doing it helps."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl binary, which makes the certificate, is not installed")
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=server -addext"
    names = ["subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "pem")]
    subprocess.run([openssl, *command.split(), *names], check=True, capture_output=True)
    telemetry = start(tls_cert=str(tmp_path / "pem"), tls_key=str(tmp_path / "key"))
    assert "name one that is in SSL_CERT_FILE" in reason(f"{telemetry.url}/metrics")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "pem"))
    assert b"moe_run_info" in get(f"{telemetry.url}/metrics", "text/plain")


def test_loopback_is_not_asked_of_a_proxy(start, monkeypatch) -> None:
    """A proxy for the outside has nothing to do with this host."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    assert b"moe_run_info" in get(f"{start().url}/metrics", "text/plain")
