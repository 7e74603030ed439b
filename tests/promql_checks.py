"""What a query says, from its syntax tree: does each metric, label and value in it exist?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import promql_parser as p

TARGET = {"job", "instance"}
OF_PROMETHEUS = {
    "up": set(),
    "scrape_duration_seconds": set(),
    "scrape_samples_scraped": set(),
    "ALERTS": {"alertname", "alertstate", "severity", "phase", "model", "run"},
}
"""What Prometheus itself adds, with the labels that it may have."""


@dataclass
class Known:
    """Series that exist: by metric, the values seen of each label."""

    series: dict[str, dict[str, set[str]]]
    free: Mapping[str, set[str]] = field(default_factory=lambda: dict(OF_PROMETHEUS))
    """Metrics whose labels are known but not their values: Prometheus' own, and recorded ones."""

    def labels(self, name: str) -> set[str] | None:
        """The metric's labels; None when there is no such metric."""
        if name in self.free:
            return self.free[name] | TARGET
        return self.series[name].keys() | TARGET if name in self.series else None


def fill(query: str, **variables: str) -> str:
    """The query with Grafana's variables replaced, `rate_interval` standing for `__rate_interval`."""
    for name, value in variables.items():
        query = re.sub(rf"\$(__)?{name}\b", value, query)
    return query


def problems(query: str, known: Known, legend: str = "") -> list[str]:
    """What is wrong with a query whose variables are filled in; nothing when all is well."""
    found: list[str] = []
    labels = _labels(p.parse(query), known, found)
    found += [f"no label {name} for the legend" for name in re.findall(r"{{(\w+)}}", legend) if name not in labels]
    return found


def selectors(node: object, by: frozenset[str] = frozenset()) -> Iterator[tuple[p.VectorSelector, frozenset[str]]]:
    """Each selector, with the labels that the nearest aggregation over it keeps."""
    if isinstance(node, p.VectorSelector):
        yield node, by
    elif isinstance(node, p.AggregateExpr):
        kept = node.modifier and node.modifier.type == p.AggModifierType.By
        yield from selectors(node.expr, frozenset(node.modifier.labels) if kept else by)
    else:
        for child in _children(node):
            yield from selectors(child, by)


def matchers(selector: p.VectorSelector) -> list[tuple[str, p.MatchOp, str]]:
    """Label, operator and value of each matcher."""
    return [(entry.name, entry.op, entry.value) for entry in selector.matchers.matchers]


def _children(node: object) -> list[object]:
    if isinstance(node, p.MatrixSelector):
        return [node.vector_selector]
    if isinstance(node, p.Call):
        return list(node.args)
    if isinstance(node, p.BinaryExpr):
        return [node.lhs, node.rhs]
    return [node.expr] if isinstance(node, p.ParenExpr | p.SubqueryExpr | p.UnaryExpr | p.AggregateExpr) else []


def _labels(node: object, known: Known, found: list[str]) -> set[str]:
    """The labels that an expression's result has; what does not exist is added to `found`."""
    if isinstance(node, p.VectorSelector):
        return _selected(node, known, found)
    below = [_labels(child, known, found) for child in _children(node)]
    union = set().union(*below)
    if isinstance(node, p.AggregateExpr):
        return _aggregated(node, union, found)
    if isinstance(node, p.BinaryExpr):
        return _joined(node, *below, found)
    if isinstance(node, p.Call) and node.func.name == "label_replace":
        source = node.args[3].val
        if source not in union:
            found.append(f"label_replace of {source}, which is not there")
        return union | {node.args[1].val}
    if isinstance(node, p.Call) and node.func.name == "histogram_quantile":
        if "le" not in union:
            found.append("histogram_quantile without le")
        return union - {"le"}
    return union


def _selected(node: p.VectorSelector, known: Known, found: list[str]) -> set[str]:
    labels = known.labels(node.name)
    if labels is None:
        found.append(f"no metric {node.name}")
        return set()
    for name, operator, value in matchers(node):
        if name not in labels:
            found.append(f"{node.name} has no label {name}")
        elif name in (seen := known.series.get(node.name, {})) and ".+" not in value:
            regular = operator in (p.MatchOp.Re, p.MatchOp.NotRe)
            missing = set(value.split("|") if regular else [value]) - seen[name]
            found += [f"{node.name}: {name} is never {entry}" for entry in sorted(missing)]
    return labels


def _aggregated(node: p.AggregateExpr, inner: set[str], found: list[str]) -> set[str]:
    if node.modifier is None:
        return inner if str(node.op) in ("topk", "bottomk") else set()
    keys = set(node.modifier.labels)
    found += [f"by {key}, which is not there" for key in sorted(keys - inner)]
    if str(node.op) in ("topk", "bottomk"):
        return inner
    return keys if node.modifier.type == p.AggModifierType.By else inner - keys


def _joined(node: p.BinaryExpr, left: set[str], right: set[str], found: list[str]) -> set[str]:
    modifier = node.modifier
    on = set(modifier.matching.labels) if modifier is not None and modifier.matching is not None else None
    if on is not None:
        found += [f"on {key}, which is not there" for key in sorted(on - (left & right))]
    elif left and right and left != right:
        found.append(f"{sorted(left)} and {sorted(right)} never match")
    return left or right
