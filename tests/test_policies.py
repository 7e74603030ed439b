"""Eviction policies on a trace: against plain replays, against every choice that there is, and as the report tells."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from test_reuse import drawn, replay

from moe_telemetry import catalog as c
from moe_telemetry import cli, policies
from moe_telemetry.reuse import Curve
from moe_telemetry.trace_reader import LayerCalls

Calls = list[tuple[str, frozenset[int]]]
"""Phase, experts."""


def recorded(calls: Calls) -> LayerCalls:
    """As the reader keeps them."""
    found = LayerCalls()
    for phase, experts in calls:
        found.add(c.PHASES.index(phase), list(experts))
    return found


def at(curves: list[Curve], slots: int) -> list[int]:
    """Hits of pools of so many slots, by phase."""
    return [curve.at(slots) for curve in curves]


def routing(seed: int, experts: int, number: int, top: int, prefill: int) -> Calls:
    """Skewed, a prefill of `prefill` experts now and then, ids that are not those of their order."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(experts)]
    rng.shuffle(weights)
    names = rng.sample(range(1000), experts)
    found: Calls = []
    for _ in range(number):
        phase, size = ("prefill", prefill) if rng.random() < 0.15 else ("decode", rng.randint(1, top))
        found.append((phase, frozenset(names[expert] for expert in drawn(rng, experts, weights, size))))
    return found


def lfu_replay(calls: Calls, slots: int) -> Counter[str]:
    """Hits of one LFU pool: a whole set is looked up, then what is missing comes in and who was used least goes."""
    hits: Counter[str] = Counter()
    pool: set[int] = set()
    uses: Counter[int] = Counter()
    order: list[int] = []  # the most recently used first, as LRU has it
    for phase, experts in calls:
        hits[phase] += len(experts & pool)
        uses.update(experts)
        touched = [expert for expert in order if expert in experts] + sorted(experts.difference(order))
        order = touched + [expert for expert in order if expert not in experts]
        best = sorted(order, key=lambda expert: (-uses[expert], order.index(expert)))
        if len(experts) >= slots:
            pool = set([expert for expert in best if expert in experts][:slots])
        else:
            stay = [expert for expert in best if expert in pool and expert not in experts]
            pool = set(experts) | set(stay[: slots - len(experts)])
    return hits


def most_hits(calls: Calls, slots: int, phases: tuple[str, ...]) -> int:
    """The most hits in these phases that any choice of who stays leads to: all of them are tried."""

    @cache
    def best(number: int, pool: frozenset[int]) -> int:
        if number == len(calls):
            return 0
        phase, experts = calls[number]
        hits = len(experts & pool) if phase in phases else 0
        return hits + max(best(number + 1, behind) for behind in choices(pool, experts))

    def choices(pool: frozenset[int], experts: frozenset[int]) -> list[frozenset[int]]:
        if len(experts) >= slots:
            return [frozenset(kept) for size in range(slots + 1) for kept in combinations(sorted(experts), size)]
        others = sorted(pool - experts)
        room = slots - len(experts)
        return [experts.union(kept) for size in range(room + 1) for kept in combinations(others, size)]

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(6))
def test_ranks_by_the_last_use_are_lru(seed: int) -> None:
    """The order that all policies have in common hits what a replay of LRU does, and the curve, at every size."""
    calls = routing(seed, 24, 150, top=5, prefill=12)
    given = recorded(calls)
    found = policies.ranked(given, policies.recency(given))
    curves = policies.lru(given)
    assert [curve.lookups for curve in curves] == [curve.lookups for curve in found]
    for slots in range(1, 26):
        expected = replay(calls, slots)
        assert [expected[phase] for phase in c.PHASES] == at(found, slots) == at(curves, slots)


@pytest.mark.parametrize("seed", range(6))
def test_lfu_is_a_plain_replay_of_it(seed: int) -> None:
    """At every size, unions larger than the pool included, to the integer."""
    calls = routing(seed, 24, 150, top=5, prefill=12)
    found = policies.lfu(recorded(calls))
    for slots in range(1, 26):
        expected = lfu_replay(calls, slots)
        assert [expected[phase] for phase in c.PHASES] == at(found, slots)


