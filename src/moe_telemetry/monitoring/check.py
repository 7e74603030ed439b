"""`moe-telemetry check URL`: what a live endpoint lacks, why, and which panels and alerts will be empty for it."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from moe_telemetry import catalog as c
from moe_telemetry.catalog import CATALOG, Kind, Metric
from moe_telemetry.client import DEFAULT_URL, ClientError, base_url, get
from moe_telemetry.settings import ConfigurationError

from . import shipped
from .alerts import alerts
from .config import Config
from .reasons import reasons
from .recording import rules as recording_rules

TIMEOUT_SECONDS = 10.0
WIDTH = 118

GOOD_AT_ZERO = frozenset(
    (c.LOST.name, c.LAYER_FOLDED.name, c.HOOK_ERRORS.name, c.LAYER_OVERFLOWS.name, c.DEGRADED.name)
)
"""Counters that count faults."""


@dataclass(frozen=True)
class Finding:
    """A catalog metric that an endpoint lacks (`missing`), or that has counted nothing so far."""

    metric: Metric
    missing: bool
    why: str
    panels: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()


@dataclass
class Scrape:
    """Samples of one scrape by metric: (labels, value), a histogram's counts."""

    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Scrape:
        """Read a text exposition; ValueError when it is none."""
        found = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def values(self, metric: Metric, **labels: str) -> list[float]:
        """Values of a metric's series with these labels."""
        name = metric.prometheus + ("_count" if metric.kind is Kind.HISTOGRAM else "")
        return [value for found, value in self.samples.get(name, []) if labels.items() <= found.items()]

    def total(self, metric: Metric, **labels: str) -> float:
        """Their sum."""
        return sum(self.values(metric, **labels))


def findings(scrape: Scrape, dashboards: dict[str, dict[str, Any]], config: Config) -> list[Finding]:
    """What the scrape lacks, in the catalog's order; `dashboards` are those of `dashboards.build`."""
    found = []
    runtimes = {labels.get("runtime", "") for labels, _ in scrape.samples.get(c.RUN_INFO.prometheus, ())}
    known = reasons(runtimes, streams=bool(scrape.values(c.LOOKUPS)))
    for metric in CATALOG:
        values = scrape.values(metric)
        if not values or (metric.kind is not Kind.GAUGE and not any(values) and metric.name not in GOOD_AT_ZERO):
            why = known.get(metric.name, "not known why: please report it")
            missing = not values
            panels = tuple(_panels_of(metric, dashboards, config)) if missing else ()
            names = tuple(_alerts_of(metric, config))
            found.append(Finding(metric, missing, why, panels, names))
    return found


def remarks(scrape: Scrape) -> list[str]:
    """What is there and still deserves a look."""
    found = []
    timing = scrape.total(c.LOOKUPS, outcome="miss_timing")
    if timing and not scrape.total(c.LOOKUPS, outcome="miss_evicted") and not scrape.total(c.PREFETCH_HITS):
        found.append("every predicted miss is timing and no hit came from a prefetch: does routed() get `ready`?")
    if scrape.values(c.LAYER_CALLS) and not any(
        "layer" in labels for labels, _ in scrape.samples[c.LAYER_CALLS.prometheus]
    ):
        found.append("the label layer is off (layers=off): the dashboard Layers stays empty")
    if lost := scrape.total(c.LOST):
        reasons = ", ".join(sorted({labels["reason"] for labels, value in scrape.samples[c.LOST.prometheus] if value}))
        found.append(f"{lost:.0f} records were dropped ({reasons}): the process' log says where")
    if folded := scrape.total(c.LAYER_FOLDED):
        found.append(f'{folded:.0f} records went to layer="other": more layers than the budget')
    if scrape.total(c.LAYER_CALLS) and not scrape.total(c.TOKENS):
        found.append("layers are called and no tokens counted: without recorder.tokens no alert on a ratio can fire")
    if scrape.total(c.TOKENS, phase="decode") and not scrape.total(c.LAYER_CALLS, phase="decode"):
        found.append("tokens are decoded and no layer call is counted: the hooks are not on the path that is taken")
    return found


