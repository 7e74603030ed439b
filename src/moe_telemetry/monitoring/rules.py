"""The rule file: recording rules and alerts, as data and as YAML."""

from __future__ import annotations

from .config import Config
from .recording import Names


def usual(config: Config, figure: str) -> str:
    """The recorded series of a run's usual recall, hit_rate or tokens_per_second (labels: job, instance, phase,
    model, run)."""
    return Names(config).usual(figure)


def recorded(config: Config, figure: str) -> str:
    """The recorded series that an alert compares with the usual value; the same figures and labels."""
    return Names(config).recorded(figure)
