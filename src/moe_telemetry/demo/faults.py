"""Faults that really happen, for some time, so that what watches the demo can be seen to notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from .config import ModelConfig
from .disk import SimulatedDisk
from .pool import LayerPool
from .prefetch import Prefetcher
from .settings import DemoSettings

DISK_SLOWDOWN = 25.0
SMALL_POOL = 6
"""Slots under the small-pool fault: a single token's experts fit, a verify pass' or a chunk's do not."""


class Fault:
    """Switches the chosen fault on and off by the clock; without one, does nothing."""

    def __init__(
        self,
        settings: DemoSettings,
        config: ModelConfig,
        disk: SimulatedDisk,
        pools: Sequence[LayerPool],
        prefetcher: Prefetcher | None,
    ) -> None:
        self.active = False
        self._config = config
        self._disk = disk
        self._pools = pools
        self._prefetcher = prefetcher
        switches: dict[str, Callable[[bool], None]] = {
            "slow-disk": self._slow_disk,
            "bad-predictor": self._bad_predictor,
            "small-pool": self._small_pool,
        }
        self._switch = switches[settings.fault] if settings.fault else None
        self._after = settings.fault_after
        self._until = settings.fault_after + settings.fault_for
        self._began: float | None = None

    def tick(self) -> None:
        """Between two passes: switch if it is time. The first tick starts the clock."""
        if self._switch is None:
            return
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        wanted = self._after <= now - self._began < self._until
        if wanted != self.active:
            self.active = wanted
            self._switch(wanted)

    def _slow_disk(self, on: bool) -> None:
        self._disk.slowdown = DISK_SLOWDOWN if on else 1.0

    def _bad_predictor(self, on: bool) -> None:
        if self._prefetcher is not None:
            shuffled = np.random.default_rng(0).permutation(self._config.experts).tolist()
            self._prefetcher.permutation = shuffled if on else None

    def _small_pool(self, on: bool) -> None:
        for pool in self._pools:
            pool.resize(min(SMALL_POOL, pool.slots) if on else pool.slots)
