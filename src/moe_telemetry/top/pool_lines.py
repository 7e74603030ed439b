"""The pool curve as lines: hit rates by slots with their bars, what the pool itself hits, and what more would cost."""

from __future__ import annotations

from moe_telemetry.pool_size import Found, amount, told_steps

from .frame import Absent
from .history import EIGHTHS
from .panes import PANE_WIDTH
from .watched import Watched
from .words import Line, beside, percent, span

LRU, EARNED, LOST = "█", "▒", "░"
PHASES = ("decode", "prefill")
NONE = (
    "- no curve: no ids of experts came yet (recorder.union() has none), pool_curve",
    "  is off, or only the first layer was routed: one of four is followed, not it",
)


def lines(watched: Watched, now: float, width: int = PANE_WIDTH) -> list[Line]:
    """Decode and prefill side by side, each so wide, and what belongs to both."""
    found, exact = watched.pool_size()
    if found is None:
        return [] if watched.frame is None else [[(words, "dim")] for words in NONE]
    most = max(len(_rates(of, found["capacity"])) for of in found["phases"].values())
    left, right = (_phase(found, phase, exact, width, most) for phase in PHASES)
    return [*beside(left, right, width), *_both(found), _source(watched, now)]


def _phase(found: Found, phase: str, exact: bool, width: int, most: int) -> list[Line]:
    """A phase with room for so many sizes."""
    of = found["phases"].get(phase)
    if of is None:
        return [[(f"{phase.upper():<9}", "strong"), ("- none yet", "dim")]]
    which = ""
    if exact:
        layers, followed = found["layers"], found["followed"]
        which = f", all {layers} layers" if followed == layers else f", {followed} of {layers} layers"
    head: Line = [(f"{phase.upper():<9}", "strong"), (f"LRU pools{which}", "")]
    bars = _bars(of, found["capacity"], width)
    return [head, *bars, *([] for _ in range(most - len(bars))), *_actual(of, found["capacity"], exact)]


def _rates(of: Found, capacity: int | None) -> dict[int, float]:
    """Hit rates by slots, that of the pool's own size among them where it is known."""
    rates = {int(slots): rate for slots, rate in of["hit_rates"].items()}
    if capacity is not None and of["simulated"] is not None:
        rates.setdefault(capacity, of["simulated"])
    return rates


def _bars(of: Found, capacity: int | None, width: int) -> list[Line]:
    shown = []
    for slots, rate in sorted(_rates(of, capacity).items()):
        own = slots == capacity
        words = f"{'>' if own else ' '}{slots:>4}{percent(rate):>6}%"
        if of["errors"]:
            error = of["errors"].get(str(slots))
            words += f" {'' if error is None else f'±{percent(error)}':<5}"
        line: Line = [(f"{words} ", "strong" if own else "")]
        room = width - len(words) - 1
        if own and of["simulated"] is not None:
            shown.append([*line, *_compared(of["simulated"], of["actual"], room)])
        else:
            shown.append([*line, (bar(rate, room), "hit")])
    return shown


def bar(share: float, width: int) -> str:
    """A bar of so many columns for a share of 1, to an eighth of a column: near its top a curve bends little."""
    full, rest = divmod(_columns(share, width * 8), 8)
    return LRU * full + (EIGHTHS[rest - 1] if rest else "")


def _compared(simulated: float, actual: float, width: int) -> Line:
    """An LRU pool's bar, and what the pool that there is hits more or less."""
    low, high = sorted((_columns(simulated, width), _columns(actual, width)))
    return [(LRU * low, "hit"), ((EARNED if actual > simulated else LOST) * (high - low), "late")]


def _columns(share: float, width: int) -> int:
    """Of so many, those of a share; what is none, as an endpoint may say, is cut to one."""
    return round(min(max(share, 0.0), 1.0) * width)


def _actual(of: Found, capacity: int | None, exact: bool) -> list[Line]:
    """Three lines: the pool that there is, what policy and prefetch earn, the knee."""
    missing = Absent.UNKNOWN if exact else Absent.SNAPSHOT
    lines_: list[Line] = [[("actual   ", "")], [("gain     ", "")], [("knee     ", "")]]
    if of["actual"] is None or capacity is None:
        reason = Absent.NO_POOL if capacity is None else Absent.UNKNOWN
        for line in lines_[:2]:
            line.append((f"- {reason.value}", "dim"))
    else:
        lines_[0].append((f"{percent(of['actual'])}% with {capacity} slots", "strong"))
        gain = of["gain"]
        if gain is None:
            lines_[1].append((f"- {missing.value}", "dim"))
        else:
            words = f" {EARNED} over LRU" if gain > 0 else f" {LOST} under LRU" if gain < 0 else " of LRU"
            lines_[1] += [(f"{100 * gain:+.1f} points", "strong"), (words, "")]
    if of["knee"] is None:
        lines_[2].append((f"- {missing.value}", "dim"))
    else:
        lines_[2].append((f"{of['knee']} slots", "strong"))
    return lines_


def _both(found: Found) -> list[Line]:
    safe: Line = [("safe     ", "")]
    if found["safe"] is None:
        safe.append((f"- {Absent.NONE_YET.value}", "dim"))
    else:
        safe.append((f"{found['safe']} slots at least: the largest union of any pass", ""))
        if found["capacity"] is not None and found["capacity"] < found["safe"]:
            safe.append(("  ! the pool has fewer", "bad"))
    return [safe, *map(_step, told_steps(found))]


def _step(step: Found) -> Line:
    (first, second), (before, behind) = step["slots"], step["hit_rates"]
    cost = "bytes - reads are not recorded" if step["bytes"] is None else f"about {amount(step['bytes'])} more"
    line: Line = [(f"{first} -> {second} slots: decode {percent(before)} -> {percent(behind)}%, ", "")]
    return [*line, (cost, "dim" if step["bytes"] is None else "")]


def _source(watched: Watched, now: float) -> Line:
    """Of when this is, and where there is more."""
    if watched.sized is not None:
        age = span(max(0.0, now - watched.sized_at))
        words = f"the run so far, {age} ago; as text: moe-telemetry report {watched.name}"
    elif watched.size_failure is not None:
        words = f"the run so far, as scraped; its snapshot: {watched.size_failure}"
    else:
        words = "the run so far, as scraped"
    return [(words, "dim")]
