"""prometheus_client's text, with the beginnings of our lines kept from scrape to scrape.

It checks and writes each line's name and labels anew, three quarters of a scrape's time, while of ours only the values
change. So it writes a family once for each format, and what stands before the values is kept. Other families, an
application's, are its work each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prometheus_client.core import Metric as PrometheusFamily
from prometheus_client.utils import floatToGoString

from .exposition import Samples

Encode = Callable[[Any], bytes]
HANDOVER_LINES = 256
"""Lines between two handovers of the interpreter lock (exposition)."""
EXPONENT_FROM = 1_000_000
"""Whole numbers from here on are written with an exponent."""
_HEAD = 0
"""No object's id: HELP, TYPE and UNIT are kept under it."""
FORMATS = 4
"""Content types kept: a client can name any version of a format."""


class _Families:
    """As much of a registry as encoders ask for."""

    def __init__(self, *families: PrometheusFamily) -> None:
        self._families = families

    def collect(self) -> tuple[PrometheusFamily, ...]:
        """These families."""
        return self._families


def render(registry: Any, encode: Encode, content_type: str) -> bytes:
    """What `encode`, prometheus_client's for that content type, gives of the registry."""
    end = encode(_Families())
    parts: list[bytes] = []
    for family in registry.collect():
        samples = family.samples
        ours = isinstance(samples, Samples)
        part = _from_kept(family.name, samples, content_type) if ours else None
        if part is None:
            part = encode(_Families(family)).removesuffix(end)
            if ours:
                _keep(family.name, samples, content_type, part)
        parts.append(part)
    return b"".join((*parts, end))


def _from_kept(name: str, samples: Samples, content_type: str) -> bytes | None:
    """A family's text; None where a line of it has not been seen."""
    kept = samples.kept.get(content_type, {})
    try:
        lines = [kept[name, _HEAD]]
        for number, sample in enumerate(samples[:]):  # not its iterator, which hands over more often
            if number % HANDOVER_LINES == HANDOVER_LINES - 1:
                time.sleep(0)
            beginning, value = kept[sample.name, id(sample.labels)], sample.value
            if type(value) is int and 0 <= value < EXPONENT_FROM:
                lines.append(f"{beginning}{value}.0\n")
            else:
                lines.append(f"{beginning}{floatToGoString(value)}\n")  # type: ignore[no-untyped-call]
    except KeyError:
        return None
    return "".join(lines).encode()


def _keep(name: str, samples: Samples, content_type: str, text: bytes) -> None:
    """Keep what stands before the values: the label dicts are the same objects as long as telemetry runs."""
    lines = text.decode().split("\n")[:-1]
    head = [line for line in lines if line.startswith("#")]
    if len(samples) != len(lines) - len(head):
        return
    if content_type not in samples.kept and len(samples.kept) >= FORMATS:
        samples.kept.clear()
    kept = samples.kept.setdefault(content_type, {})
    for sample, line in zip(samples[:], lines[len(head) :], strict=True):
        kept[sample.name, id(sample.labels)] = line[: line.rindex(" ") + 1]
    kept[name, _HEAD] = "".join(f"{line}\n" for line in head)
