"""What pools of other policies would have hit on the routing of a trace: LRU, LFU, and the most that any could.

All are pools that read on demand, and meet a pass as the one of the pool curve does (reuse.py): the experts that a
layer needs are looked up first, all of them, then what is missing is loaded. Behind the pass the pool holds them, and
of those that it held before as many as there is room for; where they are more than it has slots, it holds as many of
them and no others. A policy is the choice of who stays, and here a rank: those of the highest do.

- LRU: the last use. Within a pass who was used more recently before stays ahead, and new ones are last, by id.
- LFU: the uses in the whole past, in the pool or out of it; of equals the one that LRU keeps.
- Optimum of a phase: the next use, the sooner the higher, if that is in the phase. One whose next use is in the other
  phase is of no value: its hit there counts nothing, and it is in the pool afterwards in any case. No choice has more
  hits in that phase (Belady's, by exchange: keep the sooner instead of the later, and behind the sooner one's use the
  pools can be made equal, with a hit more). No one policy reaches both phases' optimum.

As with LRU, pools of all sizes nest, the smaller in the larger, whatever the ranks (Mattson's stack): in one order of
the experts the first n are those of the pool of n slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heapify, heappop, heappushpop
from itertools import repeat

from .catalog import PHASES
from .reuse import MAX_EXPERTS, Curve, LayerStack, PoolCurves, curve_of
from .trace_reader import LayerCalls

NEVER = 1 << 40
"""More calls than a trace has."""
UNUSED = 1 << 62


def lru(calls: LayerCalls) -> list[Curve]:
    """The curve of each phase, in the order of PHASES, as the live one is made."""
    stack = LayerStack(PoolCurves("all"), 0)
    feeds = [stack.feeds[phase] for phase in PHASES]
    ids = calls.ids.__getitem__
    for phase, experts in calls.calls():
        stack.take(feeds[phase], [*map(ids, experts)])
    return [curve_of(feed) for feed in feeds]


def lfu(calls: LayerCalls) -> list[Curve]:
    """The same of LFU pools."""
    last = recency(calls)
    above = max(last, default=0) + 1
    uses = [0] * len(calls.ids)
    ranks = array("q")
    for expert, at in zip(calls.experts, last, strict=True):
        uses[expert] += 1
        ranks.append(uses[expert] * above + at)
    return ranked(calls, ranks)


def optimum(calls: LayerCalls) -> list[Curve]:
    """The most hits that pools can have, in each phase for itself."""
    return [
        ranked(calls, next_uses(calls, phase))[phase] if phase in calls.phases else Curve(0, ())
        for phase in range(len(PHASES))
    ]


def recency(calls: LayerCalls) -> array[int]:
    """A number for each use, higher for a later one; within a call in LRU's order."""
    ids = calls.ids
    last = [0] * len(ids)
    for place, expert in enumerate(sorted(range(len(ids)), key=ids.__getitem__)):
        last[expert] = -1 - place  # new ones by id, behind all that were used
    found = array("q")
    for number, (_, experts) in enumerate(calls.calls()):
        at = number * MAX_EXPERTS
        for place, expert in enumerate(sorted(experts, key=last.__getitem__)):
            last[expert] = at + place
        found.extend([last[expert] for expert in experts])
    return found


def next_uses(calls: LayerCalls, phase: int) -> array[int]:
    """For each use how soon the expert's next one is, higher for sooner; lowest where that is in another phase."""
    found = array("q", bytes(8 * len(calls.experts)))
    upcoming = [-NEVER] * len(calls.ids)
    end = len(calls.experts)
    for number in range(len(calls.ends) - 1, -1, -1):
        begin = calls.ends[number - 1] if number else 0
        value = -number if calls.phases[number] == phase else -NEVER
        for at in range(begin, end):
            expert = calls.experts[at]
            found[at] = upcoming[expert]
            upcoming[expert] = value
        end = begin
    return found


def ranked(calls: LayerCalls, ranks: Sequence[int]) -> list[Curve]:
    """Curves of pools that keep those of the highest rank; an expert's is that of its last use."""
    distances = [[0] * len(calls.ids) for _ in PHASES]
    lookups = [0] * len(PHASES)
    order: list[int] = []
    keys = [UNUSED] * len(calls.ids)  # of its own for each expert, and the lower, the higher it ranks
    begin = 0
    for phase, experts in calls.calls():
        number = len(experts)
        lookups[phase] += number
        depths = sorted([order.index(key) for expert in experts if (key := keys[expert]) != UNUSED])
        for depth in depths:
            distances[phase][depth] += 1
        found = [
            expert - rank * MAX_EXPERTS for expert, rank in zip(experts, ranks[begin : begin + number], strict=True)
        ]
        for expert, key in zip(experts, found, strict=True):
            keys[expert] = key
        begin += number
        order = [*sorted(found), *_others(order, depths, number)]
    return [Curve(*found) for found in zip(lookups, map(tuple, distances), strict=True)]


def _others(order: list[int], depths: list[int], number: int) -> list[int]:
    """The order of those that a call of so many experts does not need, behind it; `depths` are of those it does.

    A pool that has slots for all whom the call needs keeps as many others as it has slots left, and the pool of one
    slot more these and one more. So at each depth comes the best of those that had no room so far, who are as many as
    needed ones lie deeper.
    """
    out = [key for depth, key in enumerate(order[:number]) if depth not in depths]
    heapify(out)
    kept: list[int] = []
    begin = number
    for depth in depths:
        if depth >= number:
            kept.extend(map(heappushpop, repeat(out), order[begin:depth]))
            kept.append(heappop(out))
            begin = depth + 1
    if len(depths) == number:
        return kept + order[begin:]
    kept.extend(map(heappushpop, repeat(out), order[begin:]))
    return kept + sorted(out)
