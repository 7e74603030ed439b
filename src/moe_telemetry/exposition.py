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


class _Samples(list[Sample]):
    """Samples that hand the interpreter lock over while an encoder walks through them.

    Otherwise a thread that comes back from a kernel waits for the lock for a switch interval (5 ms), layer by layer.
    """

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

    def family(self, family: Family) -> PrometheusFamily:
        """All samples of one metric."""
        metric = family.metric
        name = metric.prometheus.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.prometheus
        found = PrometheusFamily(name, metric.help, metric.kind.value, UNIT_SUFFIX.get(metric.unit, "").lstrip("_"))
        samples = found.samples = _Samples()
        for values, value in family.series.items():
            labels = self._labels.get((metric.name, values))
            if labels is None:
                keys = [label.prometheus for label in metric.labels]
                pairs = sorted(zip(keys, values, strict=True))  # as the encoders will, which is then quicker
                labels = self._labels[metric.name, values] = dict(pairs)
            if not isinstance(value, Distribution):
                samples.append(Sample(metric.prometheus, labels, value))
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
        return found
