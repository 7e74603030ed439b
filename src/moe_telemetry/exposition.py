"""Series as prometheus_client's samples: the way to our own endpoint.

As points through the SDK's translation a scrape of 48 layers costs three times the reading of the cells; the names are
those that the SDK would give the same points (`tests/test_exposition.py` compares the two).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import Metric as PrometheusFamily
from prometheus_client.samples import Sample

from .catalog import UNIT_SUFFIX, Kind
from .series import Distribution, Family, LabelValues

HANDOVER_SAMPLES = 48
"""Samples rendered between two handovers: fewer lengthen the scrape, more the decode step that it overlaps."""
HANDOVER_MADE = 256
"""Samples made between two handovers."""


Beginnings = dict[tuple[str, int], str]
"""A line up to its value, by the sample's name and its label dict's id."""


class Samples(list[Sample]):
    """Samples that hand the interpreter lock over while an encoder walks through them.

    Otherwise a thread that comes back from a kernel waits for the lock for a switch interval (5 ms), layer by layer.
    `kept` is the renderer's, by content type: one for all families, for the life of the telemetry.
    """

    def __init__(self, kept: dict[str, Beginnings]) -> None:
        super().__init__()
        self.kept = kept

    def __iter__(self) -> Iterator[Sample]:
        for begin in range(0, len(self), HANDOVER_SAMPLES):
            if begin:  # the many short families in a row need none
                time.sleep(0)
            yield from self[begin : begin + HANDOVER_SAMPLES]


class Exposition:
    """Series as prometheus_client's samples, named as the exporter would name our points.

    Label dicts are made once a series for the life of the telemetry, since the encoders only read them.
    """

    def __init__(self) -> None:
        self._labels: dict[tuple[str, LabelValues], dict[str, str]] = {}
        self._buckets: dict[tuple[str, LabelValues], list[dict[str, str]]] = {}
        self._kept: dict[str, Beginnings] = {}
        self._made = 0

    def family(self, family: Family) -> PrometheusFamily:
        """All samples of one metric; behind some hundred it hands the interpreter lock over."""
        if self._made > HANDOVER_MADE:
            time.sleep(0)
            self._made = 0
        metric = family.metric
        full = metric.prometheus
        name = full.removesuffix("_total") if metric.kind is Kind.COUNTER else full
        found = PrometheusFamily(name, metric.help, metric.kind.value, UNIT_SUFFIX.get(metric.unit, "").lstrip("_"))
        samples = found.samples = Samples(self._kept)
        for values, value in family.series.items():
            labels = self._labels.get((metric.name, values))
            if labels is None:
                keys = [label.prometheus for label in metric.labels]
                pairs = sorted(zip(keys, values, strict=True))  # as the encoders will, which is then quicker
                labels = self._labels[metric.name, values] = dict(pairs)
            if not isinstance(value, Distribution):
                samples.append(Sample(full, labels, value))
                continue
            buckets = self._buckets.get((metric.name, values))
            if buckets is None:
                bounds = (*(str(bound) for bound in metric.bounds), "+Inf")
                buckets = self._buckets[metric.name, values] = [
                    dict(sorted({**labels, "le": bound}.items())) for bound in bounds
                ]
            bucket, count = f"{name}_bucket", 0
            for labelled, count in zip(buckets, accumulate(value.counts), strict=True):
                samples.append(Sample(bucket, labelled, count))
            samples.append(Sample(f"{name}_count", labels, count))
            samples.append(Sample(f"{name}_sum", labels, value.sum))
        self._made += len(samples)
        return found
