"""What pools of other policies would have hit on the routing of a trace: LRU, LFU, and the most that any could.

All are pools that read on demand, and meet a pass as the one of the pool curve does (reuse.py): the experts that a
layer needs are looked up first, all of them, then what is missing is loaded. Behind the pass the pool holds them, and
of those that it held before as many as there is room for; where they are more than it has slots, it holds as many of
them and no others. A policy is the choice of who stays, and here a rank: whoever has the highest.

- LRU: the last use. Within a pass who was used more recently before stays ahead, and new ones are last, by id.
- LFU: the uses in the whole past, in the pool or out of it; of equals the one that LRU keeps.
- Optimum of a phase: the next use, the sooner the higher, if that is in the phase. One whose next use is in the other
  phase is of no value: its hit there counts nothing, and it is in the pool afterwards in any case. No choice has more
  hits in that phase (Belady's, by exchange: keep the sooner instead of the later, and behind the sooner one's use the
  pools can be made equal, with a hit more). No one policy reaches both phases' optimum.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from heapq import nlargest

from .catalog import PHASES
from .reuse import MAX_EXPERTS, Curve, LayerStack, PoolCurves, curve_of
from .trace_reader import LayerCalls

NEVER = 1 << 62

Hits = dict[int, list[int]]
"""By slots, for each phase in the order of PHASES."""


def lru(calls: LayerCalls) -> list[Curve]:
    """The curve of each phase, as the live one is made."""
    stack = LayerStack(PoolCurves("all"), 0)
    feeds = [stack.feeds[phase] for phase in PHASES]
    ids = calls.ids.__getitem__
    for phase, experts in calls.calls():
        stack.take(feeds[phase], [*map(ids, experts)])
    return [curve_of(feed) for feed in feeds]


def lfu(calls: LayerCalls, sizes: Sequence[int]) -> Hits:
    """Hits of LFU pools."""
    last = recency(calls)
    above = max(last, default=0) + 1
    uses = [0] * len(calls.ids)
    ranks = array("q")
    for expert, at in zip(calls.experts, last, strict=True):
        uses[expert] += 1
        ranks.append(uses[expert] * above + at)
    return replay(calls, sizes, ranks)


def optimum(calls: LayerCalls, sizes: Sequence[int]) -> Hits:
    """The most hits that pools can have, in each phase for itself."""
    there = [phase for phase in range(len(PHASES)) if phase in calls.phases]
    found: Hits = {slots: [0] * len(PHASES) for slots in sizes}
    for phase in there:
        for slots, hits in replay(calls, sizes, next_uses(calls, phase)).items():
            found[slots][phase] = hits[phase]
    return found


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


def replay(calls: LayerCalls, sizes: Iterable[int], ranks: Sequence[int]) -> Hits:
    """Hits of pools of so many slots that keep those of the highest rank; an expert's is that of its last use."""
    found: Hits = {slots: [0] * len(PHASES) for slots in sizes}
    pools: list[tuple[int, list[int], set[int]]] = [(slots, hits, set()) for slots, hits in found.items()]
    current = [0] * len(calls.ids)
    rank = current.__getitem__
    begin = 0
    for phase, experts in calls.calls():
        end = begin + len(experts)
        for expert, value in zip(experts, ranks[begin:end], strict=True):
            current[expert] = value
        begin = end
        needed = frozenset(experts)
        number = len(needed)
        for slots, hits, pool in pools:
            if needed <= pool:
                hits[phase] += number
                continue
            held = len(pool)
            pool.difference_update(needed)
            hits[phase] += held - len(pool)
            over = len(pool) + number - slots
            if number >= slots:
                pool.clear()
                pool.update(nlargest(slots, needed, rank))
                continue
            if over == 1:
                pool.remove(min(pool, key=rank))
            elif over > 1:
                pool.difference_update(sorted(pool, key=rank)[:over])
            pool.update(needed)
    return found
