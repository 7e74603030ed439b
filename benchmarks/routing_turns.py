"""Decode in several ways that take turns within one generation: what drifts for a second drifts for all of them."""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchGLU
from routing_ways import Recording, tolist_call

from moe_telemetry import recorder, recording

generation = importlib.import_module("mlx_lm.generate")

TURN = 24
"""Tokens of a turn: of the counted ones every eighth begins a batch of reductions, and reads an older one."""
UNCOUNTED = 8
"""Tokens at the beginning of a turn: what the way before has left in the device's queue."""
NAMES = ("off", "off again", "this", "idle", "tolist")


@dataclass
class Turns:
    """A way's turns: mean seconds a token of each."""

    name: str
    seconds: list[float] = field(default_factory=list)


class Switch:
    """Puts one way in the place of another while a generation goes on. Made within `Recording`'s context.

    The generator's own wrapper stays in all of them: some microseconds a token.
    """

    def __init__(self, model: Module, originals: dict[type, Callable[..., mx.array]]) -> None:
        self._originals = originals
        self._patched: dict[type, Callable[..., mx.array]] = {kind: kind.__call__ for kind in (SwitchGLU, type(model))}
        self._store = recorder._store

    def to(self, name: str) -> None:
        """Go on in this way."""
        calls = self._patched if name in ("this", "idle") else self._originals
        for kind, call in calls.items():
            setattr(kind, "__call__", call)  # noqa: B010
        if name == "tolist":
            setattr(SwitchGLU, "__call__", tolist_call(self._originals[SwitchGLU]))  # noqa: B010
        if name == "this":
            recording.attach(recorder, self._store)
        else:
            recording.detach(recorder)


@contextmanager
def switching(model: Module, record: Recording) -> Iterator[Switch]:
    """Telemetry and instrumentation around a generation whose ways are switched; all is as before in the end."""
    originals: dict[type, Callable[..., mx.array]] = {kind: kind.__call__ for kind in (SwitchGLU, type(model))}
    with record():
        switch = Switch(model, originals)
        try:
            yield switch
        finally:
            switch.to("this")


def decode(model: Module, record: Recording, rounds: int, seconds: float) -> tuple[list[Turns], list[int]]:
    """Rounds of a turn for each way, in an order drawn anew, as many as begin within `seconds`; and all token ids."""
    ways = {name: Turns(name) for name in NAMES}
    draw = random.Random(0)
    ids: list[int] = []
    with switching(model, record) as switch:
        tokens = generation.generate_step(prompt(model), model, max_tokens=-1)
        ids.append(next(tokens)[0])
        end = time.perf_counter() + seconds
        for _ in range(rounds):
            for name in draw.sample(NAMES, len(NAMES)):
                switch.to(name)
                counted = 0.0
                for number in range(TURN):
                    begin = time.perf_counter()
                    ids.append(next(tokens)[0])
                    if number >= UNCOUNTED:
                        counted += time.perf_counter() - begin
                ways[name].seconds.append(counted / (TURN - UNCOUNTED))
            if time.perf_counter() > end:
                break
        switch.to("this")
        tokens.close()
    return list(ways.values()), ids


def prompt(model: Module) -> mx.array:
    """What every generation here begins with."""
    made = mx.random.randint(0, model.args.vocab_size, (32,), key=mx.random.key(1))
    mx.eval(made)
    return made


def plain(model: Module, tokens: int) -> list[int]:
    """Ids that mlx_lm by itself gives for that prompt."""
    return [token for token, _ in generation.generate_step(prompt(model), model, max_tokens=tokens)]


def ratio(way: Turns, off: Turns) -> tuple[float, float, float]:
    """Speed against off's, as a ratio of medians, with the 95 % interval of the turns drawn again (bootstrap)."""
    pairs = list(zip(off.seconds, way.seconds, strict=True))
    draw = random.Random(0)

    def of(found: list[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in found) / statistics.median(b for _, b in found)

    again = sorted(of(draw.choices(pairs, k=len(pairs))) for _ in range(1000))
    return of(pairs), again[25], again[974]
