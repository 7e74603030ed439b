"""Hooks under arguments that nobody should hand them: the calls, and what must hold behind each.

    python tests/fuzz_hooks.py [--calls 200000] [--seed 0]

As a script it goes on until so many calls are made, a tenth of them with what hypothesis builds, and prints what was
taken, and refused by reason.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import hostile
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moe_telemetry import Recorder, catalog, profiling, recorder
from moe_telemetry.exposition import Exposition
from moe_telemetry.hooks import HOOKS
from moe_telemetry.series import Distribution, read
from moe_telemetry.testing import Capture, capture

Call = tuple[str, tuple[Any, ...], dict[str, Any]]

PARAMETERS: dict[str, tuple[str, ...]] = {
    "forward": ("tokens", "phase"),
    "forward_done": ("seconds",),
    "tokens": ("n", "phase"),
    "speculation": ("n", "n"),
    "request": ("seconds", "seconds", "n"),
    "routed": ("layer", "ids", "ids", "ids", "ids"),
    "routed_array": ("layer", "array", "n", "ids", "ids", "ids"),
    "union": ("layer", "n", "residency"),
    "recall": ("layer", "ids", "ids"),
    "prefetch": ("stage", "seconds"),
    "promote": ("step", "seconds"),
    "window": ("seconds",),
    "placed": ("n", "phase"),
    "prefetch_dropped": ("reason", "n", "n", "phase"),
    "block": ("segment", "seconds"),
    "block_call": (),
    "read": ("source", "n", "seconds", "phase"),
    "stall": ("seconds",),
    "evicted": ("layer", "n"),
    "degraded": ("mode", "n"),
    "pool": ("layer", "n", "n"),
    "cumulative": ("metric", "amount"),
}
"""What each positional argument of a hook is meant to be."""
NEEDED = {"routed": 2, "routed_array": 3, "union": 2, "prefetch_dropped": 1, "read": 3, "pool": 1, "evicted": 1}
"""Hooks with defaults: how many arguments they need."""
ONE_OBSERVATION = {
    "forward_done": catalog.FORWARD_DURATION,
    "prefetch": catalog.PREFETCH_DURATION,
    "promote": catalog.PROMOTE_DURATION,
    "window": catalog.PREFETCH_WINDOW,
    "block": catalog.BLOCK_DURATION,
    "read": catalog.READ_DURATION,
    "stall": catalog.STALL_DURATION,
    "request": catalog.REQUEST_DURATION,
    "block_call": catalog.BLOCK_CALLS,
    "routed": catalog.LAYER_CALLS,
    "union": catalog.LAYER_CALLS,
}
"""Hooks of which each call that is taken is one observation or call of a metric."""
TIMED = ("forward_done", "prefetch", "promote", "window", "block", "read", "stall")
"""Hooks whose last argument is the seconds."""
COUNTERS = tuple(catalog.counters())
LATE = ("routed_array",)
"""Hooks that may lose later what they took."""

LIVE: tuple[set[Any], ...] = (set(range(8)), set(), {1, 2, 3})
"""Sets that another thread changes meanwhile."""


@contextmanager
def changing() -> Iterator[None]:
    """Another thread that changes the live sets, at switches that come often."""
    ended = threading.Event()

    def change() -> None:
        for number in itertools.count():
            for each in LIVE:
                each.add(number % 97)
                each.discard((number * 31) % 97)
                if number % 13 == 0:
                    each.clear()
            if ended.wait(0.0002):
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)


# -- arguments ------------------------------------------------------------------------------------------------


def fitting(kind: str, rng: Random) -> Any:
    """An argument as it is meant to be, or nearly."""
    if kind == "ids":
        if rng.random() < 0.2:
            return rng.choice(LIVE)
        ids = [rng.randrange(8) for _ in range(rng.randrange(6))]
        return rng.choice([set, set, set, frozenset, list, iter])(ids)
    if kind == "array":
        return hostile.mx.array([[rng.randrange(8) for _ in range(2)]])
    fit: dict[str, tuple[Any, ...]] = {
        "tokens": (1, 2, 7, 16, 17, 64, 5000),
        "phase": (None, "decode", "prefill", hostile.Phase.DECODE),
        "seconds": (0.0, 1e-6, 0.5, 3, 1e9, hostile.np.float32(0.25)),
        "n": (0, 1, 5, 2**53, hostile.np.int64(3)),
        "amount": (0, 1, 2.5, 1000, 10**15),
        "layer": (0, 1, 2, "3", 3.0, None, -1, 700),
        "residency": (None, *catalog.RESIDENCIES),
        "stage": catalog.STAGES,
        "step": catalog.STEPS,
        "reason": catalog.DROP_REASONS,
        "segment": catalog.SEGMENTS,
        "source": ("demand", "prefetch"),
        "mode": catalog.DEGRADED_MODES,
        "metric": tuple(catalog.BY_NAME),
    }
    return rng.choice(fit[kind])


class Arguments:
    """Arguments of one call: most fit, so that what is odd gets far; what is odd may meet its like, or itself."""

    def __init__(self, rng: Random, hook: str) -> None:
        self.rng = rng
        self.odd = rng.choice((0.0, 0.2, 0.2, 1.0)) if hook != "forward" or rng.random() < 0.2 else 0.0
        theme = rng.random()
        maker = rng.choice(hostile.MAKERS)
        same = maker(rng) if theme < 0.1 else None
        self._strange = (lambda: same) if theme < 0.1 else (lambda: maker(rng)) if theme < 0.4 else self._anything

    def _anything(self) -> Any:
        return hostile.anything(self.rng)

    def __call__(self, kind: str) -> Any:
        return self._strange() if self.rng.random() < self.odd else fitting(kind, self.rng)


def call(rng: Random, hooks: tuple[str, ...] = HOOKS) -> Call:
    """A call of some hook."""
    hook = rng.choice(hooks)
    argument = Arguments(rng, hook)
    kinds = PARAMETERS[hook]
    number = rng.randint(NEEDED.get(hook, len(kinds)), len(kinds)) if hook in NEEDED else len(kinds)
    if hook in ("forward", "tokens", "placed", "degraded"):
        number = rng.randint(1, len(kinds))
    named: dict[str, Any] = {}
    if hook == "cumulative":
        metric = rng.choice(COUNTERS)
        for label in metric.labels:
            values = label.values or ("0", 1, "none")
            named[label.key] = rng.choice(values) if rng.random() > argument.odd else argument("layer")
        if rng.random() < 0.1:
            named[rng.choice(["layer", "no", "phase"])] = argument("layer")
        return hook, (metric.name if rng.random() > argument.odd else argument("metric"), argument("amount")), named
    if hook == "request" and rng.random() < 0.5:
        named["idle"] = argument("n")
    return hook, tuple(argument(kind) for kind in kinds[:number]), named


def block(rng: Random) -> tuple[Any, tuple[Any, ...]]:
    """Arguments of `timed`: a hook by its name, or what is none, and arguments that may be too many."""
    argument = Arguments(rng, "timed")
    hook = rng.choice(TIMED) if rng.random() > argument.odd else argument("n")
    kinds = PARAMETERS[hook][:-1] if type(hook) is str and hook in TIMED else ("n",)
    return hook, tuple(argument(kind) for kind in kinds if rng.random() < 0.95)


# -- what must hold -------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """Something that must hold does not."""


def hold(condition: bool, *told: object) -> None:
    if not condition:
        raise Broken(*told)


class Session:
    """One telemetry under calls. `strict` where each call's outcome can be told at once."""

    def __init__(self, captured: Capture, recorder: Recorder) -> None:
        self.captured = captured
        self.recorder = recorder
        self.taken: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.interrupted = 0
        self._before: dict[Any, Any] = {}
        self._exposition = Exposition()
        self._late = False

    def make(self, hook: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """One call: no Exception, and it is taken or is one loss by a reason."""
        lost = self.captured.store.lost
        before, reasons = sum(lost.values()), lost.copy()
        self._late = self._late or hook in LATE
        with self._passing(hook):
            getattr(self.recorder, hook)(*args, **named)
        self._count(hook, sum(lost.values()) - before, reasons)

    def time(self, hook: Any, args: tuple[Any, ...]) -> None:
        """A block that is timed by a hook, given by its name, or by what is no hook."""
        lost = self.captured.store.lost
        before, reasons = sum(lost.values()), lost.copy()
        known = type(hook) is str and hook in TIMED
        with self._passing("timed"), self.recorder.timed(getattr(self.recorder, hook) if known else hook, *args):
            pass
        self._count(hook if known else "timed", sum(lost.values()) - before, reasons)

    @contextmanager
    def _passing(self, hook: str) -> Iterator[None]:
        try:
            yield
        except hostile.PASSING:
            self.interrupted += 1
        except BaseException as error:
            raise Broken(f"{hook} raised {type(error).__name__}") from error

    def _count(self, hook: str, rise: int, reasons: dict[str, int]) -> None:
        lost = self.captured.store.lost
        hold(rise in (0, 1) or self._late, hook, "lost", rise)
        hold(lost.keys() == reasons.keys(), "a reason that is none")
        (self.refused if rise else self.taken)[hook] += 1
        for reason in lost:
            hold(lost[reason] >= reasons[reason], "a loss was forgotten")

    def check(self, adds_up: bool = True) -> None:
        """What was recorded is whole: figures of the right kind that never fall, and that add up."""
        series = self.captured.series()
        for key, value in series.items():
            metric = catalog.BY_NAME[key[0]]
            before = self._before.get(key)
            if isinstance(value, Distribution):
                hold(all(type(each) is int and each >= 0 for each in value.counts), key, value)
                hold(_is_figure(value.sum), key, value)
                if before is not None:
                    hold(value.sum >= before.sum, key, "the sum fell")
                    hold(all(now >= then for now, then in zip(value.counts, before.counts, strict=True)), key, "fell")
            else:
                hold(_is_figure(value), key, value)
                hold(metric.kind is catalog.Kind.GAUGE or before is None or value >= before, key, before, value)
        hold(self._before.keys() <= series.keys(), "a series went")
        self._before = series
        if adds_up:
            self._add_up(series)

    def _add_up(self, series: dict[Any, Any]) -> None:
        fed: Counter[str] = Counter()
        by_layer: Counter[Any] = Counter()
        for (name, values), value in self.captured.store.fed.items():
            fed[name] += value
            if name == catalog.LOOKUPS.name:
                by_layer["fed", values[0], values[1]] += value
        for (name, pairs), value in series.items():
            if name in (catalog.LOOKUPS.name, catalog.LAYER_EXPERTS.name):
                labels = dict(pairs)
                by_layer[name, labels["phase"], labels["layer"]] += value
        if not fed[catalog.LAYER_EXPERTS.name]:
            for (name, phase, layer), value in list(by_layer.items()):
                if name == catalog.LOOKUPS.name:
                    experts = by_layer[catalog.LAYER_EXPERTS.name, phase, layer]
                    hold(value - by_layer["fed", phase, layer] <= experts, phase, layer, value, experts)
        if self._late or self.interrupted:
            return
        expected: Counter[str] = Counter()
        for hook, metric in ONE_OBSERVATION.items():
            expected[metric.name] += self.taken[hook]
        for name, number in expected.items():
            values = [value for (found, _), value in series.items() if found == name]
            whole = sum(value.count if isinstance(value, Distribution) else value for value in values)
            hold(number == whole - fed[name], name, number, whole)

    def partition(self) -> None:
        """Where each layer call had its residency: outcomes are the routed experts, layer by layer."""
        total: Counter[Any] = Counter()
        for (name, pairs), value in self.captured.series().items():
            if name in (catalog.LOOKUPS.name, catalog.LAYER_EXPERTS.name):
                labels = dict(pairs)
                total[name, labels["phase"], labels["layer"]] += value
        for (name, phase, layer), value in list(total.items()):
            if name == catalog.LAYER_EXPERTS.name:
                hold(value == total[catalog.LOOKUPS.name, phase, layer], phase, layer, value)

    def scrape(self) -> int:
        """The exposition renders and parses; the number of its samples."""
        registry = CollectorRegistry(auto_describe=False)
        families = [self._exposition.family(family) for family in read(self.captured.store)]
        registry.register(type("Collector", (), {"collect": lambda _: families, "describe": lambda _: []})())
        text = generate_latest(registry).decode()
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        hold(all(math.isfinite(sample.value) and sample.value >= 0 for sample in found), "a sample that is no figure")
        return len(found)


def _is_figure(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type]


@contextmanager
def session(rng: Random) -> Iterator[Session]:
    """A telemetry of its own, in one of the variants of the hooks, after a pass of another thread or not."""
    recorder = Recorder()
    with capture(recorder=recorder, locked=rng.random() < 0.3) as captured:
        if rng.random() < 0.3:
            recorder.forward(1)
            other = threading.Thread(target=recorder.forward, args=(3,))
            other.start()
            other.join()
        yield Session(captured, recorder)


def run(rng: Random, calls: int) -> Session:
    """A session of so many calls, checked on the way and at its end."""
    every = tuple(hook for hook in HOOKS if hook not in LATE) if rng.random() < 0.8 else HOOKS
    lookups = rng.random() < 0.2
    with session(rng) as found:
        for number in range(calls):
            if lookups:
                hook, args, named = call(rng, ("routed", "forward", "pool", "evicted"))
                if hook == "routed" and (len(args) < 3 or args[2] is None):
                    args = (*args[:2], fitting("ids", rng), *args[3:])
            else:
                hook, args, named = call(rng, every)
            if not lookups and rng.random() < 0.04:
                found.time(*block(rng))
            else:
                found.make(hook, args, named)
            if number % 100 == 99:
                found.check()
        found.check()
        if lookups and not found.interrupted:
            found.partition()
        if rng.random() < 0.2:
            found.scrape()
    return found


# -- the drop-in ----------------------------------------------------------------------------------------------

DROPIN: dict[str, tuple[str, ...]] = {
    "note_tprof": ("segment", "seconds", "key", "n"),
    "_tick": ("segment", "seconds"),
    "note_union": ("n", "n", "layer"),
    "note_miss_attrib": ("ids", "ids", "ids", "flag", "ids"),
    "set_phase": ("phase",),
    "tprof_reset": (),
    "prof_reset": (),
    "union_reset": (),
}
_SEGMENTS = (*profiling.PREFETCH_TPROF, *profiling.PROF, "no_such_segment")


def dropin(rng: Random, calls: int) -> Session:
    """A session of so many calls of the drop-in's functions, on for most of it: nothing is raised, nothing falls."""
    with capture() as captured:
        found = Session(captured, recorder)
        for number in range(calls):
            name = rng.choice(tuple(DROPIN))
            argument = Arguments(rng, name)
            odd = {"key": (None, *_SEGMENTS), "segment": _SEGMENTS, "flag": (True, False)}
            args = [
                rng.choice(odd[kind]) if kind in odd and rng.random() > argument.odd else argument(_FIT.get(kind, kind))
                for kind in DROPIN[name]
            ]
            named = dict(zip(("count_key", "count"), args[2:], strict=True)) if name == "note_tprof" else {}
            with found._passing(name):
                getattr(profiling, name)(*(args[:2] if named else args), **named)
            found.taken[name] += 1
            if number % 50 == 49:
                found.check(adds_up=False)
    found.check(adds_up=False)
    profiling.tprof_reset(), profiling.prof_reset(), profiling.union_reset(), profiling.set_phase(None)
    return found


_FIT = {"key": "segment", "flag": "n"}


# -- what hypothesis builds --------------------------------------------------------------------------------------

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300, max_value=10**320),
    st.floats(),
    st.text(),
    st.binary(max_size=8),
    st.complex_numbers(),
    st.decimals(),
    st.fractions(),
    st.sampled_from([hostile.Phase.DECODE, "decode", "submit", "fetch", "demand", "moe.tokens"]),
    st.integers(0, 2**32).map(lambda number: hostile.anything(Random(number))),
)
ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.tuples(inner, inner),
        st.sets(st.one_of(st.integers(0, 9), st.text(max_size=2), st.floats()), max_size=5),
        st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3),
        st.iterables(inner, max_size=3),
    ),
    max_leaves=6,
)
"""Any value: plain, nested, or one of `hostile`."""


