"""PromQL built from the catalog: a metric, label or value that does not exist fails here and not on a dashboard."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moe_telemetry.catalog import Kind, Metric

Q50, Q99, QMAX = "0.4999999", "0.9899999", "1"
"""Quantiles just below the rank: at 0.99 a scaled rate fell one bucket high in 0.65 % of random cases."""

TARGET = ("job", "instance")


def matchers(metric: Metric, **labels: str) -> list[str]:
    """Label matchers; a value is exact, or a regular expression of alternatives when it holds `|`, or, with a
    leading `!`, what it must not be. KeyError or ValueError for what the catalog does not have."""
    found = []
    for key, value in labels.items():
        label = next(entry for entry in metric.labels if entry.prometheus == key) if _has(metric, key) else None
        if label is None:
            raise KeyError(f"{metric.name} has no label {key}")
        plain = value.removeprefix("!")
        if label.values and not plain.startswith("$"):
            unknown = [part for part in plain.split("|") if part not in label.values]
            if unknown:
                raise ValueError(f"{metric.name}: {key} is never {unknown[0]!r}")
        negative = value.startswith("!")
        regular = "|" in plain or plain.startswith("$")
        operator = ("!~" if negative else "=~") if regular else ("!=" if negative else "=")
        found.append(f'{key}{operator}"{plain}"')
    return found


def _has(metric: Metric, key: str) -> bool:
    return any(label.prometheus == key for label in metric.labels)


def select(metric: Metric, *scope: str, part: str = "", **labels: str) -> str:
    """A selector: `scope` are ready-made matchers, `part` is sum, count or bucket of a histogram."""
    if (part in ("sum", "count", "bucket")) != (metric.kind is Kind.HISTOGRAM):
        raise ValueError(f"{metric.name} is a {metric.kind.value}: part {part!r} does not fit")
    name = metric.prometheus + (f"_{part}" if part else "")
    found = [*scope, *matchers(metric, **labels)]
    return f"{name}{{{','.join(found)}}}" if found else name


def rate(metric: Metric, window: str, *scope: str, part: str = "", **labels: str) -> str:
    """Per-second rate of a counter, or of a part of a histogram."""
    if metric.kind is Kind.GAUGE:
        raise ValueError(f"{metric.name} is a gauge and has no rate")
    return f"rate({select(metric, *scope, part=part, **labels)}[{window}])"


def increase(metric: Metric, window: str, *scope: str, part: str = "", **labels: str) -> str:
    """Growth of a counter, or of a part of a histogram, over the window."""
    return rate(metric, window, *scope, part=part, **labels).replace("rate(", "increase(", 1)


def sum_by(keys: Iterable[str], inner: str) -> str:
    """Sum over everything but `keys`."""
    return f"sum by ({', '.join(keys)}) ({inner})"


def ratio(part: str, whole: str, on: Iterable[str] | None = None) -> str:
    """`part` over `whole` where that is above 0: absent when idle, never NaN. `on` for a part with more labels."""
    match = "" if on is None else f" on ({', '.join(on)}) group_left ()"
    return f"{part} /{match} ({whole} > 0)"


def quantile(q: str, keys: Iterable[str], rated: str) -> str:
    """Quantile of a histogram's rate; `keys` without le."""
    return f"histogram_quantile({q}, {sum_by([*keys, 'le'], rated)})"


def one_line(expression: str) -> str:
    """An expression without its line breaks."""
    return re.sub(r"\s+", " ", expression).strip()
