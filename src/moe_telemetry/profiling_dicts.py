"""The drop-in's shared dicts: plain ones, and what they become while telemetry runs.

Each dict is an instance of Plain, which overrides nothing that a runtime uses. Attaching telemetry changes its class
to a live one of the same layout, detaching changes it back, as with the recorder: only then do writes cost more than
a dict's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .profiling_times import Series

_get = dict.get
_getitem = dict.__getitem__
_set = dict.__setitem__

Changed = Callable[[Any, Any, Any], None]
"""Told of a write: key, the value before (0 where there was none), the value now. Raises no Exception."""


class Plain(dict[str, Any]):
    """A dict, copied and pickled as one."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)


def watched(changed: Changed) -> type[Plain]:
    """The class of a dict of counts: its writes are reported, its values are in place."""

    class Watched(Plain):
        __slots__ = ()

        def __setitem__(self, key: Any, value: Any) -> None:
            before = _get(self, key, 0)
            _set(self, key, value)
            changed(key, before, value)

    _write_item_by_item(Watched)
    return Watched


def timed(series: Mapping[str, Series], changed: Changed, touched: Callable[[Series], None]) -> type[Plain]:
    """The class of a dict of seconds: `series` by key hold what is not in the dict yet, and take what is written.

    A series is `touched` when a write has left many values in it.
    """
    find = series.get

    class Timed(Plain):
        __slots__ = ()

        def __getitem__(self, key: Any) -> Any:
            found = find(key)
            if found is not None and found.settled != len(found.values):
                found.settle()
            return _getitem(self, key)

        def __setitem__(self, key: Any, value: Any) -> None:
            found = find(key)
            if found is None or found.key != key:
                if found is not None:
                    found.settle()
                before = _get(self, key, 0)
                _set(self, key, value)
                changed(key, before, value)
                return
            if found.settled != len(found.values):
                found.settle()
            before = _get(self, key, 0)
            _set(self, key, value)
            if type(value) is float and type(before) is float:
                value -= before
                if value > 0.0:
                    found.values.append(value)
                    found.settled += 1
                    if found.settled < 2 or found.settled > Series.LIMIT:
                        touched(found)
            else:
                changed(key, before, value)

    def settle(_: dict[str, Any]) -> None:
        for found in set(series.values()):
            found.settle()

    for name in (
        *("__delitem__", "__eq__", "__iter__", "__ne__", "__or__", "__repr__", "__ror__"),
        *("clear", "copy", "get", "items", "pop", "popitem", "values"),
    ):
        setattr(Timed, name, _behind(settle, name))
    _write_item_by_item(Timed)
    return Timed


def _behind(settle: Callable[[dict[str, Any]], None], name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def settled(self: dict[str, Any], *args: Any, **named: Any) -> Any:
        settle(self)
        return method(self, *args, **named)

    settled.__name__ = name
    return settled


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
