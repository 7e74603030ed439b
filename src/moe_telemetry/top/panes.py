"""What stands on the screen, as lines of styled words: the overview of a phase, and what belongs to no phase.

Free of Textual; `--once` prints the same lines. Styles repeat what words and symbols say.
"""

from __future__ import annotations

from .frame import Absent, Figure, Frame, PhaseFrame
from .watched import Watched
from .window import ABOVE
from .words import Line, Span, figure, known, number, percent, size, span, why

PANE_WIDTH = 38
"""Columns of a phase: two of them and a line between fit in 80."""
UNION_ROWS = 3
NEW_SECONDS = 60.0
"""How long a run that followed another one is called new."""
LONG_PASS = 1.0
"""Seconds of the pass in progress that are worth a word while others end."""
DETAIL_LINES = 15
"""Of `detail`, with so many lengths of unions."""
OUTCOMES = (
    ("hit", "hit", "█"),
    ("late", "late", "▓"),
    ("evicted", "evicted", "▒"),
    ("unpredicted", "unpredicted", "░"),
)
"""Fields of a phase's frame, their words, and what fills their part of the bar."""


def status(watched: Watched, now: float) -> Span:
    """How it is with an endpoint."""
    age = watched.age(now)
    if watched.failure is not None:
        if age is None:
            return f"✗ unreachable: {watched.failure}; asked again and again", "bad"
        since = span(now - watched.failed_since) if watched.failed_since is not None else ""
        return f"✗ gone for {since} ({watched.failure}); figures are {span(age)} old", "bad"
    if watched.frame is None or age is None:
        return "… no answer yet", "dim"
    found = watched.frame
    over = "the run so far" if found.whole_run else f"{found.seconds:.1f} s"
    new = "a new run, " if found.restarted or (watched.restarts and 0 <= (found.age or -1) < NEW_SECONDS) else ""
    lost = f"; {found.lost:.0f} records were dropped" if found.lost else ""
    return f"● live, {new}over {over}, scraped {span(age)} ago{lost}", "warn" if lost else "good"


def identity(watched: Watched) -> str:
    """Which endpoint, and what runs there."""
    if watched.frame is None:
        return watched.name
    run = watched.frame.run
    age = watched.frame.age
    up = f", up {span(age)}" if age is not None and age >= 0 else ""
    return f"{watched.name}  {run.get('model', '')} on {run.get('runtime', '')}{up}"


def activity(of: PhaseFrame, idle: float | None) -> Span:
    """Whether a phase is at work; `idle` are the seconds since its figures."""
    if idle is not None or not of.active:
        if of.running > 0:
            return f"in a pass for {span(of.running)}", "warn"
        return "idle" if idle is None else f"idle; figures of {span(idle)} ago", "dim"
    if isinstance(of.busy, Absent):
        return f"busy - {of.busy.value}", "dim"
    long = f", a pass of {span(of.running)}" if of.running > LONG_PASS else ""
    return f"busy {percent(of.busy)}%{long}", ""


def tracked(of: PhaseFrame) -> list[Line]:
    """The four figures that have a trend."""
    speed = number(known(of.speed))
    return [
        [("tok/s     ", ""), _strong(of.speed, f"{speed:>6}")],
        *(
            [(f"{name:<10}", ""), _strong(value, f"{percent(known(value)):>5}%")]
            for name, value in (("hit rate", of.hit), ("recall", of.recall), ("all hit", of.all_hit))
        ),
    ]


def _strong(value: Figure, text: str) -> Span:
    words, style = figure(value, text)
    return words, style or "strong"


def detail(of: PhaseFrame, pool: int | None, width: int = PANE_WIDTH, union_rows: int = UNION_ROWS) -> list[Line]:
    """All the rest of a phase."""
    return [
        *_outcomes(of, width),
        *_unions(of, pool, union_rows),
        *_times(of),
        *_reads(of),
        _stalls(of),
    ]


def _outcomes(of: PhaseFrame, width: int) -> list[Line]:
    shares = [getattr(of, field) for field, *_ in OUTCOMES]
    if reason := why(shares):
        return [[("lookups   ", ""), (f"- {reason.value}", "dim")], [], []]
    ends = [round(sum(map(_value, shares[: upto + 1])) * width) for upto in range(len(shares))]
    bar = [
        (fill * (end - begin), field)
        for (field, _, fill), begin, end in zip(OUTCOMES, [0, *ends], ends, strict=False)
        if end > begin
    ]
    legend = [
        [(fill, field), (f" {words} {percent(value)}%", ""), ("   ", "")]
        for (field, words, fill), value in zip(OUTCOMES, map(_value, shares), strict=True)
    ]
    return [bar, [*legend[0], *legend[1][:2]], [*legend[2], *legend[3][:2]]]


