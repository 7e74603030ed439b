"""One scrape of an endpoint, as series by name."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from moe_telemetry import catalog as c
from moe_telemetry.catalog import Kind, Metric
from moe_telemetry.client import TIMEOUT_SECONDS, ClientError, get

Labels = frozenset[tuple[str, str]]

COUNTS_ONLY = frozenset(metric for metric in c.CATALOG if metric.kind is Kind.HISTOGRAM and metric is not c.UNION)
"""Histograms of which only count and sum are read: their buckets are half of a scrape, and parsing is its cost here."""
MOST_STALE = 1000
"""Series that may be known and gone, besides as many as there are."""
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
        wanted = frozenset(labels.items())
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


class Reader:
    """Scrapes one endpoint; calling it is a scrape.

    Series are nearly the same each time, and prometheus_client's parser is most of what watching costs the host:
    a series' name and labels are parsed when they are first seen, then looked up by the text before the value.
    """

    def __init__(self, base: str, seconds: float = TIMEOUT_SECONDS) -> None:
        self._url = f"{base}/metrics"
        self._seconds = seconds
        self._known: dict[str, tuple[str, Labels]] = {}

    def __call__(self) -> Scrape:
        """ClientError says in a few words why there is no scrape."""
        begin = time.monotonic()
        body = get(self._url, "text/plain;version=0.0.4", self._seconds)
        at, wall = time.monotonic(), time.time()
        return self.parse(body.decode("utf-8", "replace"), at, wall, at - begin)

    def parse(self, text: str, at: float, wall: float, took: float = 0.0) -> Scrape:
        """Read a text exposition; ClientError when it is none, or not one of moe_telemetry."""
        series: dict[str, dict[Labels, float]] = {}
        lines = [line for line in text.splitlines() if line and line[0] != "#" and not line.startswith(_SKIPPED)]
        try:
            self._learn(lines)
            for line in lines:
                before, _, value = line.rpartition(" ")
                name, labels = self._known[before]
                series.setdefault(name, {})[labels] = float(value)
        except (ValueError, LookupError, TypeError):
            raise ClientError("its answer is not in Prometheus' text format") from None
        if len(self._known) > 2 * len(lines) + MOST_STALE:
            self._known.clear()
        found = Scrape(series, at, wall, took, len(text))
        if found.info() is None:
            raise ClientError("is no endpoint of moe_telemetry")
        return found

    def _learn(self, lines: list[str]) -> None:
        """Parse the series that are new; what comes with a time stamp is refused, as no endpoint of ours has any."""
        new = [line for line in lines if line.rpartition(" ")[0] not in self._known]
        samples = [sample for family in text_string_to_metric_families("\n".join(new)) for sample in family.samples]
        for line, sample in zip(new, samples, strict=True):
            if sample.timestamp is not None:
                raise ValueError("a time stamp")
            self._known[line.rpartition(" ")[0]] = (sample.name, frozenset(sample.labels.items()))


def parse(text: str, at: float, wall: float, took: float = 0.0) -> Scrape:
    """Read one text exposition by itself; see `Reader.parse`."""
    return Reader("").parse(text, at, wall, took)
