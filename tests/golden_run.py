"""The golden run: every hook once or more with fixed values, and the scrape of it with what varies taken out.

A script of its own (`python golden_run.py [text|openmetrics]`), so that other interpreters and the lowest allowed
versions can make the same run.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from types import ModuleType

ACCEPT = {
    "text": "text/plain;version=0.0.4",
    "openmetrics": "application/openmetrics-text;version=1.0.0",
}
VARYING_VALUES = (
    "process_memory_usage_bytes",
    "process_cpu_time_seconds_total",
    "moe_run_start_time_seconds",
    "moe_telemetry_collect_duration_seconds",
)
VARYING_LABELS = ("run", "version", "service_instance_id")


def fake_mlx() -> ModuleType:
    """An `mlx.core` whose memory figures are known."""
    core = ModuleType("mlx.core")
    core.get_active_memory = lambda: 1_000_000_000
    core.get_cache_memory = lambda: 1_450_000_000
    core.get_peak_memory = lambda: 2_000_000_000
    core.get_memory_limit = lambda: 3_000_000_000
    return core


def record(rec) -> None:
    """Every hook, with sums that are exact in binary."""
    rec.pool(0, capacity=4, resident=3)
    rec.pool(1, capacity=64, resident=60)
    rec.forward(512, phase="prefill")
    rec.routed(0, set(range(8)), resident={0, 1, 2}, predicted={0, 1, 2, 3, 4, 5, 40}, ready={0, 1, 3})
    rec.routed(1, set(range(6)), resident=set(range(60)))
    rec.read("demand", 1_048_576, 0.25)
    rec.stall(0.25)
    rec.tokens(512)
    rec.forward_done(1.5)
    for tokens in (1, 3, 4, 100):
        rec.forward(tokens, phase="decode")
        rec.routed(0, {1, 2, 3}, resident={1, 2}, predicted={1, 3}, ready={1, 3})
        rec.union(1, 2, residency="bypassed")
        rec.recall(1, predicted={1, 9}, routed={1, 2})
        for stage in ("predict", "submit", "promote"):
            rec.prefetch(stage, 0.125)
        for step in ("take", "route", "place"):
            rec.promote(step, 0.0625)
        for segment in ("route", "pyremap", "fetch", "matmul", "combine"):
            rec.block(segment, 0.03125)
        rec.block_call()
        rec.window(0.5)
        rec.placed(2)
        rec.prefetch_dropped("budget", 3)
        rec.prefetch_dropped("unused", 1, nbytes=4096)
        rec.read("prefetch", 2_097_152, 0.125)
        rec.stall(0.0078125)
        rec.evicted(0, 2)
        rec.degraded("skipped", 1)
        rec.tokens(tokens)
        rec.speculation(3, 2)
        rec.forward_done(0.0625)
    rec.union(None, 5)
    rec.union(0, 600, residency="partial")
    rec.request(time_to_first_token=0.5, duration=4.5, output_tokens=9)
    rec.cumulative("moe.expert.read", 3_000_000, phase="decode", source="demand")
    rec.stall(-1.0)
    rec.stall(float("nan"))
    rec.block("no such segment", 1.0)


def normalised(text: str) -> str:
    """The exposition without what differs from run to run."""
    lines = []
    for original in text.splitlines():
        line = original
        name = re.split(r"[{ ]", line, maxsplit=1)[0]
        if name in VARYING_VALUES:
            line = line.rsplit(" ", 1)[0] + " 1.0"
        if name in ("moe_run_info", "target_info"):
            for key in VARYING_LABELS:
                line = re.sub(rf'\b{key}="[^"]*"', f'{key}="{key.upper()}"', line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def scraped(form: str) -> str:
    """The golden run as scraped over HTTP."""
    import moe_telemetry as mt
    from moe_telemetry.loads import ExpertLoad

    before = sys.modules.get("mlx.core")
    sys.modules["mlx.core"] = fake_mlx()
    try:
        recorder = mt.Recorder()
        with mt.start(model="golden-moe", runtime="golden", run="golden", port=0, recorder=recorder) as telemetry:
            record(recorder)
            load = telemetry._store.layers[0].load = ExpertLoad(4)
            load.add(1, [5, 2, 1, 0])
            asked = urllib.request.Request(f"{telemetry.url}/metrics", headers={"Accept": ACCEPT[form]})
            with urllib.request.urlopen(asked, timeout=10) as reply:
                return normalised(reply.read().decode())
    finally:
        if before is None:
            del sys.modules["mlx.core"]
        else:
            sys.modules["mlx.core"] = before


if __name__ == "__main__":
    sys.stdout.write(scraped(sys.argv[1] if len(sys.argv) > 1 else "text"))
