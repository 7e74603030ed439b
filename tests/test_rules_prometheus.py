"""The rules in a real Prometheus, on what a real telemetry exports."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from prometheus import prometheus

from moe_telemetry.monitoring import rules
from moe_telemetry.monitoring.config import Config

FACTOR = 60
CONFIG = Config().scaled(FACTOR)
GOOD, BAD = range(9), range(4)


class Runtime(threading.Thread):
    """Decodes with a pool: of ten experts `resident` are there and `predicted` were named."""

    def __init__(self, recorder) -> None:
        super().__init__(daemon=True)
        self.recorder = recorder
        self.predicted = set(GOOD)
        self.done = threading.Event()

    def run(self) -> None:
        """A pass of 4 layers every 20 ms."""
        while not self.done.wait(0.02):
            self.recorder.forward(1)
            for layer in range(4):
                self.recorder.routed(layer, set(range(10)), set(GOOD), self.predicted, self.predicted)
                self.recorder.read("demand", 4096, 0.001)
            self.recorder.stall(0.002)
            self.recorder.tokens(1)
            self.recorder.forward_done(0.02)


@pytest.fixture
def runtime(start, recorder):
    """A runtime under telemetry, and the telemetry."""
    telemetry = start(num_layers=4, run="rules")
    for layer in range(4):
        recorder.pool(layer, capacity=16, resident=16)
    running = Runtime(recorder)
    running.start()
    yield running, telemetry
    running.done.set()
    running.join()


def test_rules_evaluate_and_a_drop_fires(tmp_path: Path, runtime) -> None:
    """Every rule is healthy, ratios are the run's own, nothing fires; then a worse predictor fires the recall drop."""
    running, telemetry = runtime
    path = tmp_path / "moe.yml"
    path.write_text(rules.render(CONFIG))
    with prometheus(tmp_path, targets=[f"127.0.0.1:{telemetry.port}"], rules=[path]) as server:
        recall = rules.recorded(CONFIG, "recall")
        (series,) = server.wait(f'{rules.usual(CONFIG, "recall")}{{phase="decode"}}', seconds=60)
        labels = series["metric"]

        assert "test-moe" == labels["model"]
        assert labels["run"].startswith("rules")
        assert 0.9 == pytest.approx(server.value(f'{recall}{{phase="decode"}}'))
        assert 0.9 == pytest.approx(float(series["value"][1]))
        assert 50 == pytest.approx(
            server.value(f'{rules.recorded(CONFIG, "tokens_per_second")}{{phase="decode"}}'), 0.1
        )
        found = [rule for group in server.api("rules")["groups"] for rule in group["rules"]]
        assert len(found) == sum(len(group["rules"]) for group in rules.groups(CONFIG))
        assert {("ok", "")} == {(rule["health"], rule.get("lastError", "")) for rule in found}
        assert [] == server.query('ALERTS{alertstate="firing"}')

        running.predicted = set(BAD)
        began = time.monotonic()
        (alert,) = server.wait('ALERTS{alertstate="firing",alertname="MoePredictorRecallDrop"}', seconds=60)

        assert "critical" == alert["metric"]["severity"]
        assert time.monotonic() - began > 5
        (described,) = [
            a for a in server.api("alerts")["alerts"] if a["labels"]["alertname"] == "MoePredictorRecallDrop"
        ]
        assert "below this run's usual value" in described["annotations"]["description"]
