"""What the endpoint answers with: the format a client asked for, and the page of links."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from prometheus_client.exposition import choose_encoder


def encoder(accept: str) -> tuple[Callable[[Any], bytes], str]:
    """prometheus_client's choice; of an Accept header that it cannot read, its default.

    The header is told on one line of printable characters, since its version is repeated in the reply's headers.
    """
    line = "".join(character for character in accept if " " <= character <= "~")
    try:
        return choose_encoder(line)
    except (TypeError, ValueError):  # a version that is none
        return choose_encoder("")


def accepts_gzip(header: str) -> bool:
    """Whether Accept-Encoding allows gzip: named, or by '*', and not with a weight of 0."""
    weights: dict[str, float] = {}
    for part in header.lower().split(","):
        name, _, parameters = part.partition(";")
        _, _, weight = parameters.partition("=")
        try:
            weights[name.strip()] = float(weight) if weight.strip() else 1.0
        except ValueError:
            weights[name.strip()] = 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def page(snapshot: dict[str, Any]) -> str:
    """Links and the current totals of counters, summed over layers."""
    run = snapshot["run"]
    rows = []
    for name, metric in snapshot["metrics"].items():
        if metric["kind"] != "counter":
            continue
        totals: dict[str, float] = {}
        for series in metric["series"]:
            labels = ", ".join(f"{key}={value}" for key, value in series["labels"].items() if key != "layer")
            totals[labels] = totals.get(labels, 0) + series["value"]
        for labels, total in totals.items():
            if total:
                cells = (name, labels, f"{total:,.10g}")
                rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    title = html.escape(f"{run['model']} on {run['runtime']}, run {run['run']}")
    return (
        f"<!doctype html><meta charset=utf-8><title>moe_telemetry</title><h1>moe_telemetry</h1><p>{title}</p>"
        "<p><a href=/metrics>/metrics</a> for Prometheus, <a href=/snapshot>/snapshot</a> exact totals as JSON, "
        f"<a href=/-/healthy>/-/healthy</a></p><table>{''.join(rows)}</table>"
    )
