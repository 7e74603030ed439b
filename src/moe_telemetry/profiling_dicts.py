"""The drop-in's shared dicts: plain ones, and what they become while telemetry runs.

Each dict is an instance of Plain, which overrides nothing that a runtime uses. Attaching telemetry changes its class
to a live one of the same layout, detaching changes it back, as with the recorder: only then do reads and writes cost
more than a dict's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .profiling_times import Series

_get = dict.get
_getitem = dict.__getitem__
_set = dict.__setitem__

Changed = Callable[[Any, Any, Any], None]
"""Told of a write: key, the value before (0 where there was none), the value now. Raises no Exception."""


class Unsettled(Protocol):
    """Has something that is not in the dict yet while `raw`, always the same object, is true."""

    @property
    def raw(self) -> object: ...

    def settle(self) -> None:
        """Bring the dict up to date."""


class Plain(dict[str, Any]):
    """A dict, copied and pickled as one."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)


def watched(changed: Changed) -> type[Plain]:
    """The class of a dict whose writes are reported, and whose values are always in place."""

    class Watched(Plain):
        __slots__ = ()

        def __setitem__(self, key: Any, value: Any) -> None:
            before = _get(self, key, 0)
            _set(self, key, value)
            changed(key, before, value)

    _write_item_by_item(Watched)
    return Watched


def settled(
    entries: Mapping[str, Unsettled],
    numbers: Mapping[str, Series],
    changed: Changed,
    touched: Callable[[Series], None],
) -> type[Plain]:
    """The class of a dict that is brought up to date when it is read: `entries` by key may hold what it lacks.

    Rises of `numbers` go into their series at once; one that has got its first value, or many, is `touched`. Numbers
    of other types are reported; where there are no `numbers`, every write is.
    """
    unsettled = {key: entry.raw for key, entry in entries.items()}.get
    find = numbers.get
    all_told = not numbers
    limit = Series.LIMIT

    class Settled(Plain):
        __slots__ = ()

        def __getitem__(self, key: Any) -> Any:
            if unsettled(key):
                entries[key].settle()
            return _getitem(self, key)

        def __setitem__(self, key: Any, value: Any) -> None:
            if unsettled(key):
                entries[key].settle()
            before = _get(self, key, 0)
            _set(self, key, value)
            found = find(key)
            if found is None:
                if all_told:
                    changed(key, before, value)
                return
            kind = type(value)
            if kind is not type(before) or (kind is not float and kind is not int):
                changed(key, before, value)
                return
            value -= before
            if value > 0:
                seen = found.seen
                seen.append(value)
                if not 1 < len(seen) < limit:
                    touched(found)

    def settle(_: dict[str, Any]) -> None:
        for found in set(entries.values()):
            found.settle()

    for name in (
        *("__delitem__", "__eq__", "__iter__", "__ne__", "__or__", "__repr__", "__ror__"),
        *("clear", "copy", "get", "items", "pop", "popitem", "values"),
    ):
        setattr(Settled, name, _behind(settle, name))
    _write_item_by_item(Settled)
    return Settled


def _behind(settle: Callable[[dict[str, Any]], None], name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def read(self: dict[str, Any], *args: Any, **named: Any) -> Any:
        settle(self)
        return method(self, *args, **named)

    read.__name__ = name
    return read


def _write_item_by_item(kind: type[Plain]) -> None:
    """Give the class the writes that a dict would make without asking `__setitem__`."""

    def update(self: Plain, *args: Any, **named: Any) -> None:
        for key, value in dict(*args, **named).items():
            self[key] = value

    def ior(self: Plain, other: Any) -> Plain:
        update(self, other)
        return self

    def setdefault(self: Plain, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    for name, method in (("update", update), ("__ior__", ior), ("setdefault", setdefault)):
        setattr(kind, name, method)
