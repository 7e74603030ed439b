"""The last ten minutes of the figures that have a trend on the screen."""

from __future__ import annotations

from collections import deque

from .frame import Frame

HISTORY_SECONDS = 600.0
TRACKED = ("speed", "hit", "recall", "all_hit")
"""Fields of a phase's frame."""
SHARES = frozenset(TRACKED) - {"speed"}
"""Those on a scale of 0 to 1; a speed's scale is its own largest value."""
MOST_POINTS = 6000

Point = dict[tuple[str, str], float]


class History:
    """A ring of frames: when, and the figures by phase and field; what had no figure is a gap, never a 0."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, Point]] = deque(maxlen=MOST_POINTS)

    def add(self, at: float, frame: Frame) -> None:
        """Take a frame's figures at that time (monotonic seconds), and forget what is too old."""
        point = {
            (phase, field): value
            for phase, of in frame.phases.items()
            for field in TRACKED
            if isinstance(value := getattr(of, field), (int, float))
        }
        self._points.append((at, point))
        while self._points[0][0] < at - HISTORY_SECONDS:
            self._points.popleft()

    def copy(self) -> History:
        """Another ring with the same points."""
        found = History()
        found._points.extend(self._points)
        return found

    def __len__(self) -> int:
        return len(self._points)

    def columns(self, phase: str, field: str, now: float, width: int) -> list[float | None]:
        """The ten minutes that end now in so many columns of the same time: the mean of each, None where none was."""
        sums = [0.0] * width
        counts = [0] * width
        for at, point in self._points:
            value = point.get((phase, field))
            column = int((at - now + HISTORY_SECONDS) / HISTORY_SECONDS * width)
            if value is not None and width and 0 <= column <= width:
                column = min(column, width - 1)  # the frame of this moment
                sums[column] += value
                counts[column] += 1
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


BARS = "▁▂▃▄▅▆▇█"
EIGHTHS = "▏▎▍▌▋▊▉"
"""Of a column, from one to seven."""


def bars(columns: list[float | None], top: float | None = None) -> str:
    """A line of bars from 0 to `top`, or to the largest value; a gap is a space."""
    largest = top or max((value for value in columns if value is not None), default=0.0)
    return "".join(" " if value is None else _bar(value, largest) for value in columns)


def _bar(value: float, top: float) -> str:
    level = int(value / top * len(BARS)) if top > 0 else 0
    return BARS[max(0, min(level, len(BARS) - 1))]
