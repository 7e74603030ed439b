"""What the demo shows fits a terminal of 80 columns and 24 lines."""

import io

import pytest

pytest.importorskip("rich")
from rich.console import Console

from moe_telemetry import recorder as rec
from moe_telemetry import snapshot
from moe_telemetry.demo.view import table
from moe_telemetry.series import read
from moe_telemetry.testing import capture


def _snapshot(captured):
    return snapshot.build(captured.store, read(captured.store))


def _record(times):
    for phase in ("prefill", "decode"):
        rec.forward(3, phase)
        for _ in range(times):
            rec.routed(0, {1, 2, 3, 4}, resident={1, 2, 3}, predicted={1, 4}, ready={1})
        rec.forward_done(10_000.0)
        rec.stall(0.01)
        rec.tokens(1234567, phase)


def test_all_four_columns_fit():
    """The window and the run of both phases, with millions of tokens, are neither cut nor wrapped."""
    with capture() as captured:
        _record(3)
        before = _snapshot(captured)
        _record(5)
        now = _snapshot(captured)
    console = Console(file=io.StringIO(), width=80)
    console.print(table(now, before, "http://127.0.0.1:9464/metrics"))
    shown = console.file.getvalue()
    assert "…" not in shown
    assert 20 >= len(shown.splitlines())
    assert "75.0%" in shown
    assert "67 / 33%" in shown
