"""The drop-in's dicts equal the seed's after any sequence of calls, writes, resets, starts and stops."""

from __future__ import annotations

import copy
import json
import os
import pickle
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from profiling_state import DICTS, pristine
from seed_reference import RULES, Reference

from moe_telemetry import hooks, profiling, profiling_ticks, recording
from moe_telemetry.profiling_times import Series
from moe_telemetry.series import Distribution, read
from moe_telemetry.store import Identity, Store

SEGMENTS = st.sampled_from(["route", "pyremap", "fetch", "matmul", "combine", "n_calls", "nothing"])
STAGES = st.sampled_from(
    ["predict_s", "submit_s", "promote_s", "take_s", "route_s", "place_s", "predict_n", "place_experts", "nothing"]
)
COUNTS = st.sampled_from([None, "predict_n", "submit_n", "promote_n", "place_experts", "nothing"])
SECONDS = st.one_of(
    st.floats(1e-7, 10.0), st.floats(-1.0, 1e10), st.integers(0, 3), st.sampled_from([0.1, 1e-4, 1e16, 0.0])
)
IDS = st.lists(st.integers(0, 15), max_size=12)
SETS = st.one_of(
    st.none(), st.sets(st.integers(0, 15)), st.lists(st.integers(0, 15)), st.frozensets(st.integers(0, 15))
)
WAYS = st.sampled_from(
    ["item", "get", "dict", "unpack", "copy", "json", "pickle", "deep", "or", "eq", "values", "repr"]
)
FORMS = st.sampled_from([set, list, tuple, iter, frozenset])
RISES = st.one_of(st.integers(-5, 5), st.sampled_from([0.25, -0.5, 1e-5]))


class Machine(RuleBasedStateMachine):
    """One operation a step, on the drop-in and on the reference."""

    without = ""
    operations = 0

    @initialize()
    def begin(self) -> None:
        recording.detach(hooks.recorder)
        pristine()
        self.reference = Reference(self.without)
        self.now = 0.0
        self.exported: dict[Any, Any] = {}
        profiling_ticks.perf_counter = lambda: self.now

    @invariant()
    def counted(self) -> None:
        Machine.operations += 1

    def teardown(self) -> None:
        if hasattr(self, "reference"):
            try:
                self.check("item")
            finally:
                recording.detach(hooks.recorder)
        profiling_ticks.perf_counter = CLOCK
        pristine()

    def both(self, name: str, *args: Any, **named: Any) -> None:
        with suppress(KeyError):
            getattr(self.reference, name)(*args, **named)
        assert None is getattr(profiling, name)(*args, **named)

    @rule(seg=SEGMENTS, begin=SECONDS, seconds=SECONDS)
    def tick(self, seg, begin, seconds):
        self.now = begin + seconds
        with suppress(KeyError):
            self.reference.tick(seg, self.now - begin)
        profiling._tick(seg, begin)

    @rule(seg=STAGES, dt=SECONDS, count_key=COUNTS, count=st.sampled_from([1, 1, 1, 0, 3, -1]))
    def note_tprof(self, seg, dt, count_key, count):
        self.both("note_tprof", seg, dt, count_key=count_key, count=count)

    @rule(stage=st.sampled_from(["predict", "submit", "promote"]), dts=st.lists(SECONDS, max_size=8))
    def note_stage(self, stage, dts):
        for dt in dts:
            self.both("note_tprof", f"{stage}_s", dt, count_key=f"{stage}_n")

    @rule(seg=st.sampled_from(["take_s", "fetch"]), dt=st.floats(1e-7, 1.0))
    def fill(self, seg, dt):
        """More than may wait."""
        for step in range(Series.LIMIT + 5):
            if seg == "fetch":
                self.tick(seg, 1.0, dt * step)
            else:
                self.both("note_tprof", seg, dt * step)

    @rule(
        seq=st.one_of(st.integers(1, 20), st.sampled_from([512, 5000]), st.integers(1, 400)),
        size=st.integers(0, 40),
        layer=st.integers(-2, 4),
    )
    def note_union(self, seq, size, layer):
        self.both("note_union", seq, size, layer)

    @rule(uniq=IDS, predicted=SETS, resident=SETS, ready=SETS, decode=st.booleans(), form=FORMS)
    def note_miss_attrib(self, uniq, predicted, resident, ready, decode, form):
        resident = set() if resident is None else resident
        uniq = uniq if form in (list, tuple, iter) else list(form(uniq))
        self.reference.note_miss_attrib(uniq, predicted, resident, decode, ready)
        profiling.note_miss_attrib(form(uniq), predicted, resident, decode, ready)

    @rule(name=st.sampled_from(DICTS), at=st.integers(0, 11), rise=RISES)
    def write_in_place(self, name, at, rise):
        theirs, ours = getattr(self.reference, name), getattr(profiling, name)
        if theirs:
            key = sorted(theirs)[at % len(theirs)]
            rise = whole(name, key, rise)
            theirs[key] += rise
            ours[key] += rise

    @rule(name=st.sampled_from(DICTS), at=st.integers(0, 11), value=SECONDS)
    def set(self, name, at, value):
        for found in (getattr(self.reference, name), getattr(profiling, name)):
            if found:
                key = sorted(found)[at % len(found)]
                found[key] = whole(name, key, value)

    @rule(
        name=st.sampled_from(DICTS),
        at=st.integers(0, 11),
        how=st.sampled_from(["del", "pop", "update", "ior", "default"]),
    )
    def change(self, name, at, how):
        results = []
        for found in (getattr(self.reference, name), getattr(profiling, name)):
            key = sorted(found)[at % len(found)] if found else "route"
            if how == "del":
                found.pop("nothing", None)
                found["own"] = 1
                del found["own"]
            elif how == "pop":
                value = found.pop(key, 0)
                results.append(value)
                found[key] = value
            elif how == "update":
                found.update({key: 2, "own": 0.5})
                del found["own"]
            elif how == "ior":
                found |= {key: whole(name, key, 3.5)}
            else:
                results.append(found.setdefault(key, 7))
        assert results[:1] == results[1:]

    @rule(name=st.sampled_from(["prof_reset", "tprof_reset", "union_reset"]))
    def reset(self, name):
        self.both(name)

    @rule(phase=st.sampled_from(["prefill", "decode", None, "neither"]))
    def set_phase(self, phase):
        profiling.set_phase(phase)

    @rule(running=st.booleans())
    def start_or_stop(self, running):
        self.exported = {}
        if running:
            recording.attach(hooks.recorder, Store(Identity("", "", "", ""), 8))
        else:
            recording.detach(hooks.recorder)

    @rule(tokens=st.sampled_from([1, 3, 40]))
    def forward(self, tokens):
        hooks.recorder.forward(tokens)
        if tokens == 40:
            hooks.recorder.forward_done(0.1)

    @rule(way=WAYS)
    def check(self, way):
        """The dicts are true however they are read."""
        for name in DICTS:
            assert typed(getattr(self.reference, name)) == typed(as_read(getattr(profiling, name), way))
        assert (way, self.reference.UNION_PROF) == (way, as_read(profiling.UNION_PROF, way))
        found = profiling.UNION_SAMPLES
        assert self.reference.UNION_SAMPLES.keys() == found.keys()
        for seq, layers in self.reference.UNION_SAMPLES.items():
            assert {layer: sorted(sizes) for layer, sizes in layers.items()} == found[seq]

    @rule()
    def scrape(self):
        """No counter falls, whatever is reset."""
        if type(hooks.recorder) is hooks.Recorder:
            return
        now: dict[Any, Any] = {}
        for family in read(hooks.recorder._store):
            for labels, value in family.series.items():
                if isinstance(value, Distribution):
                    now |= {(family.metric.name, labels, at): count for at, count in enumerate(value.counts)}
                elif family.metric.kind == "counter":
                    now[family.metric.name, labels] = value
        assert [] == [key for key, value in self.exported.items() if now.get(key, 0) < value]
        self.exported = now


