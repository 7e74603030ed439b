"""mlx_lm.server under `moe-telemetry run`: real chat requests over HTTP, while a real Prometheus scrapes."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from conftest import fetch, free_port, total
from mlx_lm_tiny import save
from prometheus import Prometheus, prometheus

START_SECONDS = 120
TTFT, REQUEST = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_request_duration_seconds"


@dataclass(frozen=True)
class Answer:
    """What a client counted of one request: tokens as the server says, seconds by its own clock."""

    prompt: int
    cached: int
    completion: int
    first: float | None
    whole: float


@dataclass(frozen=True)
class Server:
    """A running mlx_lm.server and its telemetry's address."""

    port: int
    metrics: str

    def chat(self, words: int, begin: int = 4, stream: bool = False, **body: Any) -> Answer:
        """One chat request whose prompt has so many words, in an order that `begin` decides."""
        content = " ".join(f"w{4 + (begin * number + number // 60) % 60}" for number in range(words))
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 10, "stream": stream, **body}
        if stream:
            asked["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert 200 == reply.status
        first, usage = None, None
        if stream:
            for line in reply:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    usage = chunk.get("usage", usage)
                    if first is None and chunk["choices"]:
                        first = time.perf_counter() - began
        else:
            usage = json.loads(reply.read())["usage"]
        connection.close()
        whole = time.perf_counter() - began
        assert usage is not None
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return Answer(usage["prompt_tokens"], cached, usage["completion_tokens"], first, whole)

    def scrape(self) -> str:
        """The text of a scrape."""
        status, _, body = fetch(self.metrics, Accept="text/plain;version=0.0.4")
        assert 200 == status
        return body.decode()

    def recorded(self, answers: int) -> dict[str, float]:
        """Figures once so many requests have been recorded: the client may have its answer a moment before; and once
        the last request's layer calls have been counted, which no answer waits for."""
        deadline = time.monotonic() + 10
        text, calls = self.scrape(), -1.0
        while total(text, f"{REQUEST}_count") < answers or calls < total(text, "moe_layer_calls_total"):
            assert time.monotonic() < deadline, "a request is missing"
            calls = total(text, "moe_layer_calls_total")
            time.sleep(0.05)
            text = self.scrape()
        return {
            "prefill": total(text, "moe_tokens_total", phase="prefill"),
            "decode": total(text, "moe_tokens_total", phase="decode"),
            "requests": total(text, f"{REQUEST}_count"),
            "seconds": total(text, f"{REQUEST}_sum"),
            "first tokens": total(text, f"{TTFT}_count"),
            "first seconds": total(text, f"{TTFT}_sum"),
            "lost": total(text, "moe_telemetry_dropped_total"),
            "decode calls": total(text, "moe_layer_calls_total", phase="decode", layer="1"),
            "passes": total(text, "moe_forward_duration_seconds_count", phase="decode"),
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """mlx_lm.server with a tiny model, under telemetry, until the module's tests end."""
    folder = tmp_path_factory.mktemp("server")
    model = save(folder / "tiny-moe")
    port, log = free_port(), folder / "log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "MOE_TELEMETRY_"))}
    command = ["run", "--port", "0", "--", "mlx_lm.server", "--model", str(model), "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_telemetry", *command, "--prefill-step-size", "64"],
            **{"stdout": output, "stderr": output, "env": {**environment, "HF_HUB_OFFLINE": "1"}},
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        found = None
        while found is None or not _is_healthy(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()  # noqa: PT018
            time.sleep(0.1)
            found = re.search(r"metrics at (\S+)", log.read_text())
        yield Server(port, found[1])
        process.send_signal(signal.SIGINT)
        assert 0 == process.wait(20), log.read_text()
        text = log.read_text()
        left = re.findall(r"^(?:BrokenPipe|ConnectionReset)Error: ", text, re.MULTILINE)  # as mlx_lm tells it
        assert text.count("Traceback") == len(left)
        assert "dropped a record" not in text
        assert "moe-telemetry: whole run of tiny-moe" in text
    finally:
        process.kill()
        process.wait(10)


def _is_healthy(port: int) -> bool:
    try:
        return fetch(f"http://127.0.0.1:{port}/health")[0] == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def monitoring(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, scraping that server every second."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), [server.metrics.split("/")[2]]) as running:
        yield running


def together(*requests: Callable[[], Answer]) -> list[Answer]:
    """The answers to requests made at once."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return [future.result() for future in [pool.submit(request) for request in requests]]


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Everything that was asked and answered so far."""
    return []


def differences(server: Server, answers: list[Answer], new: Callable[[], list[Answer]]) -> tuple[Any, list[Answer]]:
    """By how much the figures rise with the requests that `new` makes."""
    before = server.recorded(len(answers))
    made = new()
    answers += made
    after = server.recorded(len(answers))
    return {key: after[key] - before[key] for key in after}, made


PATHS = pytest.mark.parametrize("path", [{}, {"seed": 7}], ids=["batched", "serial"])
"""A request with a seed is served by itself: the server's serial path."""


@PATHS
def test_tokens_and_requests(server: Server, answers: list[Answer], path: dict[str, Any]) -> None:
    """Streamed or not, alone or two at once, tokens and requests are what the clients were told."""

    def ask() -> list[Answer]:
        found = [server.chat(70, 5, **path), server.chat(70, 7, stream=True, **path)]
        found += together(
            lambda: server.chat(150, 11, stream=True, **path),
            lambda: server.chat(3, 13, max_tokens=17, **path),
        )
        return [*found, server.chat(70, 5, **path)]  # most of its prompt is in the server's cache

    rise, made = differences(server, answers, ask)
    assert made[-1].cached > 0
    assert sum(answer.prompt - answer.cached for answer in made) == rise["prefill"]
    assert sum(answer.completion for answer in made) == rise["decode"]
    assert 5 == rise["requests"] == rise["first tokens"]
    assert 0 < rise["seconds"] <= sum(answer.whole for answer in made)
    assert 0 == rise["lost"]
    # Two sequences share a batch's passes; alone, each token but the first has one, and one is thrown away.
    assert rise["passes"] <= rise["decode"]
    if path:
        assert rise["decode"] - 5 == rise["passes"]
        assert rise["decode"] == rise["decode calls"]


@PATHS
def test_time_to_first_token(server: Server, answers: list[Answer], path: dict[str, Any]) -> None:
    """It is what a streaming client sees, less the way there and back: the wait in the server's queue is in it."""

    def ask() -> list[Answer]:
        return together(
            *(
                lambda begin=begin: server.chat(300, begin, stream=True, max_tokens=100, **path)
                for begin in (17, 19, 23)
            )
        )

    rise, made = differences(server, answers, ask)
    firsts = [answer.first for answer in made if answer.first is not None]
    assert 3 == len(firsts) == rise["first tokens"]
    assert 0 < rise["first seconds"] <= sum(firsts)
    assert sum(firsts) - rise["first seconds"] < 0.1 * sum(firsts) + 3 * 0.1
    if path:  # one after the other: the last has waited for the others, which no generation by itself shows
        assert max(firsts) > 2 * min(firsts)


def test_a_client_that_leaves(server: Server, answers: list[Answer]) -> None:
    """Its request is not one, and the server goes on."""
    before = server.recorded(len(answers))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"messages": [{"role": "user", "content": "w4 w5"}], "max_tokens": 100_000, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().readline()
    connection.close()
    deadline = time.monotonic() + 20
    while True:  # until decoding stands still
        decoded = server.recorded(0)["decode"]
        time.sleep(0.5)
        if before["decode"] < decoded == server.recorded(0)["decode"]:
            break
        assert time.monotonic() < deadline
    answers.append(server.chat(5))
    after = server.recorded(len(answers))
    assert before["requests"] + 1 == after["requests"]
    assert 0 == after["lost"]


def test_prometheus_has_it(server: Server, monitoring: Prometheus, answers: list[Answer]) -> None:
    """What Prometheus has scraped is what the clients counted, and the server's own model names it."""
    answers += together(lambda: server.chat(30, 29), lambda: server.chat(30, 31, stream=True))
    server.recorded(len(answers))
    monitoring.wait(f"sum({REQUEST}_count) == {len(answers)}")
    assert len(answers) == monitoring.value(f"sum({TTFT}_count)")
    prompts = sum(answer.prompt - answer.cached for answer in answers)
    assert prompts <= monitoring.value('sum(moe_tokens_total{phase="prefill"})')
    assert sum(answer.completion for answer in answers) <= monitoring.value('sum(moe_tokens_total{phase="decode"})')
    assert 1 == monitoring.value('count(moe_run_info{model="tiny-moe",runtime="mlx_lm"})')
    assert 0 == monitoring.value("sum(moe_forward_active_seconds)")
    assert 3 == monitoring.value('count(moe_layer_calls_total{phase="decode",residency="unknown"} > 0)')
