"""Scrapes of a run that tests make themselves: real hooks and a real endpoint, with what varies taken out."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import golden_run
from conftest import scrape as scrape_text

import moe_telemetry as mt
from moe_telemetry import catalog as c
from moe_telemetry.top.scrape import Reader, Scrape

START = 1_700_000_000.0
"""When every recorded run started, in Unix seconds."""


def at(text: str, seconds: float, reader: Reader | None = None) -> Scrape:
    """A scrape so many seconds behind the run's start."""
    return (reader or Reader("")).parse(text, seconds, START + seconds, took=0.012)


def fixed(text: str, model: str, start: float = START) -> str:
    """A scrape without what differs from run to run."""
    values = {
        c.PROCESS_MEMORY.prometheus: 6_310_000_000.0,
        c.PROCESS_CPU.prometheus: 512.0,
        c.RUN_START_TIME.prometheus: start,
        c.COLLECT_DURATION.prometheus: 0.002,
    }
    for name, value in values.items():
        text = re.sub(rf"^{name} .*$", f"{name} {value!r}", text, flags=re.MULTILINE)
    info = f'{c.RUN_INFO.prometheus}{{model="{model}",run="{start:.0f}",runtime="recorded",version="1.0"}} 1.0'
    return re.sub(rf"^{c.RUN_INFO.prometheus}{{.*$", info, text, flags=re.MULTILINE)


@contextmanager
def _mlx(module: ModuleType | None) -> Iterator[None]:
    before = sys.modules.pop("mlx.core", None)
    if module is not None:
        sys.modules["mlx.core"] = module
    try:
        yield
    finally:
        sys.modules.pop("mlx.core", None)
        if before is not None:
            sys.modules["mlx.core"] = before


def fake_mlx() -> AbstractContextManager[None]:
    """MLX with known memory figures."""
    return _mlx(golden_run.fake_mlx())


def no_mlx() -> AbstractContextManager[None]:
    """A process that has not loaded MLX."""
    return _mlx(None)


@dataclass
class Recorded:
    """A run under way: `step` makes passes, `scrape` and `snapshot` read the same state."""

    telemetry: Any
    recorder: mt.Recorder
    layers: int
    slots: int
    random: random.Random
    model: str = "recorded-moe"

    def load(self) -> None:
        """Declare the pools."""
        for layer in range(self.layers):
            self.recorder.pool(layer, capacity=self.slots, resident=self.slots)

    def passes(self, phase: str, tokens: int, count: int, skill: float = 0.85, skew: float = 1.0) -> None:
        """Passes of `tokens` tokens; `skill` is how good pool and predictor are, about; above 1, `skew` makes some
        experts more wanted than others."""
        rec = self.recorder
        for _ in range(count):
            rec.forward(tokens, phase=phase)
            for layer in range(self.layers):
                if skew == 1.0:
                    experts = {self.random.randrange(64) for _ in range(4 * tokens)}
                else:
                    experts = {int(64 * self.random.random() ** skew) for _ in range(4 * tokens)}
                # Some layers are worse than others, as in a real model.
                luck = skill - 0.25 * (layer % 7 == 3)
                resident = {expert for expert in experts if self.random.random() < luck}
                predicted = {expert for expert in experts if self.random.random() < luck}
                ready = {expert for expert in predicted if self.random.random() < luck}
                rec.routed(layer, experts, resident=resident, predicted=predicted, ready=ready)
                rec.evicted(layer, len(experts - resident))
                for stage, seconds in (("predict", 2e-4), ("submit", 5e-5), ("promote", 4e-4)):
                    rec.prefetch(stage, seconds)
                for step, seconds in (("take", 5e-5), ("route", 1e-4), ("place", 2e-4)):
                    rec.promote(step, seconds)
                rec.read("demand", 400_000 * len(experts - resident - ready), 0.002)
                rec.read("prefetch", 400_000 * len(ready), 0.001)
            rec.stall(0.004)
            rec.tokens(tokens if phase == "prefill" else 1 + tokens // 2)
            if phase == "decode" and tokens > 1:
                rec.speculation(tokens - 1, tokens // 2)
            rec.forward_done(0.05 + 0.02 * tokens)

    def text(self, start: float = START) -> str:
        """A scrape, as it will always be."""
        return fixed(scrape_text(self.telemetry), self.model, start)

    def snapshot(self) -> dict[str, Any]:
        """The exact totals of the same moment."""
        found: dict[str, Any] = self.telemetry.snapshot()
        return found


@contextmanager
def recorded(layers: int = 4, slots: int = 16, seed: int = 1, pool_curve: str | None = None) -> Iterator[Recorded]:
    """A run with its own recorder and endpoint."""
    recorder = mt.Recorder()
    with fake_mlx(), mt.start(model="recorded-moe", port=0, recorder=recorder, pool_curve=pool_curve) as telemetry:
        run = Recorded(telemetry, recorder, layers, slots, random.Random(seed))
        run.load()
        yield run
