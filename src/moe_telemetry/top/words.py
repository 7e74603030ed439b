"""Numbers as people read them, and lines of styled words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from moe_telemetry.terminal import printable

from .frame import Absent, Figure

Span = tuple[str, str]
"""Words and the name of their style ("" for none): a style only repeats what the words say."""
Line = list[Span]


def plain(line: Line) -> str:
    """A line without its styles."""
    return printable("".join(words for words, _ in line)).rstrip()


def percent(value: float | None) -> str:
    """A share of 1 in percent, in at most 5 characters: 84.2, 100, 312."""
    if value is None:
        return "-"
    text = f"{value * 100:.1f}"
    return text if len(text) < 5 else f"{value * 100:.0f}"


def number(value: float | None) -> str:
    """Three digits that count, in at most 6 characters to a million."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    for limit, form in ((9.995, "{:.2f}"), (99.95, "{:.1f}")):
        if abs(value) < limit:
            return form.format(value)
    return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"


def size(count: float) -> str:
    """Bytes in powers of ten: 1.45 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{number(count) if unit != 'B' else f'{count:.0f}'} {unit}"
        count /= 1000
    return f"{number(count)} TB"


def span(seconds: float) -> str:
    """A time: 0.4 s, 12 s, 3m05s, 2h10m, 3d04h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for big, small, size_of, of in (("d", "h", 86_400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size_of:
            return f"{whole // size_of}{big}{whole % size_of // of:02d}{small}"
    return f"{whole} s"


def figure(value: Figure, text: str) -> Span:
    """A figure in the form that `text` has been given, or "-" with the word why there is none."""
    return (f"- {value.value}", "dim") if isinstance(value, Absent) else (text, "")


def known(value: Figure) -> float | None:
    """The number, or None."""
    return None if isinstance(value, Absent) else value


def why(values: Sequence[Figure]) -> Absent | None:
    """The reason why there is none of these figures; None where there is any."""
    reasons = [value for value in values if isinstance(value, Absent)]
    return reasons[0] if len(reasons) == len(values) and reasons else None


def beside(left: list[Line], right: list[Line], width: int, between: str = " │ ") -> list[Line]:
    """Two blocks side by side, the left one padded to `width`."""
    rows = []
    for first, second in zip_longest(left, right, fillvalue=()):
        pad = " " * max(0, width - len("".join(words for words, _ in first)))
        rows.append([*first, (pad + between, "dim"), *second])
    return rows
