"""What an endpoint must never tell, and what no request may do (docs/security.md)."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

import pytest
from conftest import fetch, raw, samples, scrape

import moe_telemetry as mt

PATHS = ("/metrics", "/snapshot", "/", "/-/healthy", "/nope")
ESCAPES = (
    *(
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/metrics/../../etc/passwd",
        "/file:///etc/passwd",
    ),
    *(
        "/snapshot?file=/etc/passwd",
        "/metrics?name[]=../../etc/passwd",
        "/\\..\\..\\etc\\passwd",
        "/.env",
        "/proc/self/environ",
    ),
)


def test_nothing_of_the_process_is_told(start, recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer holds a variable's value, an argument, the user, a folder, or what resource detectors find of them."""
    monkeypatch.setenv("A_SECRET", "hunter2-secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "process.command_args=hunter2-secret,enduser.id=hunter2-secret")
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "process,os,otel")
    monkeypatch.setattr(sys, "argv", ["server", "--api-key", "hunter2-secret"])
    telemetry = start()
    recorder.forward(1)
    recorder.block("hunter2-secret", 0.1)
    recorder.tokens("hunter2-secret")
    told = b"".join(fetch(telemetry.url + path)[2] for path in PATHS).decode()
    assert "moe_run_info" in told
    known = {"hunter2-secret", str(Path.cwd()), str(Path.home()), sys.executable, "--api-key"}
    assert [] == [word for word in known - {"/"} if word in told]
    assert f'"{getpass.getuser()}"' not in told


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leads_to_a_file(path: str, start) -> None:
    """Whatever a path looks like, it is one of the four or not found; a query changes nothing."""
    status, _, body = fetch(start().url + path)
    assert b"root:" not in body
    assert status == (200 if path.startswith(("/snapshot?", "/metrics?")) else 404)


def test_no_request_changes_anything(start, recorder) -> None:
    """Methods that could are refused, bodies are not read, and what is served is as before."""
    telemetry = start()
    recorder.tokens(5)
    before = scrape(telemetry)
    for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "OPTIONS"):
        answer = raw(telemetry.port, f"{method} /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nreset".encode())
        assert answer.startswith(b"HTTP/1.1 405 ")
        assert b"Access-Control" not in answer
    ours = {key: value for key, value in samples(before).items() if key[0].startswith("moe_tokens")}
    assert ours == {key: value for key, value in samples(scrape(telemetry)).items() if key in ours}


def test_no_answer_allows_other_origins(start) -> None:
    """A web page of another origin may not read an answer."""
    for path in PATHS:
        _, headers, _ = fetch(start().url + path, Origin="http://example.org")
        assert not [name for name in headers if name.lower().startswith("access-control")]


def test_addresses_are_asked_for() -> None:
    """Nothing but loopback is listened on unless somebody says so."""
    with mt.start(port=0, recorder=mt.Recorder()) as telemetry:
        assert "127.0.0.1" == telemetry._endpoint._server.socket.getsockname()[0]
