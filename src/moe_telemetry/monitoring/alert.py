"""What an alert is, and the words that all have in common.

Prometheus keeps the value of an alert's last breach while `keep_firing_for` holds it, so descriptions say "was".
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config, duration
from .recording import Rule

MINUTE = 60.0
DECODE = "decode"


@dataclass(frozen=True)
class Alert:
    """One alert; `wait` and `keep` are seconds, before scaling."""

    name: str
    expr: str
    severity: str
    summary: str
    description: str
    dashboard: str
    wait: float
    keep: float = 0
    variables: tuple[str, ...] = ("instance",)
    """The dashboard's, set from the alert's labels of the same names."""

    @property
    def anchor(self) -> str:
        """Of its entry in the runbook."""
        return self.name.lower()

    def rule(self, config: Config) -> Rule:
        """As Prometheus reads it."""
        found: Rule = {"alert": self.name, "expr": self.expr, "for": duration(self.wait / config.time_scale)}
        if self.keep:
            found["keep_firing_for"] = duration(self.keep / config.time_scale)
        found["labels"] = {"severity": self.severity}
        found["annotations"] = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{config.runbook_url}#{self.anchor}",
            "dashboard": self._link(config),
        }
        return found

    def _link(self, config: Config) -> str:
        """Its dashboard, which a receiver outside of Grafana can open."""
        values = "&".join(f"var-{name}={{{{ $labels.{name} }}}}" for name in self.variables)
        return f"{config.grafana_url.rstrip('/')}/d/{self.dashboard}?{values}"


OVERVIEW, PREFETCH, LAYERS, HOST = "moe-overview", "moe-prefetch", "moe-layers", "moe-host"
ON = "{{ $labels.instance }}"
SHARE = "{{ $value | humanizePercentage }}"
NUMBER = "{{ $value | humanize }}"
