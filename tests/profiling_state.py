"""The drop-in is a module with state; tests begin with its dicts as after an import."""

from __future__ import annotations

from seed_reference import Reference

from moe_telemetry import profiling

DICTS = ("PROF", "WINDOW_PROF", "PREDICT_RECALL_PROF", "PREFETCH_TPROF", "MISS_ATTRIB")


def pristine() -> None:
    """Every dict as after an import, no phase named, no unions."""
    profiling.set_phase(None)
    profiling.union_reset()
    fresh = Reference()
    for name in DICTS:
        found = getattr(profiling, name)
        found.clear()
        found.update(getattr(fresh, name))