def _value(found: Figure) -> float:
    return known(found) or 0.0


def _unions(of: PhaseFrame, pool: int | None, most: int) -> list[Line]:
    slots = f"pool {pool}" if pool is not None else "no pool"
    lines: list[Line] = [[(f"{f'union ({slots})':<16}", "head"), (f"{'p50':>5}{'p99':>5}{'max':>5}{'/s':>7}", "head")]]
    for row in of.unions[:most]:
        over = pool is not None and row.largest > pool
        lines.append(
            [
                (f"  seq {row.seq:<10}", ""),
                (f"{experts(row.p50):>5}{experts(row.p99):>5}", ""),
                (f"{experts(row.largest):>5}", "bad" if over else ""),
                ("!" if over else " ", "bad"),
                (f"{number(known(row.calls)):>6}", ""),
            ]
        )
    if not of.unions:
        lines.append([("  - idle", "dim")])
    lines += [[] for _ in range(most + 1 - len(lines))]
    notes: Line = []
    if more := len(of.unions) - most:
        notes.append((f"  +{more} lengths" if more > 0 else "", "dim"))
    if known(of.overflows):
        notes.append((f"  ! {percent(known(of.overflows))}% of calls above", "bad"))
    return [*lines, notes]


def experts(size_: int) -> str:
    """A union's size: exact to 64, then the bucket's upper bound."""
    if size_ >= ABOVE:
        return f">{ABOVE - 1}"
    return str(size_) if size_ <= 64 else f"≤{size_}"


def _times(of: PhaseFrame) -> list[Line]:
    """Prefetch stages and promote's steps as shares of the wall time."""
    head: Line = [(f"{'% of wall':<13}" + "".join(f"{name:>8}" for name in of.prefetch), "head")]
    if reason := why(list(of.prefetch.values())):
        stages: Line = [("prefetch  ", ""), (f"- {reason.value}", "dim")]
    else:
        stages = [(f"{'prefetch':<13}" + "".join(f"{percent(known(value)):>8}" for value in of.prefetch.values()), "")]
    if reason := why(list(of.promote.values())):
        steps: Line = [("promote   ", ""), (f"- {reason.value}", "dim")]
    else:
        steps = [("promote " + " ".join(f"{name} {percent(known(value))}" for name, value in of.promote.items()), "")]
    return [head, stages, steps]


def _reads(of: PhaseFrame) -> list[Line]:
    head: Line = [(f"{'read':<10}{'MB/s':>8}{'/s':>8}{'mean ms':>10}", "head")]
    lines = [head]
    for row in of.reads:
        if reason := why((row.bytes, row.count)):
            lines.append([(f"  {row.source:<9}", ""), (f"- {reason.value}", "dim")])
            continue
        volume, mean = known(row.bytes), known(row.mean_seconds)
        lines.append(
            [
                (f"  {row.source:<8}", ""),
                (f"{number(None if volume is None else volume / 1e6):>8}{number(known(row.count)):>8}", ""),
                (f"{number(None if mean is None else mean * 1e3):>10}", ""),
            ]
        )
    return lines


def _stalls(of: PhaseFrame) -> Line:
    stall = known(of.stall)
    return [
        ("stall ", ""),
        figure(of.stall, "" if stall is None else f"{number(stall * 1e3)} ms/tok"),
        ("  evict ", ""),
        figure(of.evictions, f"{number(known(of.evictions))}/s"),
    ]


def memory(found: Frame) -> Line:
    """Memory, which belongs to no phase."""
    mlx = {key: found.memory[key] for key in ("active", "cache", "peak", "limit")}
    line: Line = [("MLX ", "")]
    if reason := why((mlx["active"], mlx["cache"])):
        line.append((f"memory - {reason.value}", "dim"))
    else:
        line.append((" ".join(f"{key} {_size(value)}" for key, value in mlx.items()), ""))
    return [*line, (" process ", ""), figure(found.memory["process"], _size(found.memory["process"]))]


def drafts(found: Frame) -> Line:
    """Share of the draft tokens that verification accepted."""
    return [("drafts accepted ", ""), figure(found.accepted, f"{percent(known(found.accepted))}%")]


def _size(value: Figure) -> str:
    return f"- {value.value}" if isinstance(value, Absent) else size(value)
