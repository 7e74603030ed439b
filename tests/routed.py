"""Passes of a model that routes, handed to `routed_array`, and what came of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest

from moe_telemetry import counting, live, routing, tallies
from moe_telemetry import recorder as rec
from moe_telemetry.testing import Capture, capture

EXPERTS = 16
BEHIND = routing.FORWARDS * (routing.BATCHES_BEHIND + 1)
"""Passes behind which the first batch is read."""
IDS = ((1, 2),)


@pytest.fixture(params=["host", "device", "carried"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ids read by the host, and counted by the device: by scattering, since the kernels need CUDA."""
    if request.param != "host":
        monkeypatch.setattr(counting, "on_cuda", lambda: True)
        monkeypatch.setattr(counting, "_broken", True)
    if request.param == "device":
        monkeypatch.setattr(tallies, "SECONDS", 0.0)
    return request.param


@pytest.fixture
def cap(way: str) -> Iterator[Capture]:
    with capture() as found:
        yield found


def lost(cap: Capture) -> dict[str, int]:
    """Records dropped, by reason."""
    return {reason: count for reason, count in cap.store.lost.items() if count}


def calls(cap: Capture) -> int:
    """Layer calls counted so far, without asking for what is outstanding."""
    rows = [cells for row in cap.store.rows.values() for cells in row.layers.values()]
    return sum(sum(cells.sizes.values()) for cells in rows)


def tokens(cap: Capture) -> dict[int, list[int]]:
    """Tokens by layer and expert counted so far."""
    return {index: layer.load.tokens for index, layer in cap.store.layers.items() if layer.load is not None}


def routing_of(ids: Sequence[Sequence[int]]) -> mx.array:
    """A lazy array of ids that the model evaluates by and by."""
    return mx.array(ids, dtype=mx.uint32) + 0


def passes(
    number: int,
    layers: int | Sequence[int | None] = 2,
    ids: Sequence[Sequence[int]] = IDS,
    evaluate: bool = True,
    whole: bool = False,
) -> list[mx.array]:
    """So many passes over some layers, all routed alike, each call's input what the call before has made; whether
    they are evaluated one by one, and handed over `whole`. The last one's arrays come back."""
    order = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
    arrays: list[mx.array] = []
    for _ in range(number):
        made = routing_of(ids)
        arrays = []
        for layer in order:
            made = made + 0
            arrays.append(made)
            if not whole:
                rec.routed_array(layer, made, EXPERTS)
        if whole:
            live.routed_pass(rec, order, (EXPERTS,) * len(order), arrays)
        if evaluate:
            mx.eval(arrays)
    return arrays
