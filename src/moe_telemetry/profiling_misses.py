"""What became of one layer's routed experts, from whatever containers a runtime keeps them in."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

from . import values
from .values import MAX_ITEMS, Refused


class Misses(NamedTuple):
    """Routed experts by outcome; `by_prefetch` are the hits that were predicted and ready."""

    routed: int
    hits: int
    late: int
    evicted: int
    unpredicted: int
    by_prefetch: int


_NOTHING: frozenset[Any] = frozenset()


def attribute(uniq: Any, predicted: Any, resident: Any, ready: Any) -> tuple[Misses, Misses]:
    """Outcomes with each id counted as often as it comes, and with each counted once.

    `uniq`, an iterable, is read once; of `resident`, `predicted` and `ready` whatever they know of `in`.
    """
    items = None
    if type(uniq) is not set:
        items = _items(uniq)
        uniq = set(items)
    absent = uniq - (resident if type(resident) is set else _among(uniq, resident))
    named = _NOTHING if predicted is None else _among(uniq, predicted)
    done = _among(named, ready) if ready is not None and named else _NOTHING
    evicted = len(absent & done) if done else 0
    late = len(absent & named) - evicted if named else 0
    number, misses = len(uniq), len(absent)
    once = Misses(number, number - misses, late, evicted, misses - late - evicted, len(done) - evicted)
    if items is None or len(items) == number:
        return once, once
    lost = [item for item in items if item in absent]
    in_vain = [item for item in lost if item in named]
    over = sum(item in done for item in in_vain)
    late, unpredicted = len(in_vain) - over, len(lost) - len(in_vain)
    return Misses(len(items), len(items) - len(lost), late, over, unpredicted, once.by_prefetch), once


def add_misses(target: dict[str, int], decode: bool, found: Misses) -> None:
    """Add one layer call to MISS_ATTRIB, without its being taken for a write of the runtime's."""
    predicted = found.late + found.evicted
    total = {
        "routed": target["routed"] + found.routed,
        "resident_hit": target["resident_hit"] + found.hits,
        "miss_A_predicted": target["miss_A_predicted"] + predicted,
        "miss_B_unpredicted": target["miss_B_unpredicted"] + found.unpredicted,
        "n": target["n"] + 1,
    }
    if decode:
        total["dec_routed"] = target["dec_routed"] + found.routed
        total["dec_resident_hit"] = target["dec_resident_hit"] + found.hits
        total["dec_miss_A"] = target["dec_miss_A"] + predicted
        total["dec_miss_B"] = target["dec_miss_B"] + found.unpredicted
        total["dec_n"] = target["dec_n"] + 1
        total["dec_miss_A_timing"] = target["dec_miss_A_timing"] + found.late
        total["dec_miss_A_evicted"] = target["dec_miss_A_evicted"] + found.evicted
    dict.update(target, total)


def truth(value: Any) -> bool:
    """A condition that is not a lazy array's."""
    values.refuse_lazy(value)
    return bool(value)


def _items(ids: Any) -> list[Any]:
    """An iterable's items, read once."""
    values.refuse_lazy(ids)
    items = list(islice(iter(ids), MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS and not hasattr(ids, "__len__"):
        raise Refused("too_many", ids)
    for item in items:
        if type(item) is not int:
            values.refuse_lazy(item)
    return items


def _among(ids: Any, container: Any) -> Any:
    """Those of the ids that a container holds."""
    if isinstance(container, (set, frozenset)):
        return ids & container
    values.refuse_lazy(container)
    if hasattr(container, "__contains__"):
        return {item for item in ids if item in container}
    return ids & set(_items(container))
