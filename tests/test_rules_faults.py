"""Faults put into the rules on purpose: lint finds none, a scenario finds each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from monitoring import promtool
from monitoring.faults import FAULTS
from monitoring.scenarios import SCENARIOS

BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    """What promtool has to say about each selected fault in the scenario that should find it."""
    faults = [BY_NAME[name] for name in promtool.selected(request, "fault")]
    jobs = {
        fault.name: (fault.put_into(SCENARIOS[fault.scenario].rules), SCENARIOS[fault.scenario]) for fault in faults
    }
    with promtool.in_parallel(jobs, tmp_path_factory.mktemp("faults")) as futures:
        yield futures


@pytest.mark.parametrize("fault", BY_NAME)
def test_a_scenario_finds_the_fault(fault: str, found: dict[str, Future[str]]) -> None:
    """The scenario named for a fault fails with it: a fault that survives is a scenario that is missing."""
    said = found[fault].result()
    print(f"{fault} -> {BY_NAME[fault].scenario}")

    assert "FAILED" in said
    assert "parse error" not in said


def test_lint_finds_none_of_them(tmp_path: Path) -> None:
    """Every spoiled rule file is a valid one, so that scenarios are the only guard."""
    paths = []
    for number, fault in enumerate(FAULTS):
        paths.append(tmp_path / f"{number}.yml")
        paths[-1].write_text(fault.put_into(SCENARIOS[fault.scenario].rules))

    answer = promtool.run("check", "rules", "--lint=all", "--lint-fatal", *map(str, paths))

    assert 0 == answer.returncode, answer.stderr


def test_a_fault_that_changes_nothing_is_refused() -> None:
    """A pattern that no longer fits the rules fails by name instead of passing for found."""
    with pytest.raises(ValueError, match="no traffic floor"):
        BY_NAME["no traffic floor"].put_into("groups: []")


def test_names_of_faults_are_unique() -> None:
    """No fault hides another of its name."""
    assert len(FAULTS) == len(BY_NAME)
