"""`top --once`: one frame as plain text, from two scrapes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from moe_telemetry.client import TIMEOUT_SECONDS, ClientError

from . import panes, pool_lines, pools
from .layers import ORDERS, LayerRow, ordered
from .poller import Outcome, Read, attempt
from .scrape import Reader
from .watched import Watched
from .words import Line, beside, percent, plain

PATIENCE_SECONDS = 4 * TIMEOUT_SECONDS + 5
"""For both scrapes of an endpoint besides the interval: a resolver has no timeout of ours."""
WORST_LAYERS = 4
_WORST = next(order for order in ORDERS if order.name == "hit")


def watch_once(
    bases: Sequence[str],
    interval: float,
    reader: Callable[[str], Read] = Reader,
    ask: Callable[[str], pools.Sized] = pools.ask,
) -> list[Watched]:
    """Each endpoint after two scrapes `interval` seconds apart and its snapshot, or with the failure of one."""
    watched = [Watched(base) for base in bases]
    threads = [
        threading.Thread(target=_twice, args=(each, interval, reader(each.url), ask), daemon=True) for each in watched
    ]
    until = time.monotonic() + interval + PATIENCE_SECONDS
    for thread in threads:
        thread.start()
    for thread, each in zip(threads, watched, strict=True):
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            each.fail("no answer", time.monotonic())
    return watched


def _twice(watched: Watched, interval: float, read: Read, ask: Callable[[str], pools.Sized]) -> None:
    begin = time.monotonic()
    for last in (False, True):
        outcome: Outcome = attempt(read)
        if isinstance(outcome, ClientError):
            watched.fail(str(outcome), time.monotonic())
            return
        watched.take(outcome)
        if not last:
            time.sleep(max(0.0, begin + interval - time.monotonic()))
    sized = attempt(partial(ask, watched.url))
    if isinstance(sized, ClientError):
        watched.size_failure = str(sized)
    else:
        watched.take_size(sized, time.monotonic())


def text(watched: Watched, now: float) -> list[str]:
    """The frame of one endpoint, in at most 80 columns but for the names that it sent."""
    lines: list[Line] = [[(panes.identity(watched), "")], [panes.status(watched, now)]]
    found = watched.frame
    if found is not None:
        left, right = (_phase(watched, phase) for phase in ("decode", "prefill"))
        lines += beside(left, right, panes.PANE_WIDTH)
        lines += [panes.memory(found), panes.drafts(found), [], *pool_lines.lines(watched, now)]
    return [plain(line) for line in lines]


def _phase(watched: Watched, phase: str) -> list[Line]:
    assert watched.frame is not None
    of = watched.frame.phases[phase]
    activity, _ = panes.activity(of, None)
    return [
        [(f"{phase.upper():<9}", ""), (activity, "")],
        *panes.tracked(of),
        *panes.detail(of, watched.frame.pool, union_rows=max(panes.UNION_ROWS, len(of.unions))),
        *_worst(of.layers),
    ]


def _worst(rows: tuple[LayerRow, ...]) -> list[Line]:
    """Layers with the lowest hit rate."""
    found = [row for row in ordered(rows, _WORST) if row.hit is not None][:WORST_LAYERS]
    if not found:
        return [[("layers    - no hit rate", "")]]
    return [
        [("lowest hit rate of a layer:", "")],
        [(" " + " ".join(f"{row.layer}:{percent(row.hit)}" for row in found), "")],
    ]