def test_no_choice_has_more_hits_than_the_optimum() -> None:
    """500 short routings of both phases, pools of 1 to 4 slots: as many as the best of all ways to evict, in each phase
    for itself; with one phase that is Belady's of all hits."""
    rng = random.Random(7)
    unlike = larger = 0
    for number in range(500):
        experts = rng.randint(4, 6)
        calls = [
            (
                rng.choice(c.PHASES) if number % 2 else "decode",
                frozenset(rng.sample(range(experts), rng.randint(1, 3 + number % 2))),
            )
            for _ in range(rng.randint(4, 9))
        ]
        slots = rng.randint(1, 4)
        found = at(policies.optimum(recorded(calls)), slots)
        assert [most_hits(calls, slots, (phase,)) for phase in c.PHASES] == found, (calls, slots)
        unlike += sum(found) > most_hits(calls, slots, c.PHASES)
        larger += any(len(needed) > slots for _, needed in calls)
    assert 0 < unlike  # no one policy reaches both phases' optimum
    assert 100 < larger


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_is_above_the_others(seed: int) -> None:
    """LRU and LFU are two of the choices; all agree where every expert has a slot, and misses are first uses."""
    given = recorded(routing(seed, 40, 400, top=6, prefill=20))
    best, least_used, last_used = policies.optimum(given), policies.lfu(given), policies.lru(given)
    for slots in range(1, 42):
        for most, *others in zip(*(at(curves, slots) for curves in (best, least_used, last_used)), strict=True):
            assert most >= max(others)
    assert at(best, 40) == at(least_used, 40) == at(last_used, 40)
    assert at(best, 10) > at(least_used, 10)


# -- the report ------------------------------------------------------------------------------------------------------

HEAD = {"routing_trace": 1, "model": "m", "runtime": "r", "run": "night", "phases": list(c.PHASES), "layers": "all"}


