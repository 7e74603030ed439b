"""What recording each layer's routing costs a decode: read there and then, or handed over as it is.

A small transformer with all experts in memory (random weights, the demo's layers) decodes while the ways take turns of
24 passes, in an order drawn anew, in one process; what counts is a pass' time against that of `off`: by the clock,
waits included, and in CPU time of the thread that makes the passes, which is what a call costs where nobody waits.
Each turn begins with an empty context, so that all ways do the same, and what `routed_array` counts later is inside
its own turns.

    off            no hook
    off again      the same once more: what the machine's own noise makes of a ratio
    routed         routed(layer, set(indices.tolist()[0])): waits for the device in every layer
    routed_array   routed_array(layer, indices, experts)
    … with sets    the same with resident, predicted and ready: 96, 10 and 5 of 128 experts
    … with masks   those as bool arrays (experts,)

Exit status 1 where outputs differ, or where the forms differ in any figure. There is no limit for the ratios: how long
a layer takes beside one call of a hook is a matter of the model.

    python benchmarks/routing_calls.py [--rounds 20] [--layers 12] [--experts 128] [--top-k 8] [--width 64]
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from moe_telemetry import Recorder
from moe_telemetry.catalog import LAYER_CALLS, LOAD_PEAK, LOST
from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.demo.model import KVCache, ResidentModel
from moe_telemetry.testing import Capture, capture

TURN = 24
UNCOUNTED = 8
"""Passes at a turn's beginning. Of the others every sixteenth begins a batch of reductions, and reads an older one."""
Hook = Callable[[int, mx.array], None]


class Taken(NamedTuple):
    """Seconds by the clock, and of this thread's CPU time."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Taken:
        """Both clocks."""
        return cls(time.perf_counter(), time.thread_time())

    def since(self, begin: Taken, passes: int) -> Taken:
        """Mean of so many passes."""
        return Taken((self.wall - begin.wall) / passes, (self.cpu - begin.cpu) / passes)


class Model:
    """The demo's transformer, its experts in two arrays a layer."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._resident = ResidentModel(config, seed=0)
        shapes = ((config.experts, config.width, 2 * config.hidden), (config.experts, config.hidden, config.width))
        self._experts = [[mx.random.normal(shape) * shape[1] ** -0.5 for shape in shapes] for _ in range(config.layers)]
        mx.eval(self._experts)

    def step(self, token: mx.array, caches: list[KVCache], hook: Hook) -> mx.array:
        """The token (1,) behind `token` (1,), lazily; `hook` gets each layer's ids (1, k)."""
        h = self._resident.embedding(token)
        for layer, (block, (w_in, w_out)) in enumerate(zip(self._resident.layers, self._experts, strict=True)):
            h = block.attend(h, caches[layer])
            x = block.moe_norm(h)
            indices, logits = block.choose(x)
            hook(layer, indices)
            both = mx.gather_mm(x[:, None, None, :], w_in, rhs_indices=indices)
            gate, value = mx.split(both, 2, axis=-1)
            y = mx.gather_mm(gate * mx.sigmoid(gate) * value, w_out, rhs_indices=indices).squeeze(-2)
            h = h + (y * mx.softmax(logits, axis=-1)[..., None]).sum(axis=1)
        return mx.argmax(self._resident.logits(h), axis=-1)

    def turn(self, hook: Hook) -> tuple[list[int], Taken]:
        """The ids of a turn's passes, and what one of those that count took. As mlx_lm does, the next pass is on its
        way when a token is read."""
        caches = [KVCache() for _ in range(self.config.layers)]
        ids: list[int] = []
        begin = Taken.now()
        token = self.step(mx.array([0]), caches, hook)
        mx.async_eval(token)  # type: ignore[no-untyped-call]
        for number in range(1, TURN + 1):
            if number < TURN:
                following = self.step(token, caches, hook)
                mx.async_eval(following)  # type: ignore[no-untyped-call]
            ids.append(int(token.item()))  # type: ignore[arg-type]
            token = following
            if number == UNCOUNTED:
                begin = Taken.now()
        mx.synchronize()  # with what the device was given behind the last token
        return ids, Taken.now().since(begin, TURN - UNCOUNTED)


@dataclass
class Way:
    """A way to record, with what it has recorded and how long a pass of each turn took."""

    name: str
    hook: Hook
    capture: Capture | None = None
    passes: list[Taken] = field(default_factory=list)
    ids: set[tuple[int, ...]] = field(default_factory=set)

    def figures(self) -> dict[object, object]:
        """All series but the clock's and those that only token counts, or only the sets of ids, give."""
        assert self.capture is not None
        return {
            key: value
            for key, value in self.capture.series().items()
            if not key[0].startswith(("moe.run.", "moe.pool.simulated.")) and key[0] != LOAD_PEAK.name
        }


