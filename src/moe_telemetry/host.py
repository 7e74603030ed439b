"""Gauges of the process and of MLX, read when somebody asks; the inference thread is not involved."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

import psutil

from . import catalog as c
from .series import Family


@cache
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)


def process(pid: int) -> Iterator[Family]:
    """Resident memory and CPU time of the process `pid`."""
    handle = _process(pid)
    with handle.oneshot():
        times = handle.cpu_times()
        yield Family(c.PROCESS_MEMORY, {(): handle.memory_info().rss})
        yield Family(c.PROCESS_CPU, {(): times.user + times.system})


def mlx() -> Iterator[Family]:
    """MLX's memory, when the process has loaded MLX. These calls touch no stream, so any thread may make them."""
    core = sys.modules.get("mlx.core")
    if core is None or not hasattr(core, "get_active_memory"):
        return
    yield Family(c.MLX_MEMORY, {("active",): core.get_active_memory(), ("cache",): core.get_cache_memory()})
    yield Family(c.MLX_MEMORY_PEAK, {(): core.get_peak_memory()})
    if hasattr(core, "get_memory_limit"):
        yield Family(c.MLX_MEMORY_LIMIT, {(): core.get_memory_limit()})
