"""Decode in several ways that take turns within one generation: what drifts for a second drifts for all of them."""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchGLU
from routing_ways import Recording, tolist_call

from moe_telemetry import recorder, recording

generation = importlib.import_module("mlx_lm.generate")

TURN = 18
"""Tokens of a turn: one of sixteen begins a batch of reductions, and reads an older one."""
UNCOUNTED = 2
"""Tokens at the beginning of a turn: what the way before has left in the device's queue."""
NAMES = ("off", "off again", "this", "idle", "tolist")
SELDOM = {"idle": 6, "tolist": 12}
"""Ways that take a turn in one round of so many: what they tell takes fewer turns, and `tolist` is the slowest."""


@dataclass
class Turns:
    """A way's turns: mean seconds a token of each, and the round of each."""

    name: str
    seconds: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


class Switch:
    """Puts one way in the place of another while a generation goes on. Made within `Recording`'s context.

    The generator's own wrapper stays in all of them: some microseconds a token. While others have their turn, the clock
    stands still by which what was added up is read: it would be read in each turn otherwise, not once a second.
    """

    def __init__(self, model: Module, originals: dict[type, Callable[..., mx.array]]) -> None:
        self._originals = originals
        self._patched: dict[type, Callable[..., mx.array]] = {kind: kind.__call__ for kind in (SwitchGLU, type(model))}
        self._store = recorder._store
        self._left: float | None = None

    def to(self, name: str) -> None:
        """Go on in this way."""
        calls = self._patched if name in ("this", "idle") else self._originals
        for kind, call in calls.items():
            setattr(kind, "__call__", call)  # noqa: B010
        if name == "tolist":
            setattr(SwitchGLU, "__call__", tolist_call(self._originals[SwitchGLU]))  # noqa: B010
        if name == "this":
            recording.attach(recorder, self._store)
            away = 0.0 if self._left is None else time.perf_counter() - self._left
            self._left = None
            for router in self._store.routers.values():
                later = {key: replace(tally, began=tally.began + away) for key, tally in router._tallies.items()}
                router._tallies = later
        else:
            self._left = self._left or time.perf_counter()
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
        for number in range(rounds):
            names = [name for name in NAMES if not number % SELDOM.get(name, 1)]
            for name in draw.sample(names, len(names)):
                switch.to(name)
                counted = 0.0
                for token in range(TURN):
                    begin = time.perf_counter()
                    ids.append(next(tokens)[0])
                    if token >= UNCOUNTED:
                        counted += time.perf_counter() - begin
                ways[name].seconds.append(counted / (TURN - UNCOUNTED))
                ways[name].rounds.append(number)
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


def ratio(way: Turns, off: Turns) -> tuple[float, float, float, float]:
    """Speed against off's: the ratio of medians; the median of the rounds' ratios, which a machine with a fast and a
    slow state cannot shift; and of that the 95 % interval, with the rounds drawn again (bootstrap)."""
    pairs = [(off.seconds[number], seconds) for number, seconds in zip(way.rounds, way.seconds, strict=True)]
    draw = random.Random(0)
    ratios = [a / b for a, b in pairs]
    again = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    medians = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    return medians, statistics.median(ratios), again[25], again[974]
