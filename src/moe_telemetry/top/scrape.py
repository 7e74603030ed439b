"""One scrape of an endpoint, as series by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from moe_telemetry import catalog as c
from moe_telemetry.catalog import Kind, Metric
from moe_telemetry.client import TIMEOUT_SECONDS, ClientError, get

Labels = frozenset[tuple[str, str]]

COUNTS_ONLY = frozenset(metric for metric in c.CATALOG if metric.kind is Kind.HISTOGRAM and metric is not c.UNION)
"""Histograms of which only count and sum are read: their buckets are half of a scrape, and parsing is its cost here."""
_SKIPPED = tuple(f"{metric.prometheus}_bucket{{" for metric in COUNTS_ONLY)


@dataclass(frozen=True)
class Scrape:
    """Series of one moment: `{name as scraped: {labels: value}}`.

    `at` is in seconds of the monotonic clock, `wall` in Unix seconds, `took` what the request took, `size` in bytes.
    """

    series: dict[str, dict[Labels, float]]
    at: float
    wall: float
    took: float = 0.0
    size: int = 0

    def values(self, metric: Metric, part: str = "", **labels: str) -> list[float]:
        """Values of a metric's series with these labels; `part` is count, sum or bucket of a histogram."""
        wanted = labels.items()
        return [value for found, value in self.named(metric, part).items() if wanted <= found]

    def named(self, metric: Metric, part: str = "") -> dict[Labels, float]:
        """A metric's series by labels."""
        return self.series.get(metric.prometheus + (f"_{part}" if part else ""), {})

    def has(self, metric: Metric) -> bool:
        """Whether the endpoint has the metric at all, be it at 0."""
        return bool(self.named(metric, "count" if metric.kind is Kind.HISTOGRAM else ""))

    def info(self) -> dict[str, str] | None:
        """Labels of the run: model, run, runtime, version; None where the endpoint is not one of moe_telemetry."""
        return next((dict(labels) for labels in self.named(c.RUN_INFO)), None)


def parse(text: str, at: float, wall: float, took: float = 0.0) -> Scrape:
    """Read a text exposition; ClientError when it is none, or not one of moe_telemetry."""
    series: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(_needed(text))):
            for sample in family.samples:
                series.setdefault(sample.name, {})[frozenset(sample.labels.items())] = float(sample.value)
    except (ValueError, LookupError, TypeError):
        raise ClientError("its answer is not in Prometheus' text format") from None
    found = Scrape(series, at, wall, took, len(text))
    if found.info() is None:
        raise ClientError("is no endpoint of moe_telemetry")
    return found


def _needed(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if not line.startswith(_SKIPPED))


def scrape(base: str, seconds: float = TIMEOUT_SECONDS) -> Scrape:
    """Scrape the endpoint of that base address; ClientError says in a few words why that failed."""
    begin = time.monotonic()
    body = get(f"{base}/metrics", "text/plain;version=0.0.4", seconds)
    at, wall = time.monotonic(), time.time()
    return parse(body.decode("utf-8", "replace"), at, wall, at - begin)
