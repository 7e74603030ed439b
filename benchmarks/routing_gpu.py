"""Decode and prefill speed of mlx_lm with routing recorded, against not and against a read of the ids per layer.

A qwen3_moe with random weights (Qwen3-30B-A3B's shape by default) runs in every way in each round, in an order drawn
anew, in one process; what counts is the ratio to `off`. Decode goes on while the ways take turns of 18 tokens
(routing_turns.py); a prefill is a run of its own. Every way must give the same token ids. Exit status 1 where they
differ, where recording missed layer calls, or, on a GPU, where it keeps less than 0.98 of the decode speed.

    off        mlx_lm as it is
    off again  the same once more: what the machine's own noise makes of a ratio
    this       telemetry started and mlx_lm instrumented
    idle       instrumented, telemetry off
    tolist     the routed ids read on every layer, `indices.tolist()`

    python benchmarks/routing_gpu.py [--rounds 250] [--repeats 7] [--quantize] [--json FILE]
    python benchmarks/routing_gpu.py --tiny      # some seconds on a CPU: does it run; its ratios say nothing

In bfloat16 the default takes 61 GB of memory, with --quantize (4 bits) 17 GB; --layers and --experts make it smaller.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import routing_turns
from mlx.nn.layers.base import Module
from routing_ways import Recording, build, instrumented, on_gpu, tolist

LEAST = 0.98
SAME_IDS = 128
"""Token ids of decode that are compared: all ways have had a turn by then. On CUDA mlx_lm does not repeat itself for
long: of runs without us, later ones parted from the first one behind 232 to 264 ids (H200, mlx 0.32.4)."""
TINY = {
    "layers": 3,
    "experts": 16,
    "top_k": 4,
    "hidden": 64,
    "moe_intermediate": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 512,
    "prompt": 128,
    "rounds": 3,
    "repeats": 3,
    "warm_up": 4,
}
generation = importlib.import_module("mlx_lm.generate")
"""The module: as an attribute of mlx_lm its name is the function's. What instrumenting replaces is looked up in it."""


@dataclass(frozen=True)
class Case:
    """What one run does: a prompt, and how many tokens are generated behind the first."""

    name: str
    prompt: int
    tokens: int


@dataclass
class Way:
    """A way to run the model: a context around each run, and what the runs gave."""

    name: str
    context: Callable[[], AbstractContextManager[Any]]
    rates: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Most bytes of MLX memory in use at one time above what was there before, a run."""
    ids: set[tuple[int, ...]] = field(default_factory=set)


def generate(model: Module, prompt: mx.array, tokens: int) -> tuple[list[int], list[float]]:
    """Ids of the first token and of `tokens` more, with the time at which each was there; begin and end stand around.

    The end is when the device has done all that it was given, so that work left for later counts.
    """
    ids, times = [], [time.perf_counter()]
    for token, _ in generation.generate_step(prompt, model, max_tokens=tokens + 1):
        times.append(time.perf_counter())
        ids.append(int(token))
    mx.synchronize(generation.generation_stream)
    mx.synchronize()
    return ids, [*times, time.perf_counter()]


def run(model: Module, case: Case, way: Way, warm_up: int) -> None:
    """One run in one way: a short one ahead of it, within the same context."""
    prompt = mx.random.randint(0, model.args.vocab_size, (case.prompt,), key=mx.random.key(1))
    mx.eval(prompt)
    gc.collect()
    with way.context():
        generate(model, prompt, min(warm_up, case.tokens))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        ids, (begin, first, *_, end) = generate(model, prompt, case.tokens)
        way.peaks.append(mx.get_peak_memory() - before)
    way.rates.append(case.tokens / (end - first) if case.tokens else case.prompt / (end - begin))
    way.ids.add(tuple(ids))


def measure(model: Module, case: Case, recording: Recording, options: argparse.Namespace) -> list[Way]:
    """Rounds of all ways in an order drawn anew, behind one round that does not count."""
    ways = [
        Way("off", nullcontext),
        Way("off again", nullcontext),
        Way("this", recording),
        Way("idle", partial(instrumented, model)),
        Way("tolist", tolist),
    ]
    order = random.Random(0)
    for number in range(options.repeats + 1):
        for way in order.sample(ways, len(ways)):
            run(model, case, way, options.warm_up)
        if not number:
            for way in ways:
                way.rates.clear()
                way.peaks.clear()
    return ways


def summary(case: Case, ways: list[Way]) -> list[dict[str, Any]]:
    """A row a way: median rate, its ratio to off's, the least and greatest of the rounds' ratios."""
    off = ways[0]
    return [
        {
            "case": case.name,
            "way": way.name,
            "unit": "prompt tok/s",
            "rate": statistics.median(way.rates),
            "ratio": statistics.median(way.rates) / statistics.median(off.rates),
            "by_round": statistics.median(a / b for a, b in zip(way.rates, off.rates, strict=True)),
            "least": min(a / b for a, b in zip(way.rates, off.rates, strict=True)),
            "most": max(a / b for a, b in zip(way.rates, off.rates, strict=True)),
            "peak_bytes": max(way.peaks),
            "rates": way.rates,
            "same_ids": way.ids == off.ids and len(way.ids) == 1,
        }
        for way in ways
    ]


def decode_rows(model: Module, recording: Recording, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of decode; the interval is that of 95 % of the rounds drawn again."""
    reference = routing_turns.plain(model, SAME_IDS)
    ways, ids = routing_turns.decode(model, recording, options.rounds, options.seconds)
    rows = []
    for way in ways:
        ratio, by_round, least, most = routing_turns.ratio(way, ways[0])
        row = {"case": f"decode, {len(way.seconds)} turns", "way": way.name, "unit": "tok/s", "peak_bytes": 0}
        row |= {
            "rate": 1 / statistics.median(way.seconds),
            "ratio": ratio,
            "by_round": by_round,
            "least": least,
            "most": most,
        }
        row |= {"seconds": way.seconds, "same_ids": ids[:SAME_IDS] == reference[: len(ids)]}
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """A case's rows of the table, in Markdown."""
    for row in rows:
        print(
            f"| {row['case']} | {row['way']} | {row['rate']:.1f} {row['unit']} | {row['ratio']:.3f} "
            f"| {row['by_round']:.3f} | {row['least']:.3f} to {row['most']:.3f} | {row['peak_bytes'] / 1e6:.1f} "
            f"| {'same' if row['same_ids'] else 'differ'} |",
            flush=True,
        )


