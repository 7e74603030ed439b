"""Scenarios as promtool's test files, and what promtool says of rules that run through them."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import yaml
from monitoring.expected import Firing
from monitoring.host import Host

from moe_telemetry.monitoring import rules as generated
from moe_telemetry.monitoring.config import Config

FIRING = 'ALERTS{alertstate="firing"}'
EVALUATION = "15s"
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Scenario:
    """Hosts, and what fires at which minute: at each of them nothing else does, and nothing else ever did."""

    name: str
    hosts: Sequence[Host]
    checks: dict[float, tuple[Firing, ...]] = field(default_factory=dict)
    step: float = 15
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Expression -> (minute, value), for what is recorded; values are rounded to 1/1000."""
    least: float = 1
    """Minutes that it lasts even without series."""
    config: Config = field(default_factory=Config)
    """What the rules are made for."""

    @property
    def rules(self) -> str:
        """The rule file that it runs through."""
        return generated.render(self.config)

    @property
    def minutes(self) -> float:
        """How long it lasts."""
        return max(self.least, *(sum(seconds for seconds, _ in host.segments) / 60 for host in self.hosts))

    @property
    def fired(self) -> set[tuple[str, str]]:
        """Name and instance of whatever fires in it."""
        return {(alert.name, alert.instance) for firing in self.checks.values() for alert in firing}

    @property
    def count(self) -> int:
        """Comparisons that promtool makes."""
        test = self.test()
        return sum(len(test[key]) for key in ("alert_rule_test", "promql_expr_test"))

    def test(self) -> dict[str, list[object]]:
        """One of a test file's tests."""
        end = _time(self.minutes)
        expressions = [
            _expression(f"group by (alertname, instance) (max_over_time({FIRING}[{end}]))", self.minutes, self.fired)
        ]
        alerts: list[object] = []
        for minute, firing in self.checks.items():
            here = {(alert.name, alert.instance) for alert in firing}
            expressions.append(_expression(f"group by (alertname, instance) ({FIRING})", minute, here))
            by_name: dict[str, list[object]] = {}
            for alert in firing:
                if alert.description:
                    by_name.setdefault(alert.name, []).append(alert.exactly())
            for name, exact in by_name.items():
                alerts.append({"eval_time": _time(minute), "alertname": name, "exp_alerts": exact})
        for expression, (minute, value) in self.values.items():
            expressions.append(
                {
                    "expr": f"round(max({expression}), 0.001)",
                    "eval_time": _time(minute),
                    "exp_samples": [{"labels": "{}", "value": value}],
                }
            )
        return {
            "name": self.name,
            "interval": f"{self.step:g}s",
            "input_series": [entry for host in self.hosts for entry in host.series(self.step)],
            "alert_rule_test": alerts,
            "promql_expr_test": expressions,
        }


def _time(minute: float) -> str:
    return f"{round(minute * 60)}s"


def _expression(query: str, minute: float, firing: Iterable[tuple[str, str]]) -> dict[str, object]:
    samples = [
        {"labels": f'{{alertname="{name}",instance="{instance}"}}', "value": 1} for name, instance in sorted(firing)
    ]
    return {"expr": query, "eval_time": _time(minute), "exp_samples": samples}


ENVIRONMENT = {**os.environ, "GOMAXPROCS": "1", "GOGC": "400"}
"""One processor and less collecting of garbage: a seventh less CPU, where there is a promtool for each processor.

Read once: pytest changes the environment while threads start programs.
"""

_starting = threading.Lock()
"""Two processes that threads start at once fail now and then with "Bad address" on some systems."""


def tool(name: str = "promtool") -> str:
    """The program's path; skips the test without it, or fails it where CI=true promises it."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def run(*arguments: str, folder: Path | None = None, program: str = "promtool") -> subprocess.CompletedProcess[str]:
    """The program's own answer."""
    command = [tool(program), *arguments]
    with _starting:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=ENVIRONMENT,
        )
    with process:
        try:
            output, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@cache
def _groups(rules: str) -> list[str]:
    """Names of the rule groups in their order. Without one promtool draws an order anew in each run, and what one
    group takes from another is of now or of the evaluation before."""
    return [group["name"] for group in yaml.load(rules, Loader=LOADER)["groups"]]


def write(folder: Path, rules: str, scenarios: Iterable[Scenario]) -> Path:
    """Writes rules and scenarios, and returns the test file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.yml").write_text(rules)
    path = folder / "test.yml"
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": EVALUATION,
        "group_eval_order": _groups(rules),
        "tests": [scenario.test() for scenario in scenarios],
    }
    path.write_text(yaml.dump(document, Dumper=DUMPER, sort_keys=False, width=1_000_000))
    return path


def complaints(folder: Path, rules: str, scenarios: Iterable[Scenario]) -> str:
    """What promtool finds wrong with the rules in these scenarios; nothing when they pass."""
    answer = run("test", "rules", str(write(folder, rules, scenarios)))
    return "" if answer.returncode == 0 else answer.stdout + answer.stderr or "failed without a word"


@contextmanager
def in_parallel(jobs: dict[str, tuple[str, Scenario]], folder: Path) -> Iterator[dict[str, Future[str]]]:
    """Complaints of each job's rules in its scenario, a promtool for each processor that other tests do not use."""
    tool()
    running = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // running)) as pool:
        found = {
            name: pool.submit(complaints, folder / str(number), rules, [scenario])
            for number, (name, (rules, scenario)) in enumerate(jobs.items())
        }
        try:
            yield found
        finally:
            pool.shutdown(cancel_futures=True)


def selected(request: pytest.FixtureRequest, key: str) -> list[str]:
    """Values of a parameter among the tests of this module that were selected."""
    items = [item for item in request.session.items if item.fspath == request.node.fspath]
    parameters = [getattr(getattr(item, "callspec", None), "params", {}) for item in items]
    return [given[key] for given in parameters if key in given]
