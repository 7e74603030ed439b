"""For tests of a runtime: telemetry without HTTP, and its figures as one dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from . import hooks, recording
from .hooks import Recorder
from .series import Value, read
from .settings import resolve
from .store import Identity, Store
from .version import __version__

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Capture:
    """What was recorded so far, by the recorder that `capture` turned on."""

    store: Store

    def series(self) -> dict[tuple[str, Labels], Value]:
        """`{(name, labels): value}`: OpenTelemetry names, labels as sorted (key, value) pairs; histograms are
        `series.Distribution`. Waits for what `routed_array` holds back of the calling thread's passes."""
        self.store.drain()
        return {
            (family.metric.name, tuple(sorted(zip(family.metric.keys, values, strict=True)))): value
            for family in read(self.store)
            for values, value in family.series.items()
        }

    def value(self, name: str, **labels: str) -> Value:
        """One series' value; KeyError when there is none."""
        return self.series()[name, tuple(sorted(labels.items()))]

    def total(self, name: str, **labels: str) -> float:
        """Sum of a counter's or gauge's series that have these labels; 0 when there is none."""
        wanted = set(labels.items())
        return sum(
            value
            for (found, pairs), value in self.series().items()
            if found == name and wanted <= set(pairs) and isinstance(value, (int, float))
        )


@contextmanager
def capture(
    num_layers: int | Iterable[int] | None = None,
    decode_seq_max: int | None = None,
    locked: bool | None = None,
    recorder: Recorder = hooks.recorder,
    pool_curve: str | None = None,
) -> Iterator[Capture]:
    """Turn `recorder` on for a with-block, without provider, readers or endpoint.

    `locked` chooses the variant of the hooks that free-threaded interpreters use. Afterwards the recorder feeds
    what was started last and still runs, before this block or in it, or is off.
    """
    settings = resolve(
        num_layers=num_layers, decode_seq_max=decode_seq_max, pool_curve=pool_curve, environ=_NO_ENVIRONMENT
    )
    identity = Identity("test", "test", "test", __version__)
    store = Store(identity, settings.decode_seq_max, settings.layer_ids, settings.pool_curve)
    end = recording.feed(recorder, store, locked)
    try:
        yield Capture(store)
    finally:
        end()


_NO_ENVIRONMENT: Mapping[str, str] = {}