def _panels_of(metric: Metric, dashboards: dict[str, dict[str, Any]], config: Config) -> Iterable[str]:
    """Panels of which every query needs the metric."""
    needed = _needs(config)
    for dashboard in dashboards.values():
        for panel in panels(dashboard):
            queries = [target["expr"] for target in panel.get("targets", [])]
            if queries and all(metric.prometheus in _metrics_in(query, needed) for query in queries):
                yield f"{dashboard['title']}: {panel['title']}"


def panels(dashboard: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Panels of a dashboard, those inside collapsed rows too."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


def _alerts_of(metric: Metric, config: Config) -> Iterable[str]:
    """Alerts that cannot fire without the metric: it stands in every alternative of the expression (`or`), and not
    only behind `unless`."""
    needed = _needs(config)
    for alert in alerts(config):
        alternatives = re.split(r"\bor\b", alert.expr)
        if all(metric.prometheus in _metrics_in(part.split("unless")[0], needed) for part in alternatives):
            yield alert.name


def _needs(config: Config) -> dict[str, str]:
    """Expressions by the name of the series they record."""
    return {str(rule["record"]): str(rule["expr"]) for rule in recording_rules(config) if "record" in rule}


def _metrics_in(expression: str, recorded: dict[str, str]) -> set[str]:
    """Catalog metrics that an expression reads, through recorded series too."""
    words = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", expression))
    found: set[str] = set()
    for word in words:
        if word in recorded:
            found |= _metrics_in(recorded[word], recorded)
        elif base := re.sub(r"_(bucket|sum|count)$", "", word):
            found |= {word, base}
    return found


# -- the command ----------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "url",
        nargs="?",
        default=DEFAULT_URL,
        metavar="URL",
        help=f"an endpoint, as URL or host:port ({DEFAULT_URL.partition('//')[2]})",
    )


def run(options: argparse.Namespace) -> int:
    """Print what the endpoint lacks."""
    scrape = fetch(options.url)
    if not scrape.values(c.RUN_INFO):
        raise ConfigurationError(f"{options.url} is no endpoint of moe_telemetry: it has no {c.RUN_INFO.prometheus}")
    config = Config()
    found = findings(scrape, shipped.dashboards(), config)
    missing = [finding for finding in found if finding.missing]
    silent = [finding for finding in found if not finding.missing]
    print(f"{len(CATALOG) - len(found)} of {len(CATALOG)} catalog metrics have data, {len(silent)} only zeros.")
    for heading, findings_ in (("Missing", missing), ("Nothing counted so far", silent)):
        if findings_:
            print(f"\n{heading}:")
        by_reason: dict[str, list[Finding]] = {}
        for finding in findings_:
            by_reason.setdefault(finding.why, []).append(finding)
        for why, alike in by_reason.items():
            _tell(why, alike)
    for remark in remarks(scrape):
        print(f"\nNote: {remark}")
    return 0


def _tell(why: str, findings_: list[Finding]) -> None:
    """Print metrics that lack for one reason, and what is empty or silent for it."""
    names = [finding.metric.prometheus for finding in findings_]
    if len(names) == 1:
        print(f"  {names[0]}: {why}")
    else:
        print(f"  {why}:")
        print(textwrap.fill(", ".join(names), WIDTH, initial_indent="    ", subsequent_indent="    "))
    by_dashboard: dict[str, dict[str, None]] = {}
    for panel in chain.from_iterable(finding.panels for finding in findings_):
        dashboard, _, title = panel.removeprefix("MoE: ").partition(": ")
        by_dashboard.setdefault(dashboard, {})[title] = None
    for dashboard, titles in by_dashboard.items():
        text = f"empty panels of {dashboard}: {'; '.join(titles)}"
        print(textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="      "))
    if stuck := dict.fromkeys(chain.from_iterable(finding.alerts for finding in findings_)):
        print(f"    cannot fire: {', '.join(stuck)}")


def fetch(url: str) -> Scrape:
    """Scrape an endpoint, given with or without its path; ConfigurationError in one line when that fails."""
    try:
        address = f"{base_url(url)}/metrics"
    except ClientError as error:
        raise ConfigurationError(str(error)) from None
    try:
        return Scrape.of(get(address, "text/plain", TIMEOUT_SECONDS).decode())
    except ClientError as error:
        raise ConfigurationError(f"cannot scrape {address}: {error}; is a run with telemetry at work there?") from None
    except ValueError:
        raise ConfigurationError(f"cannot scrape {address}: its answer is not in Prometheus' text format") from None
