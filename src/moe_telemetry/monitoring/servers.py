"""Configuration of Prometheus and Alertmanager, with paths relative to their own files."""

from __future__ import annotations

from moe_telemetry.settings import DEFAULT_PORT

from .config import Config, duration
from .state_alerts import ALWAYS
from .text import generated

RULES = "rules/moe.yml"
TARGETS = "targets/hosts.yml"

_DROPS = {"MoePredictorRecallDrop": "MoePredictorRecallLow", "MoeDecodeHitRateDrop": "MoeDecodeHitRateLow"}
"""A critical alert, and the warning that says the same: the first silences the second, never the reverse."""


def prometheus(config: Config) -> str:
    """prometheus.yml."""
    scrape = duration(config.windows.scrape)
    document = {
        "global": {
            "scrape_interval": scrape,
            "scrape_timeout": scrape,
            "evaluation_interval": duration(config.windows.evaluation),
        },
        "rule_files": ["rules/*.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [config.alertmanager]}]}]},
        "scrape_configs": [_scrape(config)],
    }
    return generated(document, "Needs Prometheus 2.42 or newer; the rules use keep_firing_for.")


def _scrape(config: Config) -> dict[str, object]:
    found: dict[str, object] = {"job_name": config.job, "file_sd_configs": [{"files": ["targets/*.yml"]}]}
    if config.names:
        lookup = {"names": list(config.names), "type": "A", "port": DEFAULT_PORT, "refresh_interval": "15s"}
        found["dns_sd_configs"] = [lookup]
        # A container's address changes from start to start; its name does not.
        name = {"source_labels": ["__meta_dns_name"], "regex": "(.+)", "target_label": "instance"}
        found["relabel_configs"] = [{**name, "replacement": f"$1:{DEFAULT_PORT}"}]
    return found


def targets(config: Config) -> str:
    """targets/hosts.yml, which Prometheus reads again whenever it changes."""
    notes = [
        "One line a host. A host that should always be there gets a label: its absence is then an outage",
        "(MoeTargetDown), while without it a run may end whenever it likes.",
        f'- {{targets: ["server:9464"], labels: {{expect: {ALWAYS}}}}}',
    ]
    header = generated([], *notes).removesuffix("[]\n")
    return header + "".join(f'- {{targets: ["{target}"]}}\n' for target in config.targets)


def alertmanager(config: Config) -> str:
    """alertmanager.yml."""

    def wait(seconds: float) -> str:
        return duration(seconds / config.time_scale)

    receiver = {"name": "webhook", "webhook_configs": [{"url": config.webhook_url, "send_resolved": True}]}
    document = {
        "route": {
            "receiver": "webhook",
            "group_by": ["alertname", "job", "instance"],  # not by run: a restart is no second message
            "group_wait": wait(10),
            "group_interval": wait(60),
            "repeat_interval": "4h",
            "routes": [{"matchers": ['severity="critical"'], "receiver": "webhook", "repeat_interval": "1h"}],
        },
        "inhibit_rules": [
            _inhibit("MoeTargetDown", ['alertname=~"Moe.+"', 'alertname!="MoeTargetDown"'], "job", "instance"),
            *(
                _inhibit(critical, [f'alertname="{warning}"'], "job", "instance", "phase")
                for critical, warning in _DROPS.items()
            ),
        ],
        "receivers": [receiver],
    }
    return generated(document, "Put your own receiver's address in place of the webhook's.")


def _inhibit(source: str, silenced: list[str], *equal: str) -> dict[str, list[str]]:
    return {
        "source_matchers": [f'alertname="{source}"'],
        "target_matchers": silenced,
        "equal": list(equal),
    }
