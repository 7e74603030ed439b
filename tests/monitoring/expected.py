"""What each alert must say, written out: labels and annotations of a firing one."""

from __future__ import annotations

from dataclasses import dataclass, replace

INSTANCE = "mac:9464"
GRAFANA = "http://127.0.0.1:3000"
RUNBOOK = "https://example.org/moe_telemetry/runbook.md"


@dataclass(frozen=True)
class Firing:
    """An alert that fires; without a description only its name and instance are compared."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    summary: str = ""
    description: str = ""
    dashboard: str = ""
    variables: str = ""
    """Of its dashboard's link, besides the instance."""
    instance: str = INSTANCE

    @property
    def bare(self) -> Firing:
        """Its name and instance only."""
        return Firing(self.name, instance=self.instance)

    def on(self, instance: str) -> Firing:
        """The same alert on another instance."""
        return replace(
            self,
            instance=instance,
            summary=self.summary.replace(self.instance, instance),
            description=self.description.replace(self.instance, instance),
        )

    def exactly(self) -> dict[str, dict[str, str]]:
        """As promtool compares it."""
        return {
            "exp_labels": {"job": "moe", "instance": self.instance, **dict(self.labels)},
            "exp_annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOK}#{self.name.lower()}",
                "dashboard": f"{GRAFANA}/d/{self.dashboard}?var-instance={self.instance}{self.variables}",
            },
        }


def _critical(**labels: str) -> tuple[tuple[str, str], ...]:
    return (("severity", "critical"), *labels.items())


def _warning(**labels: str) -> tuple[tuple[str, str], ...]:
    return (("severity", "warning"), *labels.items())


def _of_run(run: str, phase: str = "decode") -> dict[str, str]:
    return {"model": "m", "run": run, "phase": phase}


def target_down() -> Firing:
    return Firing(
        "MoeTargetDown",
        _critical(expect="always"),
        "mac:9464 does not answer scrapes",
        "Prometheus could not scrape mac:9464, which is expected to be there always.",
        "moe-host",
    )


def recall_low(value: str = "40%", run: str = "r1") -> Firing:
    return Firing(
        "MoePredictorRecallLow",
        _warning(**_of_run(run)),
        "Predictor recall is low on mac:9464",
        f"Decode recall on mac:9464 was {value} (floor 50%), model m.",
        "moe-prefetch",
    )


def recall_drop(value: str = "31.25%", now: str = "55%", usual: str = "80%") -> Firing:
    return Firing(
        "MoePredictorRecallDrop",
        _critical(**_of_run("r1")),
        "Predictor recall dropped on mac:9464",
        f"Decode recall on mac:9464 was {value} below this run's usual value: {now} against {usual}.",
        "moe-prefetch",
    )


def hit_low(value: str = "60%", run: str = "r1") -> Firing:
    return Firing(
        "MoeDecodeHitRateLow",
        _warning(**_of_run(run)),
        "Decode hit rate is low on mac:9464",
        f"Decode hit rate on mac:9464 was {value} (floor 70%).",
        "moe-overview",
    )


def hit_drop(value: str = "16.67%", now: str = "75%", usual: str = "90%") -> Firing:
    return Firing(
        "MoeDecodeHitRateDrop",
        _critical(**_of_run("r1")),
        "Decode hit rate dropped on mac:9464",
        f"Decode hit rate on mac:9464 was {value} below this run's usual value: {now} against {usual}.",
        "moe-overview",
    )


def late(value: str = "12%", run: str = "r1") -> Firing:
    return Firing(
        "MoePrefetchLate",
        _warning(**_of_run(run)),
        "Prefetched experts arrive too late on mac:9464",
        f"{value} of decode lookups on mac:9464 were for experts that were predicted and not there yet (limit 8%).",
        "moe-prefetch",
    )


def thrash(value: str = "4%", run: str = "r1") -> Firing:
    return Firing(
        "MoeEvictionThrash",
        _warning(**_of_run(run)),
        "Experts are evicted before use on mac:9464",
        f"{value} of decode lookups on mac:9464 were for experts that had been read and were gone again (limit 2%).",
        "moe-prefetch",
    )


def union(calls: str) -> Firing:
    return Firing(
        "MoeUnionExceedsPool",
        _warning(phase="decode"),
        "Decode passes need more experts than a layer's pool holds on mac:9464",
        f"{calls} layer calls on mac:9464 needed more experts than their layer has slots within 5m.",
        "moe-layers",
    )


def slow(value: str = "4", run: str = "r1") -> Firing:
    return Firing(
        "MoeDecodeSlow",
        _warning(**_of_run(run)),
        "Decode is slow on mac:9464",
        f"Decode on mac:9464 ran at {value} tok/s of forward time: below 1 tok/s or 50% of this run's usual speed.",
        "moe-overview",
    )


def stalled(value: str = "70%", run: str = "r1") -> Firing:
    return Firing(
        "MoeDecodeStalled",
        _critical(**_of_run(run)),
        "Decode waits for experts on mac:9464",
        f"{value} of decode time on mac:9464 was spent blocked on experts (limit 50%).",
        "moe-overview",
    )


def hung(age: str, phase: str = "decode") -> Firing:
    return Firing(
        "MoeForwardHung",
        _critical(phase=phase),
        "A forward pass does not end on mac:9464",
        f"A {phase} pass on mac:9464 had been running for {age}.",
        "moe-overview",
    )


def reads(value: str = "147.5ms", run: str = "r1") -> Firing:
    return Firing(
        "MoeReadLatencyHigh",
        _warning(**_of_run(run), source="demand"),
        "Expert reads are slow on mac:9464",
        f"p99 of demand reads in decode on mac:9464 was {value} (limit 81.92ms).",
        "moe-host",
        "&var-phase=decode&var-source=demand",
    )


def memory(value: str) -> Firing:
    return Firing(
        "MoeMlxMemoryHigh",
        _warning(),
        "MLX memory is nearly full on mac:9464",
        f"MLX arrays on mac:9464 held {value} of MLX's memory limit (alert above 60%).",
        "moe-host",
    )


def detached(speed: str = "10") -> Firing:
    return Firing(
        "MoeHooksDetached",
        _warning(),
        "Tokens flow but no experts are recorded on mac:9464",
        f"mac:9464 decoded {speed} tok/s and recorded no layer calls, or no lookups of its pool: a hook is not on the"
        " path taken.",
        "moe-host",
    )


def records(rate: str, **cause: str) -> Firing:
    (what,) = cause.values()
    return Firing(
        "MoeRecordsDropped",
        _warning(**cause),
        "Telemetry drops records on mac:9464",
        f"{rate} records a second were lost on mac:9464 ({what}).",
        "moe-host",
    )


def overflow(rate: str) -> Firing:
    return Firing(
        "MoeSeriesOverflow",
        _warning(),
        "The layer budget is used up on mac:9464",
        f'{rate} records a second on mac:9464 went to layer="other": figures by layer are incomplete.',
        "moe-host",
    )
