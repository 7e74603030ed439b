"""The drop-in's `UNION_PROF` and `UNION_SAMPLES`: dicts that are computed from what is counted when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, overload

from .profiling_times import Lose
from .profiling_unions import Sizes, Totals, Unions


class Samples(Sequence[int]):
    """The union sizes of one layer as a sequence, ascending, at the memory of its distinct values.

    A moment's reading: it does not grow with later unions. Equal to any sequence of the same values, in any order.
    """

    __slots__ = ("_length", "_sizes")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = dict(sorted(sizes.items()))
        self._length = sum(sizes.values())

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(size, times) for size, times in self._sizes.items())

    def __reversed__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(size, times) for size, times in reversed(self._sizes.items()))

    def __contains__(self, value: object) -> bool:
        return value in self._sizes

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self._length))]
        at = range(self._length)[index]  # IndexError, and indices from the end
        for size, times in self._sizes.items():
            at -= times
            if at < 0:
                return size
        raise IndexError(index)

    def count(self, value: Any) -> int:
        """How often `value` was seen."""
        return self._sizes.get(value, 0)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Samples):
            return self._sizes == other._sizes
        if not isinstance(other, (list, tuple)):
            return NotImplemented
        return len(other) == self._length and all(self.count(value) == other.count(value) for value in set(other))

    def __add__(self, other: Iterable[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Iterable[int]) -> list[int]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))


def sums(totals: Totals) -> dict[int, list[int]]:
    """UNION_PROF: sum of sizes and layer calls, by sequence length."""
    return {
        seq: [
            sum(size * times for sizes in layers.values() for size, times in sizes.items()),
            sum(times for sizes in layers.values() for times in sizes.values()),
        ]
        for seq, layers in totals.items()
    }


def samples(totals: Totals) -> dict[int, dict[int, Samples]]:
    """UNION_SAMPLES: every size, by sequence length and layer."""
    found = {
        seq: {layer: Samples(sizes) for layer, sizes in layers.items() if layer >= 0} for seq, layers in totals.items()
    }
    return {seq: layers for seq, layers in found.items() if layers}


class View(dict[int, Any]):
    """A dict that is computed when it is read. Entries can be removed; what is put in is dropped, and said so."""

    __slots__ = ("_at", "_gone", "_lose", "_show", "_unions")

    def __init__(self, unions: Unions, show: Callable[[Totals], dict[int, Any]], lose: Lose) -> None:
        super().__init__({0: None})  # never shown; json takes a dict without entries for empty, and does not ask
        self._unions = unions
        self._show = show
        self._lose = lose
        self._gone: Totals = {}  # what was removed here, since the reset of this number
        self._at = unions.resets

    def _totals(self) -> Totals:
        totals = self._unions.totals()
        if self._at != self._unions.resets:
            self._at = self._unions.resets
            self._gone = {}
        for seq, layers in self._gone.items():
            for layer, sizes in layers.items():
                left = totals.setdefault(seq, {}).setdefault(layer, {})
                for size, times in sizes.items():
                    left[size] = left.get(size, 0) - times
        found = {
            seq: {layer: {size: times for size, times in sizes.items() if times > 0} for layer, sizes in layers.items()}
            for seq, layers in totals.items()
        }
        kept = {seq: {layer: sizes for layer, sizes in layers.items() if sizes} for seq, layers in found.items()}
        return {seq: layers for seq, layers in kept.items() if layers}

    def _now(self) -> dict[int, Any]:
        return self._show(self._totals() if self._gone else self._unions.totals())

    def _remove(self, *keys: Any) -> None:
        self._totals()  # forgets what a reset removed
        totals = self._unions.totals()
        for key in keys:
            self._gone[int(key)] = totals[int(key)]

    def clear(self) -> None:
        """Empty this dict; `union_reset` empties both, and frees their memory."""
        self._remove(*self._now())

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove one sequence length, as a dict does."""
        found = self._now()
        if key in found:
            self._remove(key)
        return found.pop(key, *default)

    def popitem(self) -> tuple[int, Any]:
        """Remove the last one."""
        item = self._now().popitem()
        self._remove(item[0])
        return item

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._lose("note_union", TypeError("unions are counted by note_union(), not written to"))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """What is there, or the default, which is not kept."""
        found = self._now()
        if key not in found:
            self[key] = default
        return found.setdefault(key, default)

    def update(self, *args: Any, **named: Any) -> None:
        """Drop what is given."""
        for key, value in dict(*args, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> View:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._now(),)


def _reading(name: str) -> Callable[..., Any]:
    def read(self: View, *args: Any) -> Any:
        return getattr(self._now(), name)(*(arg._now() if isinstance(arg, View) else arg for arg in args))

    read.__name__ = name
    return read


for _name in (
    *("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__", "__repr__", "__reversed__"),
    *("__ror__", "copy", "get", "items", "keys", "values"),
):
    setattr(View, _name, _reading(_name))
