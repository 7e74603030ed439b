"""The rule file: recording rules and alerts, as data and as YAML. `keep_firing_for` needs Prometheus 2.42."""

from __future__ import annotations

from .alerts import alerts
from .config import Config, duration
from .recording import Names, Rule
from .recording import rules as recording_rules
from .text import generated


def usual(config: Config, figure: str) -> str:
    """The recorded series of a run's usual recall, hit_rate or tokens_per_second (labels: job, instance, phase,
    model, run)."""
    return Names(config).usual(figure)


def recorded(config: Config, figure: str) -> str:
    """The recorded series that an alert compares with the usual value; the same figures and labels."""
    return Names(config).recorded(figure)


def groups(config: Config) -> list[dict[str, object]]:
    """Rule groups: what is recorded, then what alerts."""
    interval = duration(config.windows.evaluation)
    members: dict[str, list[Rule]] = {
        "moe.recording": recording_rules(config),
        "moe.alerts": [alert.rule(config) for alert in alerts(config)],
    }
    return [{"name": name, "interval": interval, "rules": rules} for name, rules in members.items()]


def render(config: Config) -> str:
    """The rule file's text."""
    return generated({"groups": groups(config)}, "Needs Prometheus 2.42 or newer (keep_firing_for).")