def whole(name: str, key: str, value: Any) -> Any:
    """Counts that functions add to stay whole, as they are in the seed: adding floats depends on the order."""
    return int(value) if name == "MISS_ATTRIB" or key.endswith("_n") else value


CLOCK = profiling_ticks.perf_counter


def typed(found: dict[str, Any]) -> dict[str, Any]:
    return {key: (type(value), value) for key, value in found.items()}


def as_read(found: dict[Any, Any], way: str) -> dict[Any, Any]:
    numbers = type(next(iter(found), 0)) is int
    readings = {
        "item": lambda: {key: found[key] for key in found},
        "get": lambda: {key: found.get(key) for key in found.keys()},  # noqa: SIM118
        "dict": lambda: dict(found),
        "unpack": lambda: {**found},
        "copy": lambda: copy.copy(found),
        "json": lambda: (
            {int(key): value for key, value in json.loads(json.dumps(found)).items()}
            if numbers
            else json.loads(json.dumps(found))
        ),
        "pickle": lambda: pickle.loads(pickle.dumps(found)),
        "deep": lambda: copy.deepcopy(found),
        "or": lambda: {} | found,
        "eq": lambda: dict(found.items()) if found == dict(found.items()) else {},
        "values": lambda: dict(zip(found.keys(), found.values(), strict=True)),  # noqa: SIM911
        "repr": lambda: eval(repr(found)),
    }
    return readings[way]()


LONG = settings(
    max_examples=int(os.environ.get("PROFILING_EXAMPLES", "250")),
    stateful_step_count=60,
    phases=[Phase.generate],
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SHORT = settings(LONG, max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False)


def test_dicts_equal_the_seeds():
    """After each of 10,000 operations or more the dicts hold what the seed's would hold."""
    Machine.operations = 0
    run_state_machine_as_test(Machine, settings=LONG)
    assert Machine.operations >= 10_000


@pytest.mark.parametrize("rule_left_out", RULES)
def test_a_changed_rule_is_found(rule_left_out):
    """The property fails when the reference lacks one of its rules."""
    mutant = type("Mutant", (Machine,), {"without": rule_left_out})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(mutant, settings=SHORT)