def ways(config: ModelConfig, stack: ExitStack) -> list[Way]:
    """All of them; each that records has a recorder of its own, on as long as `stack` is open."""
    experts = config.experts
    draw = random.Random(0)
    sets = [
        [set(draw.sample(range(experts), max(1, experts * share // 128))) for share in (96, 10, 5)]
        for _ in range(config.layers)
    ]
    masks = [[mx.array([expert in ids for expert in range(experts)]) for ids in given] for given in sets]
    mx.eval(masks)
    nothing: list[list[None]] = [[None, None, None]] * config.layers

    def off(layer: int, indices: mx.array) -> None:
        pass

    def routed(name: str, known: list[list[set[int]]] | list[list[None]]) -> Way:
        rec = Recorder()

        def hook(layer: int, indices: mx.array) -> None:
            rec.routed(layer, set(indices.tolist()[0]), *known[layer])  # type: ignore

        return Way(name, hook, stack.enter_context(capture(config.layers, recorder=rec)))

    def routed_array(name: str, known: list[list[set[int]]] | list[list[mx.array]] | list[list[None]]) -> Way:
        rec = Recorder()

        def hook(layer: int, indices: mx.array) -> None:
            rec.routed_array(layer, indices, experts, *known[layer])

        return Way(name, hook, stack.enter_context(capture(config.layers, recorder=rec)))

    return [
        Way("off", off),
        Way("off again", off),
        routed("routed", nothing),
        routed_array("routed_array", nothing),
        routed("routed, with sets", sets),
        routed_array("routed_array, with sets", sets),
        routed_array("routed_array, with masks", masks),
    ]


def measure(model: Model, rounds: int, stack: ExitStack) -> list[Way]:
    """Rounds of all ways in an order drawn anew, behind one round that does not count."""
    found = ways(model.config, stack)
    order = random.Random(0)
    for number in range(rounds + 1):
        for way in order.sample(found, len(found)):
            ids, taken = model.turn(way.hook)
            way.ids.add(tuple(ids))
            if number:
                way.passes.append(taken)
    return found


def ratio(times: list[float], off: list[float]) -> tuple[float, float, float]:
    """A pass' time over off's, as a ratio of medians, with the 95 % interval of the rounds drawn again (bootstrap)."""
    pairs = list(zip(times, off, strict=True))
    draw = random.Random(0)

    def of(drawn: list[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in drawn) / statistics.median(b for _, b in drawn)

    again = sorted(of(draw.choices(pairs, k=len(pairs))) for _ in range(1000))
    return of(pairs), again[25], again[974]


def misses(found: list[Way], layers: int) -> list[str]:
    """What is wrong: other outputs, calls that are missing or were dropped, forms that do not agree."""
    wrong = [f"{way.name}: other outputs" for way in found if way.ids != found[0].ids or len(way.ids) != 1]
    _, _, routed, array, routed_sets, array_sets, array_masks = found
    for way, same in ((array, routed), (array_sets, routed_sets), (array_masks, routed_sets)):
        if way.figures() != same.figures():
            wrong.append(f"{way.name}: other figures than {same.name}")
    expected = (len(routed.passes) + 1) * TURN * layers
    for way in found[2:]:
        assert way.capture is not None
        if (expected, 0) != (way.capture.total(LAYER_CALLS.name), way.capture.total(LOST.name)):
            wrong.append(f"{way.name}: {way.capture.total(LAYER_CALLS.name):.0f} layer calls, not {expected}")
    return wrong


def show(found: list[Way]) -> None:
    """The table, in Markdown."""
    print("| way | time, of off's | 95 % | thread's CPU time, of off's | 95 % |")
    print("|---|---|---|---|---|")
    for way in found:
        cells = []
        for column in range(len(Taken._fields)):
            times, off = ([taken[column] for taken in each.passes] for each in (way, found[0]))
            middle, low, high = ratio(times, off)
            cells.append(f"{middle:.3f} | {low:.3f} to {high:.3f}")
        print(f"| {way.name} | {' | '.join(cells)} |")


def main() -> int:
    """Measure, print, and fail where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rounds", 20),
        ("layers", 12),
        ("experts", 128),
        ("top-k", 8),
        ("width", 64),
        ("hidden", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = ModelConfig(options.layers, options.experts, options.top_k, options.width, options.hidden)
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    device = mx.device_info().get("device_name", "GPU") if on_gpu else f"CPU, {platform.machine()}"
    print(f"{device}: {config.layers} layers, {config.experts} experts, top-{config.top_k}, width {config.width}\n")
    with ExitStack() as stack:
        found = measure(Model(config), options.rounds, stack)
        wrong = misses(found, config.layers)
    show(found)
    print(*wrong, sep="\n") if wrong else print("\nthe same outputs and figures in every way")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
