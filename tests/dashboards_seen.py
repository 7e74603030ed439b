"""The dashboards as the tests see them: panels and queries one by one, and exact unions to compare with."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from moe_telemetry import catalog as c
from moe_telemetry.monitoring.panel_page import rows

Dashboards = dict[str, dict[str, Any]]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels but rows, those inside collapsed ones included."""
    return [panel for _, found in rows(dashboard) for panel in found]


def each_panel(dashboards: Dashboards) -> pytest.MarkDecorator:
    """Parametrises `panel`."""
    found = [
        pytest.param(panel, id=f"{dashboard['uid']}-{panel['id']}")
        for dashboard in dashboards.values()
        for panel in panels(dashboard)
    ]
    return pytest.mark.parametrize("panel", found)


def targets(dashboards: Dashboards) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Panel and target of each query."""
    return [
        (panel, target)
        for dashboard in dashboards.values()
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def each_target(dashboards: Dashboards) -> pytest.MarkDecorator:
    """Parametrises `panel` and `target`."""
    found = [
        pytest.param(panel, target, id=f"{dashboard['uid']}-{panel['id']}{target['refId']}")
        for dashboard in dashboards.values()
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]
    return pytest.mark.parametrize(("panel", "target"), found)


def titled(dashboards: Dashboards, title: str) -> dict[str, Any]:
    """The one panel of that title."""
    (found,) = [panel for dashboard in dashboards.values() for panel in panels(dashboard) if panel["title"] == title]
    return found


def queries(dashboards: Dashboards, title: str) -> dict[str, str]:
    """The queries of the panel of that title, by the first word of their legends."""
    return {target["legendFormat"].split()[0]: target["expr"] for target in titled(dashboards, title)["targets"]}


def variable_query(variable: dict[str, Any]) -> tuple[str, str]:
    """The expression of a query variable, and the label that its values come from."""
    text = variable["query"]["query"]
    if found := re.fullmatch(r"query_result\((.*)\)", text):
        (label,) = re.findall(r"(\w+)=", variable["regex"])
        return found[1], label
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", text)
    assert found is not None, text
    return found[1], found[2]


def exact_unions(snapshot: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """p99 by nearest rank and maximum of a snapshot's exact union sizes, by phase and seq label."""
    sizes: dict[tuple[str, str], dict[int, int]] = {}
    for phase, by_seq in snapshot["unions"].items():
        for seq, found in by_seq.items():
            into = sizes.setdefault((phase, c.seq_label(int(seq))), {})
            for counts in found["layers"].values():
                for size, times in counts.items():
                    into[int(size)] = into.get(int(size), 0) + times
    return {key: (_nearest_rank(counts, 0.99), max(counts)) for key, counts in sizes.items() if counts}


def _nearest_rank(counts: dict[int, int], q: float) -> int:
    rank, seen = math.ceil(q * sum(counts.values())), 0
    for size in sorted(counts):
        seen += counts[size]
        if seen >= rank:
            return size
    raise AssertionError("no counts")
