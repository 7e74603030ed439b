"""Events take no memory: two million hooks later the process is as large as before."""

from __future__ import annotations

import gc
import os
import weakref

import every_hook
import psutil
import pytest

from moe_telemetry import recorder as rec
from moe_telemetry.testing import capture

MIB = 2**20


def run(events: int) -> None:
    """So many hook calls of a decode run with a pool, 48 layers and changing sets."""
    sets = [set(range(first, first + 10)) for first in range(40)]
    done = step = 0
    while done < events:
        rec.forward(1 + step % 3)
        for layer in range(48):
            rec.routed(layer, sets[(step + layer) % 40], sets[layer % 40], sets[step % 40], sets[step % 7])
            rec.prefetch("submit", 1e-4)
            rec.block("matmul", 1e-3)
            rec.read("demand", 1000, 2e-3)
        rec.forward_done(0.05)
        rec.tokens(1)
        done += 3 + 48 * 4
        step += 1


@pytest.mark.parametrize("locked", [False, True], ids=["plain", "locked"])
def test_memory_does_not_grow_with_events(locked):
    """Between 200,000 and 2,000,000 events the resident memory grows by less than 1 MiB."""
    process = psutil.Process(os.getpid())
    events = 2_000_000
    with capture(locked=locked) as cap:
        every_hook.call_all(rec)
        run(events // 10)
        cap.series()
        gc.collect()
        before = process.memory_info().rss
        run(events - events // 10)
        cap.series()
        gc.collect()
        grown = process.memory_info().rss - before
        assert MIB > grown
        assert cap.total("moe.layer.calls") > events / 5


def test_garbage_is_not_kept():
    """A captured telemetry is freed with its last reference, whatever threads did in it."""
    with capture() as cap:
        every_hook.call_all(rec)
        store = weakref.ref(cap.store)
    del cap
    with capture():
        gc.collect()
        assert store() is None
