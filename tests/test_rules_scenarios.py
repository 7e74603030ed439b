"""The rules, run by promtool through simulated hosts: what fires, when, with which words, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from monitoring import others, promtool, quiet, ratios
from monitoring.scenarios import SCENARIOS

from moe_telemetry.monitoring.alerts import alerts
from moe_telemetry.monitoring.config import Config


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    """What promtool has to say about each selected scenario."""
    jobs = {name: (SCENARIOS[name].rules, SCENARIOS[name]) for name in promtool.selected(request, "scenario")}
    with promtool.in_parallel(jobs, tmp_path_factory.mktemp("scenarios")) as futures:
        yield futures


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_fires_is_what_should(scenario: str, found: dict[str, Future[str]]) -> None:
    """At each checked minute exactly the expected alerts fire, and at no other time any other did."""
    assert "" == found[scenario].result()


def test_names_of_scenarios_are_unique() -> None:
    """No scenario hides another of its name."""
    every = [*quiet.scenarios(), *others.scenarios(), *ratios.scenarios()]

    assert len(every) == len(SCENARIOS)


def test_every_alert_fires_with_its_exact_words_somewhere() -> None:
    """Each alert has a scenario that compares its labels and annotations."""
    exact = {
        firing.name
        for scenario in SCENARIOS.values()
        for expected in scenario.checks.values()
        for firing in expected
        if firing.description
    }

    assert {alert.name for alert in alerts(Config())} == exact


def test_quiet_scenarios_expect_nothing() -> None:
    """What is meant to be quiet has no expected alert."""
    assert set() == {fired for scenario in quiet.scenarios() for fired in scenario.fired}


@pytest.mark.parametrize("case", [case.name for case in ratios.CASES])
def test_the_bad_state_of_a_figure_is_judged_by_one_alert_only(case: str) -> None:
    """A figure's four scenarios expect its own alert and no other."""
    fired = {
        name for scenario in SCENARIOS.values() if scenario.name.startswith(f"{case}: ") for name, _ in scenario.fired
    }

    assert {case} == fired
