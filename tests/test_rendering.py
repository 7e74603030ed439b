"""What our endpoint sends is prometheus_client's text to the byte, whatever was kept from the scrape before."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

import moe_telemetry as mt
from moe_telemetry import rendering
from moe_telemetry.pages import encoder
from moe_telemetry.rendering import render

ACCEPTS = (
    "text/plain;version=0.0.4",
    "text/plain;version=1.0.0;escaping=allow-utf-8",
    "application/openmetrics-text;version=1.0.0",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;q=0.5",
)


class Still:
    """A registry's families at one moment, for two encoders."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families = list(registry.collect())

    def collect(self):
        """The same each time."""
        return self._families


@pytest.fixture
def running(recorder, start):
    """A registry with telemetry, an application's metrics, and names that have to be escaped."""
    registry = CollectorRegistry()
    Counter("applications", 'of "their" own\nand more', ["kind"], registry=registry).labels('a "b"\n\\c').inc()
    Gauge("big", "a number", registry=registry).set(12345678)
    start(model='a "model"\nof \\ two lines', registry=registry, num_layers=3)
    return registry


def act(recorder: mt.Recorder, number: int) -> None:
    """Values of every kind: large ones, fractions, new series."""
    recorder.forward(number + 1)
    recorder.pool(number, 100, 90)
    recorder.routed(number, {1, 2}, {1}, {2}, {2})
    recorder.read("demand", 999_999 + number, 1e-7 + number)
    recorder.block("fetch", 1e-9)
    recorder.tokens(10**number)
    recorder.forward_done(0.25)


def test_text_is_prometheus_clients(running, recorder):
    """The same bytes in every format, at the first scrape and with what was kept, as series and values come."""
    kept = 0
    for number in range(8):
        act(recorder, number)
        still = Still(running)
        for accept in ACCEPTS:
            encode, content_type = encoder(accept)
            assert encode(still) == render(still, encode, content_type)
            kept += rendering._from_kept("moe_tokens", _samples(still, "moe_tokens"), content_type) is not None
    assert 8 * len(ACCEPTS) == kept


def test_what_is_kept_is_what_is_sent(running, recorder):
    """The second scrape writes the kept beginnings: a changed one shows."""
    encode, content_type = encoder("")
    still = Still(running)
    render(still, encode, content_type)
    kept = _samples(still, "moe_tokens").kept[content_type]
    key = next(key for key in kept if key[0] == "moe_tokens_total")
    kept[key] = "changed "
    assert b"\nchanged 0.0\n" in render(still, encode, content_type)


def test_formats_are_bounded(running):
    """A client that names a new version each time leaves no more than a few formats behind."""
    still = Still(running)
    for number in range(20):
        encode, content_type = encoder(f"application/openmetrics-text;version=1.0.{number}")
        render(still, encode, content_type)
    assert rendering.FORMATS >= len(_samples(still, "moe_tokens").kept)


def _samples(still, name):
    return next(family.samples for family in still.collect() if family.name == name)
