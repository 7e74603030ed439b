"""All scenarios, by name."""

from __future__ import annotations

from monitoring import others, quiet, ratios
from monitoring.promtool import Scenario

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for scenario in (*quiet.scenarios(), *others.scenarios(), *ratios.scenarios())
}
