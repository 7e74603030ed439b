"""The dashboards, their provisioning, and the page that says which panel shows what."""

from __future__ import annotations

import json
from typing import Any

from .config import Config, duration
from .dashboard_host import host
from .dashboard_layers import layered
from .dashboard_overview import overview
from .dashboard_prefetch import prefetch
from .panel_page import panel_page
from .text import generated

NOT_SHOWN: dict[str, str] = {}
"""Catalog metrics that neither panel nor rule uses, each with the reason."""


def build(config: Config) -> dict[str, dict[str, Any]]:
    """File name -> dashboard as plain data."""
    made = (overview(config), prefetch(config), layered(config), host(config))
    return {f"{dashboard['uid']}.json": dashboard for dashboard in made}


def files(config: Config) -> dict[str, str]:
    """Path below dashboards/ -> text of all that Grafana reads."""
    found = {
        f"grafana/{name}": json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"
        for name, dashboard in build(config).items()
    }
    if config.datasource_uid == Config.datasource_uid:
        # Another uid is of a datasource that the site has; provisioned, it would be overwritten.
        found["grafana/provisioning/datasources/moe.yml"] = _datasource(config)
    found["grafana/provisioning/dashboards/moe.yml"] = _provider()
    return found


def panel_reference(config: Config) -> str:
    """The text of docs/panels.md."""
    return panel_page(build(config))


def _datasource(config: Config) -> str:
    """`timeInterval` is the scrape interval: with less than the true one every rate over $__rate_interval is empty."""
    source = {
        "name": "MoE Prometheus",
        "uid": config.datasource_uid,
        "type": "prometheus",
        "access": "proxy",
        "url": "${MOE_PROMETHEUS_URL}",
        "isDefault": True,
        "editable": False,
        "jsonData": {
            "httpMethod": "POST",
            "prometheusType": "Prometheus",
            "timeInterval": duration(config.windows.scrape),
        },
    }
    note = "Grafana's environment gives MOE_PROMETHEUS_URL, such as http://prometheus:9090."
    return generated({"apiVersion": 1, "datasources": [source]}, note)


def _provider() -> str:
    provider = {
        "name": "moe-telemetry",
        "folder": "MoE telemetry",
        "type": "file",
        "disableDeletion": False,
        "allowUiUpdates": True,
        "updateIntervalSeconds": 30,
        "options": {"path": "${MOE_DASHBOARDS}", "foldersFromFilesStructure": False},
    }
    note = "Grafana's environment gives MOE_DASHBOARDS, the folder that holds the dashboards' JSON files."
    return generated({"apiVersion": 1, "providers": [provider]}, note)
