"""The runbook: an entry per alert, a reason per threshold, and a table of tested cases that is true."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from monitoring.scenarios import SCENARIOS

from moe_telemetry.monitoring.alert import Alert
from moe_telemetry.monitoring.alerts import alerts
from moe_telemetry.monitoring.config import Config, Thresholds

RUNBOOK = (Path(__file__).parents[1] / "docs" / "runbook.md").read_text(encoding="utf-8")
ALERTS = {alert.name: alert for alert in alerts(Config())}


def entry(name: str) -> str:
    """An alert's entry, without its heading."""
    found = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no entry {name}"
    return found[1]


def test_entries_are_the_alerts_in_their_order() -> None:
    """No alert is without an entry, and no entry without its alert."""
    assert list(ALERTS) == re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)


@pytest.mark.parametrize("alert", ALERTS.values(), ids=ALERTS)
def test_an_entry_says_why_where_and_what(alert: Alert) -> None:
    """Causes in order, what to look at, what to change; the link's anchor is the heading's."""
    text = entry(alert.name)

    assert re.search(r"^1\. .*2\. ", text, re.MULTILINE | re.DOTALL)
    assert "- **Look at** " in text
    assert "- **Change** " in text
    assert alert.name.lower() == alert.anchor


@pytest.mark.parametrize("threshold", fields(Thresholds), ids=lambda field: field.name)
def test_every_threshold_has_a_row_with_its_default(threshold) -> None:
    """The table of thresholds is the configuration's."""
    row = re.search(rf"^\| `{threshold.name}` \| ([\d.]+) \| .{{20,}} \|$", RUNBOOK, re.MULTILINE)

    assert row is not None
    assert threshold.default == float(row[1])


@pytest.mark.parametrize("alert", ALERTS)
def test_the_table_of_cases_is_what_is_tested(alert: str) -> None:
    """A case is said to be tested where a scenario has it, and only there."""
    row = re.search(rf"^\| {alert} \| (.*) \|$", RUNBOOK, re.MULTILINE)
    assert row is not None
    own = [
        scenario.name.removeprefix(f"{alert}: ")
        for scenario in SCENARIOS.values()
        if scenario.name.startswith(f"{alert}: ")
    ]
    fires = any(alert == name for scenario in SCENARIOS.values() for name, _ in scenario.fired)
    tested = [fires, *(any(case in name for name in own) for case in ("restart", "lost scrapes", "flapping"))]

    assert ["yes" if found else "-" for found in tested] == row[1].split(" | ")
