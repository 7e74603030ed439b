"""What a hook was given, turned into Python numbers and sets, or refused with a reason (docs/cases.md, C06 and C07).

Never evaluates a lazy array: MLX streams belong to threads, and one lazy value in a cell makes every later
scrape fail. Everything here runs on the calling thread and off the fast path.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import islice
from numbers import Integral, Real
from typing import Any

MAX_ITEMS = 65_536
"""Items read of an iterable that is not a set, list, tuple or array: a generator may never end."""
MAX_COUNT = 2**53
"""Largest single count: above it a float, and so a Prometheus sample, is no longer exact."""
MAX_SECONDS = 1e9
MAX_LAYER = 999_999

IdSet = set[int] | frozenset[int]


class Refused(Exception):
    """A record that telemetry does not take; `reason` is one of the catalog's LOST_REASONS."""

    def __init__(self, reason: str, value: object = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = type(value).__name__


def _is_lazy(value: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "mlx" for kind in type(value).__mro__)


def refuse_lazy(value: object) -> None:
    """Refuse an array whose reading would evaluate it."""
    if _is_lazy(value):
        raise Refused("lazy_array", value)


def seconds(value: Any) -> float:
    """A duration as a float, from 0 to MAX_SECONDS."""
    if type(value) is float and 0.0 <= value <= MAX_SECONDS:
        return value
    return float(_number(value, MAX_SECONDS))


def amount(value: Any) -> int | float:
    """A counter's absolute value, from 0 to MAX_COUNT: a whole number comes back as an int."""
    number = _number(value, MAX_COUNT)
    return int(number) if number == int(number) else number


def count(value: Any) -> int:
    """A count as an int, from 0 to MAX_COUNT; whole floats such as np.float16(1) are taken."""
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return value
    return _whole(_number(value, MAX_COUNT), value)


def _number(value: Any, most: float) -> int | float:
    """The value as a Python number, finite, from 0 to `most`."""
    number = _finite(value)
    if number < 0:
        raise Refused("negative", value)
    if number > most:
        raise Refused("out_of_range", value)
    return number


def _finite(value: Any) -> int | float:
    # bool is an Integral by inheritance only: True among seconds is a mistake in the caller's code.
    if not isinstance(value, Real) or isinstance(value, bool):
        raise Refused("lazy_array" if _is_lazy(value) else "not_a_number", value)
    if getattr(getattr(value, "dtype", None), "kind", "") == "m":  # a NumPy duration: an Integral, of unknown unit
        raise Refused("not_a_number", value)
    if isinstance(value, Integral):
        return int(value)
    try:
        number = float(value)
    except OverflowError:  # a Fraction
        raise Refused("out_of_range", value) from None
    if not math.isfinite(number):
        raise Refused("not_finite", value)
    return number


def _whole(number: int | float, value: Any) -> int:
    if number != int(number):
        raise Refused("not_integer", value)
    return int(number)


def layer_index(value: Any) -> int:
    """A layer as an int, -1 for None and every negative number; a decimal string is taken (C26)."""
    if value is None:
        return -1
    if isinstance(value, str):
        if not (value.isascii() and value.removeprefix("-").isdigit() and len(value) < 8):
            raise Refused("unknown_label", value)
        value = int(value)
    index = _whole(_finite(value), value)
    if index > MAX_LAYER:
        raise Refused("out_of_range", value)
    return max(index, -1)


def ids(value: Any) -> IdSet:
    """Expert ids as a set of our own. The items of a set are taken unread; of anything else each one is checked.

    Lists, tuples and NumPy integer arrays of any shape are read whole, other iterables up to MAX_ITEMS items.
    """
    if issubclass(type(value), (set, frozenset)):  # not isinstance: what says that it is a set may never end
        return frozenset(value)  # one read: a set may change meanwhile, and a subclass may answer as it likes
    if _is_lazy(value):
        raise Refused("lazy_array", value)
    if isinstance(value, (str, bytes, bytearray, memoryview)):  # iterable, but a mistake in the caller's code
        raise Refused("not_a_number", value)
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        if value.dtype.kind not in "iu":
            raise Refused("not_a_number", value)
        return set(value.ravel().tolist())
    return _checked(value)


def _checked(value: Iterable[Any]) -> IdSet:
    if type(value) is list or type(value) is tuple:
        items: Collection[Any] = value
    else:
        try:
            iterator = iter(value)
        except TypeError:
            raise Refused("not_a_number", value) from None
        items = list(islice(iterator, MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise Refused("too_many", value)
    try:
        found = set(items)
    except TypeError:  # unhashable: a list of lists, say
        raise Refused("not_a_number", value) from None
    if all(type(item) is int for item in found):
        return found
    return {_whole(_finite(item), item) for item in found}