@st.composite
def _calls(draw: Any) -> list[Call]:
    found = []
    for _ in range(draw(st.integers(1, 12))):
        hook = draw(st.sampled_from(sorted(PARAMETERS)))
        rng = Random(draw(st.integers(0, 2**32)))
        odd = [draw(ANYTHING) if draw(st.integers(0, 2)) == 0 else fitting(kind, rng) for kind in PARAMETERS[hook]]
        named = (
            draw(st.dictionaries(st.sampled_from(["phase", "layer", "x"]), ANYTHING)) if hook == "cumulative" else {}
        )
        found.append((hook, tuple(odd), named))
    return found


def built(examples: int, number: int | None = None) -> list[Session]:
    """Sessions with what hypothesis builds, `number` its seed."""
    sessions = []

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(_calls())
    def make(calls: list[Call]) -> None:
        with session(Random(len(calls))) as found:
            for hook, args, named in calls:
                found.make(hook, args, named)
            found.check()
        sessions.append(found)

    (make if number is None else seed(number)(make))()
    return sessions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("moe_telemetry").setLevel(logging.CRITICAL)
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    interrupted = 0
    begin = time.monotonic()
    with changing():
        for number in itertools.count(options.seed):
            try:
                sessions = [run(Random(number), 200)] if number % 20 else built(70, number)
            except Broken:
                print(f"seed {number}", file=sys.stderr)
                raise
            for found in sessions:
                taken += found.taken
                refused += found.refused
                interrupted += found.interrupted
                reasons.update(found.captured.store.lost)
            if sum(taken.values()) + sum(refused.values()) >= options.calls:
                break
    with suppress(BrokenPipeError):
        print(
            f"{sum(taken.values()) + sum(refused.values()):,} calls in {time.monotonic() - begin:.0f} s, seeds "
            f"{options.seed} to {number}: {sum(taken.values()):,} taken or passed through ({interrupted:,} interrupted)"
        )
        for hook in (*HOOKS, "timed"):
            print(f"  {hook:18}{taken[hook]:9,} taken {refused[hook]:9,} refused")
        print("  " + ", ".join(f"{reason} {number:,}" for reason, number in reasons.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
