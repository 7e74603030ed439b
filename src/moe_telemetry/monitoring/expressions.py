"""The queries that panels are made of: by instance always, over the window that Grafana chooses."""

from __future__ import annotations

from moe_telemetry import catalog as c
from moe_telemetry.catalog import Kind, Metric

from .promql import quantile, rate, ratio, select, sum_by

SCOPE = ('job=~"$job"', 'instance=~"$instance"')
WINDOW = "$__rate_interval"
RANGE = "$__range"


def flow(metric: Metric, *by: str, part: str = "", window: str = WINDOW, **labels: str) -> str:
    """Per second, by instance and `by`."""
    return sum_by(("instance", *by), rate(metric, window, *SCOPE, part=part, **labels))


def share(
    metric: Metric, *by: str, of: Metric | None = None, whole: dict[str, str] | None = None, **labels: str
) -> str:
    """`metric` per unit of `of` (itself unless given): `labels` choose the part, `whole` what it is divided by."""
    under = flow(of or metric, **(whole or {}))
    return ratio(flow(metric, *by, **labels), under, ("instance",) if by else None)


def mean(metric: Metric, *by: str, **labels: str) -> str:
    """Mean observation of a histogram."""
    return ratio(flow(metric, *by, part="sum", **labels), flow(metric, *by, part="count", **labels))


def per(part: str, metric: Metric, *by: str, whole_part: str = "", **labels: str) -> str:
    """A per-second expression over a metric's: seconds per token, experts per token. `by` are the part's further
    labels."""
    return ratio(part, flow(metric, part=whole_part, **labels), ("instance",) if by else None)


def at(q: str, metric: Metric, *by: str, **labels: str) -> str:
    """Quantile of a histogram."""
    return quantile(q, ("instance", *by), rate(metric, WINDOW, *SCOPE, part="bucket", **labels))


def level(metric: Metric, *by: str, of: str = "max", **labels: str) -> str:
    """A gauge, by instance and `by`."""
    return f"{of} by ({', '.join(('instance', *by))}) ({select(metric, *SCOPE, **labels)})"


def ever(expression: str, metric: Metric, **labels: str) -> str:
    """The expression where the instance has ever recorded the metric: its series exist at 0 from the start, and a 0
    that nobody measured would look good."""
    return _where(expression, _total(metric, **labels))


def ever_ready(expression: str) -> str:
    """The expression where the instance has ever passed a `ready` that told something."""
    return _where(expression, _total(c.PREFETCH_HITS), _total(c.LOOKUPS, outcome="miss_evicted"))


def _total(metric: Metric, **labels: str) -> str:
    part = "count" if metric.kind is Kind.HISTOGRAM else ""
    return sum_by(("instance",), select(metric, *SCOPE, part=part, **labels))


def _where(expression: str, *totals: str) -> str:
    return f"{expression} and on (instance) ({' or '.join(f'{total} > 0' for total in totals)})"


def in_order(expression: str) -> str:
    """By layer with leading zeros: Prometheus sorts labels as text, 10 before 2. To 999 layers."""
    padded = f'label_replace({expression}, "layer", "0$1", "layer", "([0-9])")'
    return f'label_replace({padded}, "layer", "0$1", "layer", "([0-9][0-9])")'
