"""The hooks of host durations, made from one text: the search for a duration's bucket must stand in the hook itself.

A layer of a streaming runtime has nine of these durations in each pass. With a check of the range and a call of
`bisect` such a hook takes 1.8 times as long, and a function of ours would cost more than that call. So the search is
written out, as comparisons with constants: the range needs a check in the first and the last bucket only, and each
bucket is a slot of the cell, named in the increment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from . import values
from .catalog import HOST_BOUNDS
from .cells import BUCKET
from .losses import lose
from .values import MAX_SECONDS

USUAL = (8e-6, 1e-3)
"""Seconds between which most durations of a host's segments are: their buckets take fewer comparisons."""
USUAL_WEIGHT = 8

TEXT = """
def {name}(self: Any, {arguments}) -> None:
    try:
        cell = {cell}
        if type(seconds) is not float:
            seconds = values.seconds(seconds)
{search}
        cell.sum += seconds
    except Exception as error:
        lose(self, "{name}", error)
"""


def source(name: str, label: str | None = None) -> str:
    """The text of a hook, by its name and the name of its label, if it has one."""
    return TEXT.format(
        name=name,
        arguments="seconds: Any" if label is None else f"{label}: Any, seconds: Any",
        cell=f"self._row.{name}" if label is None else f"self._row.{name}[{label}]",
        search="\n".join(_search(0, len(HOST_BOUNDS), " " * 8)),
    )


def duration_hook(name: str, label: str | None = None) -> Callable[..., None]:
    """A method that records seconds in `self._row`'s cell of its name and label."""
    names: dict[str, Any] = {"Any": Any, "lose": lose, "values": values}
    exec(compile(source(name, label), f"<moe_telemetry {name}>", "exec"), names)
    made: Callable[..., None] = names[name]
    made.__module__, made.__qualname__ = __name__, f"LiveRecorder.{name}"
    return made


def _search(first: int, last: int, indent: str) -> list[str]:
    """Comparisons that find one of the buckets `first` to `last`. A bound belongs to its bucket."""
    if first == last:
        return _found(first, indent)
    middle = _middle(first, last)
    return [
        f"{indent}if seconds <= {HOST_BOUNDS[middle]!r}:",
        *_search(first, middle, indent + "    "),
        f"{indent}else:",
        *_search(middle + 1, last, indent + "    "),
    ]


def _found(bucket: int, indent: str) -> list[str]:
    # Only here can a duration be out of range: below all bounds; or above them, as NaN is that is below none.
    valid = {0: "0.0 <= seconds", len(HOST_BOUNDS): f"seconds <= {MAX_SECONDS!r}"}.get(bucket)
    check = [] if valid is None else [f"{indent}if not {valid}:", f"{indent}    values.seconds(seconds)  # refuses it"]
    return [*check, f"{indent}cell.{BUCKET[bucket]} += 1"]


def _middle(first: int, last: int) -> int:
    """The last bucket of the first half, by weight."""
    weights = [USUAL_WEIGHT if _is_usual(bucket) else 1 for bucket in range(first, last + 1)]
    sums = [sum(weights[:number]) for number in range(1, len(weights))]
    return first + min(range(len(sums)), key=lambda at: abs(2 * sums[at] - sum(weights)))


def _is_usual(bucket: int) -> bool:
    low, high = (bisect_left(HOST_BOUNDS, seconds) for seconds in USUAL)
    return low < bucket <= high
