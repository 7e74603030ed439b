"""docs/metrics.md: every metric of the catalog, and which panels, recording rules and alerts use it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_telemetry.catalog import CATALOG, Kind, Label, Metric
from moe_telemetry.monitoring import dashboards, panel_page
from moe_telemetry.monitoring.alerts import alerts
from moe_telemetry.monitoring.config import Config
from moe_telemetry.monitoring.recording import rules

INTRODUCTION = """\
# Metrics

Generated from `src/moe_telemetry/catalog.py` by `make generate`; change it there.

Counters of known label sets exist at 0 from the start; a layer's appear when the layer is known
(`start(num_layers=…)`, `recorder.pool`, or its first event). `moe.expert.lookups` and `moe.predictor.*` appear with
the first `recorder.pool`, or the first `routed` or `routed_array` that carries `resident` or `predicted`: a runtime
that has no pool has no hit rate of 0. Gauges appear with their first value. A pair of phase and seq appears when it is
first used.

`layer` is the layer's index, `none` where the caller did not know it, or `other` for layers past the first 256.
With `start(layers="off")` the label is gone: counters are sums over layers, `moe.pool.*` is the smallest pool, the
other gauges are the largest value. A quantile of `moe.expert.union`, rounded up, is exact to 64 experts.

Panels and alerts are named with every metric that they read, also through a recorded series;
[panels.md](panels.md) has the formulas, [runbook.md](runbook.md) what an alert means.
"""


class Uses:
    """Who reads which metric."""

    def __init__(self, config: Config) -> None:
        self._recorded = {str(rule["record"]): str(rule["expr"]) for rule in rules(config)}
        self._panels: dict[Metric, dict[str, dict[str, None]]] = {}
        self._alerts: dict[Metric, list[str]] = {}
        for dashboard in dashboards.build(config).values():
            for _, panels in panel_page.rows(dashboard):
                for panel in panels:
                    for metric in self._read(*panel_page.queries(panel)):
                        self._panels.setdefault(metric, {}).setdefault(dashboard["title"], {})[panel["title"]] = None
        for alert in alerts(config):
            for metric in self._read(alert.expr):
                self._alerts.setdefault(metric, []).append(alert.name)

    def _read(self, *expressions: str) -> dict[Metric, None]:
        """The metrics that expressions read, in order; a recorded series stands for what it was made of."""
        found: dict[Metric, None] = {}
        for expression in expressions:
            found |= dict.fromkeys(panel_page.metrics(expression))
            words = re.findall(r"[a-zA-Z_:][\w:]*", expression)
            found |= self._read(*(self._recorded[word] for word in words if word in self._recorded))
        return found

    def lines(self, metric: Metric) -> Iterator[str]:
        """What the page says of a metric's uses."""
        for dashboard, panels in self._panels.get(metric, {}).items():
            yield f"- panels of {dashboard.removeprefix('MoE: ')}: {'; '.join(panels)}"
        made = [name for name, source in self._recorded.items() if metric in panel_page.metrics(source)]
        if made:
            yield f"- recorded in {', '.join(f'`{name}`' for name in made)}"
        if named := self._alerts.get(metric):
            yield f"- alerts: {', '.join(f'[{name}](runbook.md#{name.lower()})' for name in named)}"


def _label(label: Label) -> str:
    if not label.values:
        return f"`{label.prometheus}`"
    shown = label.values if len(label.values) <= 12 else (*label.values[:2], "…", *label.values[-2:])
    return f"`{label.prometheus}`: {', '.join(shown)}"


def _bounds(metric: Metric) -> str:
    low, high = metric.bounds[0], metric.bounds[-1]
    return f"{len(metric.bounds)} buckets, {low:g} to {high:g}"


def _section(metric: Metric, uses: Uses) -> str:
    kind = metric.kind.value if metric.kind is not Kind.HISTOGRAM else f"histogram ({_bounds(metric)})"
    lines = [f"### `{metric.name}`", "", metric.help, "", f"- as scraped: `{metric.prometheus}`"]
    lines.append(f"- {kind}, unit `{metric.unit}`")
    lines += [f"- {_label(label)}" for label in metric.labels]
    lines += uses.lines(metric)
    return "\n".join(lines)


def page(config: Config) -> str:
    """The page's text."""
    uses = Uses(config)
    return "\n\n".join([INTRODUCTION.rstrip(), *(_section(metric, uses) for metric in CATALOG)]) + "\n"
