"""Everything a site may want to change about rules, alerts and dashboards: selectors, windows, thresholds, links."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(seconds: float) -> str:
    """Seconds as a Prometheus duration, in the largest unit that divides them: 300 is 5m."""
    millis = round(seconds * 1000)
    for unit in ("d", "h", "m", "s", "ms"):
        step = round(_UNITS[unit] * 1000)
        if millis and millis % step == 0:
            return f"{millis // step}{unit}"
    return "0s"


def number(value: float) -> str:
    """A threshold as it stands in an expression, with every digit that it was given."""
    return f"{value:.12g}"


def percent(share: float) -> str:
    """A share of 1 as a description names it: 0.075 is 7.5%."""
    return f"{number(share * 100)}%"


def millis(seconds: float) -> str:
    """Seconds as a description names them: 0.00032 is 0.32ms."""
    return f"{number(seconds * 1000)}ms"


def seconds(text: str) -> float:
    """A Prometheus duration such as 5m or 1h30m in seconds; ValueError for anything else."""
    parts = re.findall(r"(\d+)(ms|[smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is no duration such as 90s or 5m")
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


@dataclass(frozen=True)
class Windows:
    """Seconds. `short` is the window of every rate; a baseline is the median of the last `long` seconds that end before
    the short window and the alert's own wait, of at least `least` seconds of samples."""

    scrape: float = 5
    evaluation: float = 15
    short: float = 300
    long: float = 3600
    least: float = 300
    least_tolerance: float = 60

    def __post_init__(self) -> None:
        if self.scrape > self.short / 4:
            raise ValueError(
                f"scrape {duration(self.scrape)} is too long for rates over {duration(self.short)}: at most"
                f" {duration(self.short / 4)}, so that a lost scrape leaves samples to compare"
            )

    @property
    def tolerance(self) -> float:
        """How long lost scrapes do not matter to the run's identity: at least two in a row."""
        return max(self.least_tolerance, 3 * self.scrape)

    @property
    def least_samples(self) -> int:
        """Samples of a recorded series that `least` seconds hold."""
        return max(1, round(self.least / self.evaluation))


@dataclass(frozen=True)
class Thresholds:
    """What an alert compares with; `--threshold name=value` changes one. Shares are of 1, times in seconds."""

    traffic: float = 0.2
    """Decode tokens a second below which ratios are not recorded: with less, chance decides."""
    recall_low: float = 0.5
    recall_drop: float = 0.2
    hit_rate_low: float = 0.7
    hit_rate_drop: float = 0.1
    baseline_floor: float = 0.2
    """A drop is judged only against a usual value above this."""
    prefetch_late: float = 0.08
    eviction_thrash: float = 0.02
    decode_slow: float = 1.0
    decode_slow_ratio: float = 0.5
    decode_stalled: float = 0.5
    busy_floor: float = 0.01
    """Share of time in forward passes below which tok/s and stall share are not recorded."""
    forward_hung: float = 120.0
    """Age of a decode pass."""
    forward_hung_prefill: float = 900.0
    """Age of a prefill pass: a long prompt in one pass takes minutes where experts are streamed."""
    read_latency: float = 0.08192
    """On a bucket's bound, where the comparison is exact whatever the interpolation."""
    reads_floor: float = 1.0
    """Reads a second below which their p99 is not recorded."""
    mlx_memory: float = 0.6
    """Of MLX's limit, which on Metal is 1.5 times the recommended working set: 90 % of that set."""
    detached_tokens: float = 0.1


@dataclass(frozen=True)
class Config:
    """One site's monitoring."""

    job: str = "moe"
    windows: Windows = field(default_factory=Windows)
    thresholds: Thresholds = field(default_factory=Thresholds)
    runbook_url: str = "https://example.org/moe_telemetry/runbook.md"
    """Where docs/runbook.md is published; `export --runbook-url` sets it."""
    grafana_url: str = "http://127.0.0.1:3000"
    """Where alerts' links to dashboards lead, as their readers reach it."""
    datasource_uid: str = "moe-prometheus"
    targets: tuple[str, ...] = ("host.docker.internal:9464",)
    """Exporters, as Prometheus reaches them; the defaults of these are the compose file's."""
    names: tuple[str, ...] = ("moe-demo",)
    """Host names that are looked up again and again, on the default port: of containers that come and go."""
    alertmanager: str = "alertmanager:9093"
    webhook_url: str = "http://host.docker.internal:9099/"
    """Where alerts are sent: a receiver to fill in."""
    time_scale: float = 1.0
    """Divides every wait of an alert, for end-to-end tests; the windows are scaled by whoever makes them."""

    def with_threshold(self, name: str, value: float) -> Config:
        """The configuration with one threshold changed; ValueError when there is none of that name."""
        known = [entry.name for entry in fields(Thresholds)]
        if name not in known:
            raise ValueError(f"no threshold {name!r}: choose from {', '.join(known)}")
        return replace(self, thresholds=replace(self.thresholds, **{name: value}))

    def scaled(self, factor: float) -> Config:
        """Every window and wait divided by `factor`, scrape and evaluation down to 1 s: for end-to-end tests."""
        old = self.windows
        windows = Windows(
            scrape=1,
            evaluation=1,
            short=max(4, old.short / factor),
            long=old.long / factor,
            least=old.least / factor,
            least_tolerance=3,
        )
        return replace(self, windows=windows, time_scale=factor)