def misses(rows: list[dict[str, Any]], recorded: dict[str, int], least: dict[str, int]) -> list[str]:
    """What went wrong or falls short: other ids, layer calls that were not recorded, decode below LEAST on a GPU."""
    case = rows[0]["case"]
    found = [f"{case}, {row['way']}: token ids differ" for row in rows if not row["same_ids"]]
    for phase, wanted in least.items():
        if recorded[phase] < wanted:
            found.append(f"{case}: {recorded[phase]} {phase} layer calls recorded, at least {wanted} wanted")
    this = next(row for row in rows if row["way"] == "this")
    if "decode" in least and on_gpu() and this["ratio"] < LEAST:
        found.append(f"{case}: {this['ratio']:.3f} of off's speed, at least {LEAST} wanted")
    return found


def arguments() -> argparse.Namespace:
    """The command line; with --tiny other defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=250, help="of decode: a turn of each way")
    parser.add_argument("--seconds", type=float, default=240, help="in which rounds of decode begin")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of prefill that count")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prefill's prompt")
    parser.add_argument("--warm-up", type=int, default=16, help="tokens decoded ahead of a run")
    for name, default in (
        ("layers", 48),
        ("experts", 128),
        ("top-k", 8),
        ("hidden", 2048),
        ("moe-intermediate", 768),
        ("heads", 32),
        ("kv-heads", 4),
        ("head-dim", 128),
        ("vocab", 151936),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quantize", action="store_true", help="4-bit weights, 8-bit routers")
    parser.add_argument("--tiny", action="store_true", help="a model of some kilobytes and short runs")
    parser.add_argument("--json", type=Path)
    if parser.parse_args().tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args()


def main() -> int:
    """Build, measure, print, and fail where something differs or falls short."""
    options = arguments()
    device = mx.device_info().get("device_name", platform.machine()) if on_gpu() else f"CPU, {platform.machine()}"
    if "max_recommended_working_set_size" in mx.device_info():  # Metal: as mlx_lm's own commands do
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    version = importlib.metadata.version("mlx")
    begin = time.perf_counter()
    model = build(options)
    size = mx.get_active_memory()
    print(
        f"{device}, mlx {version}: {options.layers} layers, "
        f"{options.experts} experts, top-{options.top_k}, {size / 1e9:.1f} GB of weights made in "
        f"{time.perf_counter() - begin:.0f} s",
        flush=True,
    )
    named = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    report: dict[str, Any] = {"device": device, "mlx": version, "weight_bytes": size, "options": named}
    report |= {"layer_calls": {}, "rows": []}
    missed = []
    print("| what | way | rate | of off | by round | from, to | memory, MB | ids |")
    print("|---|---|---|---|---|---|---|---|")
    turn = routing_turns.TURN * options.layers
    for case in (None, Case(f"prefill of {options.prompt}", options.prompt, 0)):
        recording = Recording(model)
        if case is None:
            rows = decode_rows(model, recording, options)
            least = {"decode": turn * len(rows[0]["seconds"])}
        else:
            rows = summary(case, measure(model, case, recording, options))
            least = {"prefill": options.layers - 1}  # a chunk leaves out its last layer, whose routing nobody needs
        show(rows)
        missed += misses(rows, recording.layer_calls, least)
        report["rows"] += rows
        report["layer_calls"][rows[0]["case"]] = recording.layer_calls
        if options.json:  # after each case: a run that is cut short leaves what it has
            options.json.write_text(json.dumps(report, indent=1))
    print(f"\nlayer calls in the last run of `this`: {report['layer_calls']}")
    print(*missed, sep="\n") if missed else print("every check passed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
