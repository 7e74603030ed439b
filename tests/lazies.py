"""Watches MLX arrays for evaluation: what a hook must never cause."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator

import mlx.core as mx
import pytest

EVALUATING = (
    *("item", "tolist", "__float__", "__int__", "__index__", "__bool__"),
    *("__repr__", "__str__", "__iter__", "__array__", "__len__", "__buffer__"),
)


def no_evaluation() -> Iterator[list[str]]:
    """A fixture's body: fails the test that reads an array's values or evaluates one; yields the calls so far."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in ((mx.array, EVALUATING), (mx, ("eval", "async_eval"))):
            for name in names:
                if hasattr(owner, name):
                    patch.setattr(owner, name, _noted(seen, name, getattr(owner, name)))
        yield seen
    assert [] == seen


def _noted(seen, name, original):
    def call(*args, **kwargs):
        seen.append(name)
        return original(*args, **kwargs)

    return call


def unevaluated(size: int = 1 << 16):
    """An array whose values were never computed, with what its buffer will take."""
    return mx.ones((size,), dtype=mx.int32) + 1


def memory() -> int:
    """Bytes MLX holds: rises when an array is evaluated."""
    gc.collect()
    return mx.get_active_memory()


def held(root: object) -> list[str]:
    """Types of MLX objects reachable from `root`, through containers, slots and attributes."""
    found, queue, seen = [], [root], set()
    while queue:
        node = queue.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if type(node).__module__.startswith("mlx"):
            found.append(type(node).__name__)
        elif isinstance(node, dict):
            queue += [*node.keys(), *node.values()]
        elif isinstance(node, (list, tuple, set, frozenset, deque)):
            queue += node
        elif type(node).__module__.startswith("moe_telemetry"):
            queue += gc.get_referents(node)
    return found