def write(path: Path, calls: list[list[int]], end: dict[str, Any] | None = None, **head: Any) -> str:
    """A trace's file."""
    lines = [{**HEAD, **head}, *calls, *([] if end is None else [{"end": end}])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def cycle(layers: int, experts: int, passes: int) -> list[list[int]]:
    """Decode of two experts at a time, in turn."""
    return [
        [layer, 1, 2 * number % experts, 2 * number % experts + 1]
        for number in range(passes)
        for layer in range(layers)
    ]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints."""
    assert 0 == cli.main(["report", *words])
    return capsys.readouterr().out


def test_a_trace_alone_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 experts in turn: LRU and LFU hit nothing with 16 slots; the optimum keeps 14 of the 18 others each time."""
    path = write(tmp_path / "t", cycle(2, 20, 100), {"calls": 200, "left_out": 0, "why": None, "layers": 8})
    text = told(capsys, "--trace", path)
    assert text.startswith("m on r, run night, from its routing trace\n\neviction, decode: ")
    assert "eviction, decode: what pools without prefetch would have hit (2 of 8 layers, 400 lookups)" in text
    found = json.loads(told(capsys, "--trace", path, "--json"))["policies"]
    decode = found["phases"]["decode"]
    assert {"8": 0.0, "16": 0.0, "24": 0.9} == decode["hit_rates"]["lru"]
    calls: Calls = [("decode", frozenset(experts)) for layer, _, *experts in cycle(1, 20, 100)]
    assert 2 * at(policies.optimum(recorded(calls)), 16)[1] / 400 == decode["hit_rates"]["optimum"]["16"]
    assert (16, 0.0) == (decode["at"]["slots"], decode["at"]["lru"])
    assert decode["earns"] == decode["at"]["optimum"] > 0.6
    assert f"no eviction policy earns more than {100 * decode['earns']:.1f} points over LRU" in text
    assert {"0", "1"} == found["layers"].keys()
    assert 180 == found["layers"]["0"]["decode"]["hits"]["lfu"]["24"]
    shown = told(capsys, "--trace", path, "--markdown")
    assert "| LRU | 0.0 % | 0.0 % | 90.0 % |" in shown
    assert "- decode: widest with 16 slots: LRU 0.0 %, LFU 0.0 %, optimum " in shown


def test_what_a_trace_lacks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No end, lines that are none, calls that found no room; what is whole counts."""
    calls = cycle(1, 4, 10)
    open_end = write(tmp_path / "open", calls)
    assert "the run has no end in the trace: it goes on, or was killed" in told(capsys, "--trace", open_end)
    path = write(tmp_path / "full", calls, {"calls": 10, "left_out": 1234, "why": "full", "layers": 1})
    assert "not in the trace: 1,234 calls at the end of the run (the file has no room for more)" in told(
        capsys, "--trace", path
    )
    odd: list[Any] = [[0, 2, 5], [0, 1, 5, 5], [-1, 1, 5], [0], [0, 1, 2.0], [0, 1, True], {"a": 1}, "x", None, 3]
    odd.append([1_000_000, 1, 5])
    path = write(tmp_path / "odd", calls[:5] + odd + calls[5:])
    text = told(capsys, "--trace", path)
    assert f"lines of the trace that could not be read: {len(odd)}" in text
    assert "(1 layers, 20 lookups)" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "is no routing trace"),
        ('{"schema": 1}', "is no routing trace"),
        ("\0\1\2" * 500_000, "is no routing trace"),
        ("\x1f\x8bnothing", "cannot read"),
        (json.dumps({**HEAD, "routing_trace": 2}), "has the format 2, this version reads 1"),
        (json.dumps({**HEAD, "phases": ["decode", "prefill"]}), "has the format"),
        ('{"routing_trace": 1, "run": ' + "[" * 100_000, "is no routing trace"),
        (json.dumps(HEAD) + "\n" + json.dumps([0, 1, *range(600)]) + "\n", "more than 512 experts"),
        (json.dumps(HEAD) + "".join(f"\n[{at},1,2]" for at in range(10_001)), "more than 10000 layers"),
        (json.dumps(HEAD) + '\n[0, 1, 2]\n{"end": {"left_out": "x"}}\n', "is damaged"),
        (json.dumps(HEAD) + '\n[0, 1, 2]\n{"end": {"why": ["full"]}}\n', "is damaged"),
    ],
    ids=("missing", "empty", "snapshot", "binary", "gzip", "later", "phases", "deep", "ids", "layers", "left", "why"),
)
def test_a_bad_trace_is_one_line(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, and what is wrong with it."""
    path = tmp_path / "trace"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    assert 2 == cli.main(["report", "--trace", str(path)])
    captured = capsys.readouterr()
    assert ("", 1) == (captured.out, captured.err.count("\n"))
    assert words in captured.err


def test_what_a_trace_says_is_no_order_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters, and halves of surrogate pairs, which no stream encodes."""
    odd = "\x1b]0;x\x07\ud800"
    path = write(tmp_path / "t", cycle(1, 4, 3), {"layers": odd}, model=odd, run=odd)
    text = told(capsys, "--trace", path)
    assert text.startswith("?]0;x?? on r, run ?]0;x??, from")
    assert "(1 of ?]0;x?? layers," in text
    assert text.replace("\n", "").isprintable()


def test_a_trace_without_calls_says_no_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that has only begun."""
    assert "m on r, run night, from its routing trace\n\n  the run has no end" in told(
        capsys, "--trace", write(tmp_path / "t", [])
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "report needs a snapshot's file, an endpoint, or --trace; see moe-telemetry report --help"),
        (["a.json", "b.json", "--trace", "t"], "a trace is of one run: give one snapshot with --trace, or none"),
    ],
    ids=str,
)
def test_misuse_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2."""
    assert 2 == cli.main(["report", *words])
    assert f"moe-telemetry: {line}\n" == capsys.readouterr().err
