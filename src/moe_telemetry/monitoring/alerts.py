"""All alerts, in the order of the runbook."""

from __future__ import annotations

from . import figure_alerts as figures
from . import state_alerts as states
from .alert import Alert
from .config import Config


def alerts(config: Config) -> list[Alert]:
    """All alerts."""
    return [
        states.target_down(config),
        *figures.recall(config),
        *figures.hit_rate(config),
        figures.late(config),
        figures.thrash(config),
        states.union(config),
        figures.slow(config),
        figures.stalled(config),
        states.hung(config),
        figures.reads(config),
        states.memory(config),
        states.detached(config),
        states.records(config),
        states.overflow(config),
    ]
