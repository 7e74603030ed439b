"""What is generated for Prometheus and Alertmanager, as texts by their path below dashboards/."""

from __future__ import annotations

from . import rules, servers
from .config import Config


def files(config: Config) -> dict[str, str]:
    """Path below dashboards/ -> text."""
    return {
        f"prometheus/{servers.RULES}": rules.render(config),
        "prometheus/prometheus.yml": servers.prometheus(config),
        f"prometheus/{servers.TARGETS}": servers.targets(config),
        "alertmanager/alertmanager.yml": servers.alertmanager(config),
    }
