"""What can be chosen about a demo run, validated once and before anything is built."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from .config import ModelConfig

FAULTS = ("slow-disk", "bad-predictor", "small-pool")


class DemoError(Exception):
    """What is wrong, as one line for the person who started the demo."""


def default_cache_dir() -> Path:
    """The user's cache folder for this demo: ``XDG_CACHE_HOME`` if set, else the platform's place."""
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):
        base = Path(xdg)
    else:
        try:
            home = Path.home()
        except RuntimeError as error:
            raise DemoError(f"no cache folder: {error}") from error
        base = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return base / "moe-telemetry" / "demo"


@dataclass(frozen=True)
class DemoSettings:
    """A demo run. Values that cannot work raise `DemoError` here.

    Args:
        tokens: decode tokens to emit; None runs until stopped.
        seed: of the weights.
        text: the file to follow; None follows the texts that the package ships.
        slots: experts a layer can hold in memory.
        read_mbps: bandwidth of the simulated disk, in 10^6 bytes a second, shared by demand and prefetch reads.
        prefetch: predict and read ahead, or read on demand only.
        lru: evict the least recently used expert, not the one used least, which is better.
        device_routing: record routing by `routed_array`, which reads the ids some passes later, not by `routed`.
        fault: one of `FAULTS`, on from `fault_after` for `fault_for` seconds.
        cache_dir: where the expert weights are kept; None is `default_cache_dir`.
    """

    tokens: int | None = None
    seed: int = 0
    text: Path | None = None
    slots: int = 16
    read_mbps: float = 600.0
    prefetch: bool = True
    lru: bool = False
    device_routing: bool = False
    fault: str | None = None
    fault_after: float = 20.0
    fault_for: float = 20.0
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what no model of the default configuration could run with."""
        model = ModelConfig()
        if self.tokens is not None and self.tokens < 1:
            raise DemoError(f"tokens must be at least 1, not {self.tokens}")
        if self.seed < 0:
            raise DemoError(f"seed must be 0 or more, not {self.seed}")
        if self.slots < model.largest_union:
            raise DemoError(
                f"slots must be at least {model.largest_union}, the most experts one pass can need in a layer, "
                f"not {self.slots}"
            )
        if self.slots > model.experts:
            raise DemoError(f"slots must be at most {model.experts}, the experts of a layer, not {self.slots}")
        if not (math.isfinite(self.read_mbps) and self.read_mbps > 0):
            raise DemoError(f"read_mbps must be a number above 0, not {self.read_mbps}")
        if self.fault is not None and self.fault not in FAULTS:
            raise DemoError(f"unknown fault {self.fault!r}: choose from {', '.join(FAULTS)}")
        if self.fault == "bad-predictor" and not self.prefetch:
            raise DemoError("the fault bad-predictor needs prefetch: there is no predictor without it")
        for name, value in (("fault_after", self.fault_after), ("fault_for", self.fault_for)):
            if not (math.isfinite(value) and value >= 0):
                raise DemoError(f"{name} must be 0 seconds or more, not {value}")
        if self.text is not None:
            self._check_text(self.text)

    @staticmethod
    def _check_text(path: Path) -> None:
        if not path.is_file():
            raise DemoError(f"no text file at {path}")
        try:
            with path.open("rb") as file:
                empty = not file.read(1)
        except OSError as error:
            raise DemoError(f"cannot read the text file {path}: {error.strerror}") from error
        if empty:
            raise DemoError(f"the text file {path} is empty")
