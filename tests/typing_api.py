"""The whole public API as a runtime's author would call it: checked by mypy --strict, never run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry

import moe_telemetry as mt
from moe_telemetry import ConfigurationError, Phase, Recorder, Telemetry
from moe_telemetry import recorder as rec
from moe_telemetry.series import Distribution
from moe_telemetry.testing import Capture, capture


def starting(registry: CollectorRegistry, provider: MeterProvider) -> dict[str, Any]:
    """Start, look, stop."""
    try:
        telemetry: Telemetry = mt.start(
            model="qwen3-next-80b",
            runtime="my-runtime",
            run=None,
            num_layers=48,
            host=None,
            port=0,
            layers="all",
            otlp=False,
            registry=registry,
            meter_provider=provider,
            decode_seq_max=8,
            recorder=rec,
            tls_cert=None,
            tls_key=None,
            tls_client_ca=None,
        )
    except ConfigurationError as error:
        raise SystemExit(str(error)) from error
    url: str | None = telemetry.url
    port: int | None = telemetry.port
    telemetry.stop(linger=2.5)
    telemetry.stop()
    with mt.start("model", num_layers=[3, 7, 11]) as other:
        snapshot: dict[str, Any] = other.snapshot()
    version: str = mt.__version__
    return {"url": url, "port": port, "snapshot": snapshot, "version": version}


def numbers() -> Generator[int, None, None]:
    """Ids one after another."""
    yield from (1, 2, 3)


def recording(recorder: mt.Recorder, resident: set[int], predicted: frozenset[int]) -> None:
    """Every hook, with each kind of argument it takes."""
    recorder.forward(1)
    recorder.forward(512, "prefill")
    recorder.forward(tokens=3, phase=Phase.DECODE)
    recorder.routed(0, {1, 2})
    recorder.routed(layer=0, experts=[1, 2], resident=resident, predicted=predicted, ready=numbers())
    recorder.routed(None, range(4), {1: "slot"}.keys())
    indices, mask = mx.array([[1, 2]]), mx.array([True, False])
    recorder.routed_array(0, indices, 128)
    recorder.routed_array(None, indices, num_experts=2, resident=mask, predicted=mask, ready=mask)
    recorder.routed_array(0, indices=indices, num_experts=128, resident=resident, predicted=predicted, ready=numbers())
    recorder.union(0, 10)
    recorder.union(layer=None, size=10, residency="bypassed")
    recorder.recall(0, predicted={1}, routed=(1, 2))
    recorder.prefetch("predict", 1e-4)
    recorder.prefetch(stage="submit", seconds=1e-4)
    recorder.promote("take", seconds=1e-4)
    recorder.window(1e-3)
    recorder.placed()
    recorder.placed(experts=2)
    recorder.prefetch_dropped("budget")
    recorder.prefetch_dropped(reason="unused", experts=2, nbytes=4096)
    recorder.block("fetch", 1e-3)
    recorder.block_call()
    recorder.read("demand", 4096, 1e-3)
    recorder.read(source="prefetch", nbytes=4096, seconds=1e-3, phase=Phase.PREFILL)
    recorder.stall(1e-3)
    recorder.evicted(0)
    recorder.evicted(layer=0, experts=3)
    recorder.degraded("skipped")
    recorder.degraded(mode="cpu", experts=2)
    recorder.pool(0, capacity=30)
    recorder.pool(layer=0, capacity=None, resident=28)
    recorder.tokens(1)
    recorder.tokens(n=512, phase="prefill")
    recorder.speculation(proposed=3, accepted=2)
    recorder.request(time_to_first_token=0.5, duration=2, output_tokens=100)
    recorder.request(None, 2.0, 0)
    recorder.request(0.5, 2.0, 100, idle=False)
    recorder.cumulative("moe.tokens", 1000, phase="decode")
    recorder.cumulative("moe.expert.lookups", value=1.0, phase="decode", layer=3, outcome="hit")
    recorder.forward_done(0.07)
    timer: AbstractContextManager[None] = recorder.timed(recorder.block, "fetch")
    with timer, recorder.timed(recorder.window):
        pass


def testing() -> float:
    """The helper for a runtime's own tests."""
    mine = Recorder()
    with capture(num_layers=4, decode_seq_max=2, locked=None, recorder=mine) as found:
        cap: Capture = found
        recording(mine, {1}, frozenset((2,)))
        value: int | float | Distribution = cap.value("moe.tokens", phase="decode")
        if isinstance(value, Distribution):
            return value.sum / value.count
        for (name, labels), one in cap.series().items():
            told: tuple[str, tuple[tuple[str, str], ...], int | float | Distribution] = (name, labels, one)
            del told
        return value + cap.total("moe.tokens")


def phases() -> tuple[str, str]:
    """Members of Phase are strings."""
    decode: str = Phase.DECODE
    return decode, Phase("prefill").value
