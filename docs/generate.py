"""Writes everything that is generated: the metric and panel references, dashboards, rules and configuration.

`python docs/generate.py`, or with `--check`: fail when something committed is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_telemetry.catalog import CATALOG, Kind, Label, Metric
from moe_telemetry.monitoring import dashboards, export
from moe_telemetry.monitoring.config import Config

ROOT = Path(__file__).parent.parent

INTRODUCTION = """\
# Metrics

Generated from `src/moe_telemetry/catalog.py` by `make generate`; change it there.

Counters of known label sets exist at 0 from the start; a layer's appear when the layer is known
(`start(num_layers=…)`, `recorder.pool`, or its first event). `moe.expert.lookups` and `moe.predictor.*` appear with
the first `recorder.pool`, or the first `routed` or `routed_array` that carries `resident` or `predicted`: a runtime
that has no pool has no hit rate of 0. Gauges appear with their first value. A pair of phase and seq appears when it is
first used.

`layer` is the layer's index, `none` where the caller did not know it, or `other` for layers past the first 256.
With `start(layers="off")` the label is gone: counters are sums over layers, `moe.pool.*` is the smallest pool, the
other gauges are the largest value. A quantile of `moe.expert.union`, rounded up, is exact to 64 experts.
"""


def _label(label: Label) -> str:
    if not label.values:
        return f"`{label.prometheus}`"
    shown = label.values if len(label.values) <= 12 else (*label.values[:2], "…", *label.values[-2:])
    return f"`{label.prometheus}`: {', '.join(shown)}"


def _bounds(metric: Metric) -> str:
    low, high = metric.bounds[0], metric.bounds[-1]
    return f"{len(metric.bounds)} buckets, {low:g} to {high:g}"


def _section(metric: Metric) -> str:
    kind = metric.kind.value if metric.kind is not Kind.HISTOGRAM else f"histogram ({_bounds(metric)})"
    lines = [f"### `{metric.name}`", "", metric.help, "", f"- as scraped: `{metric.prometheus}`"]
    lines.append(f"- {kind}, unit `{metric.unit}`")
    lines += [f"- {_label(label)}" for label in metric.labels]
    return "\n".join(lines)


def reference() -> str:
    """The page."""
    return "\n\n".join([INTRODUCTION.rstrip(), *(_section(metric) for metric in CATALOG)]) + "\n"


def files() -> dict[Path, str]:
    """Everything that is generated, as texts by path."""
    config = Config()
    found = {ROOT / "dashboards" / path: text for path, text in export.files(config).items()}
    found[ROOT / "docs" / "metrics.md"] = reference()
    found[ROOT / "docs" / "panels.md"] = dashboards.panel_reference(config)
    return found


def main() -> int:
    """Write the files, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is not what would be generated: run make generate", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
