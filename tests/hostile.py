"""Objects that no hook should ever be given: each makes one, fresh, from a random number generator."""

from __future__ import annotations

import enum
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from random import Random
from types import MethodType
from typing import Any

import mlx.core as mx
import numpy as np

from moe_telemetry.hooks import Phase
from moe_telemetry.values import Refused

Make = Callable[[Random], Any]

DUNDERS = (
    *("__len__", "__hash__", "__eq__", "__iter__", "__next__", "__contains__", "__getitem__", "__bool__"),
    *("__float__", "__int__", "__index__", "__trunc__", "__lt__", "__le__", "__gt__", "__ge__", "__ne__"),
    *("__add__", "__radd__", "__sub__", "__and__", "__rand__", "__rsub__", "__str__", "__repr__", "__format__"),
    *("__hash__", "__eq__", "__iter__", "__bool__", "__len__", "__float__", "__int__", "__contains__"),
    *("__length_hint__", "__array__", "__getattr__", "__call__", "__enter__", "__exit__", "__reduce__"),
)
ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, IndexError, StopIteration, OverflowError, ZeroDivisionError),
    *(RuntimeError, RecursionError, MemoryError, OSError, NotImplementedError, UnicodeError, Exception),
)
PASSING = (KeyboardInterrupt, SystemExit)


def error(rng: Random) -> type[BaseException]:
    """One that a caller's code raises; now and then one that ends the program."""
    return rng.choice(ERRORS) if rng.random() < 0.97 else rng.choice(PASSING)


def raising(dunder: str, error: type[BaseException], base: type = object, *args: Any) -> Any:
    """An object of which one special method raises."""

    def method(*_: Any, **__: Any) -> Any:
        raise error("hostile")

    return type("Raising", (base,), {dunder: method, "__slots__": ()} if base is object else {dunder: method})(*args)


def answering(dunder: str, answer: Any, base: type = object, *args: Any) -> Any:
    """An object of which one special method answers as told."""
    return type("Answering", (base,), {dunder: lambda *_, **__: answer})(*args)


def _lying(kind: type) -> Any:
    """An object that says it is of a type that it is not, and never ends."""

    class Lying:
        __class__ = kind  # type: ignore[assignment]

        def __iter__(self) -> Iterator[int]:
            return itertools.count()

        def __hash__(self) -> int:
            return hash(3)

        def __eq__(self, _: object) -> bool:
            return True

    return Lying()


class _NoClass:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise ValueError("no class")


class _Endless:
    """A sequence by the old protocol, without an end."""

    def __getitem__(self, index: int) -> int:
        return index


class _Fickle:
    """Hashes alike and equals every second time."""

    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = 0

    def __hash__(self) -> int:
        return 7

    def __eq__(self, _: object) -> bool:
        self.asked += 1
        return self.asked % 2 == 0


_FICKLE = [_Fickle() for _ in range(5)]


def _fickle(rng: Random) -> set[_Fickle]:
    """Several such sets share items."""
    return set(rng.sample(_FICKLE, rng.randrange(1, 6)))


class _Growing(set):
    """A set that grows when it is looked at."""

    def __len__(self) -> int:
        self.add(set.__len__(self))
        return set.__len__(self)

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class _Mutating:
    """An item that changes the set that it is in whenever it is compared."""

    def __init__(self, home: set[Any]) -> None:
        self.home = home

    def __hash__(self) -> int:
        return 1

    def __eq__(self, _: object) -> bool:
        self.home.add(len(self.home) + 100)
        if len(self.home) > 50:
            self.home.clear()
        return False


def _mutating(_: Random) -> set[Any]:
    home: set[Any] = {1, 2, 3}
    home.add(_Mutating(home))
    return home


def _failing(rng: Random) -> Iterator[int]:
    def items() -> Iterator[int]:
        yield from range(rng.randrange(4))
        raise error(rng)("in the middle")

    return items()


def _refusing(rng: Random) -> Iterator[int]:
    """Raises the exception that values uses itself, with a reason that is none."""

    def items() -> Iterator[int]:
        raise Refused(rng.choice(["no such reason", [], None]))  # type: ignore[arg-type]
        yield 1

    return items()


class _Strange(enum.Enum):
    LIST = [1]  # noqa: RUF012
    NAN = math.nan
    DECODE = "decode"
    NONE = None


class _Meta(type):
    @property
    def __mro__(cls) -> Any:
        raise ValueError("no mro")

    def __instancecheck__(cls, _: object) -> bool:
        raise ValueError("no instances")


class _OfMeta(metaclass=_Meta):
    __module__ = 5  # type: ignore[assignment]


class _BadText(str):
    def isascii(self) -> bool:
        return True

    def isdigit(self) -> bool:
        return True

    def removeprefix(self, _: str) -> str:
        return self

    def __len__(self) -> int:
        return 1


class _BadNumber(int):
    def __int__(self) -> int:
        return -5

    def __lt__(self, _: object) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __index__(self) -> int:
        return 10**30


class _BadFloat(float):
    def __float__(self) -> float:
        return math.nan

    def __le__(self, _: object) -> bool:
        return True

    __ge__ = __le__


def _nested(rng: Random) -> Any:
    inner: Any = []
    inner.append(inner)
    for _ in range(rng.randrange(40)):
        inner = rng.choice([list, tuple, lambda x: {1: x}, iter])([inner])
    return inner


def _nameless(_: Random) -> Any:
    """A bound method without a name."""
    return MethodType(_NoName(), object())


class _NoName:
    def __call__(self, *_: Any) -> None:
        raise ValueError("called")

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)


def _dead_proxy(_: Random) -> Any:
    return weakref.proxy(Random())


def _text(rng: Random) -> str:
    return rng.choice(
        ["", "0", "-1", "3", " 3", "٣", "1e3", "decode", "submit", "\ud800", "\0", "x" * 5000, "9" * 5000]
    )


def _numpy(rng: Random) -> Any:
    kinds = ["u1", "i4", "i8", "f2", "f4", "f8", "g", "c16", "?", "O", "U3", "M8[s]", "m8[s]", "i4,f8"]
    array = np.zeros(rng.choice([(), (0,), (1,), (3,), (2, 2), (70_000,)]), dtype=rng.choice(kinds))
    if rng.random() < 0.3:
        return np.ma.masked_array(array)
    return array if rng.random() < 0.6 else array.reshape(-1)[0] if array.size else array


def _mlx(rng: Random) -> Any:
    kind = rng.choice([mx.int32, mx.uint8, mx.float32, mx.bfloat16, mx.bool_])
    array = mx.zeros(rng.choice([(), (0,), (1,), (3,), (2, 2)]), dtype=kind)
    return array if rng.random() < 0.5 else rng.choice([[array], (array,), {"a": array}, {array}, iter([array])])


def _number(rng: Random) -> Any:
    return rng.choice(
        [
            *(0, 1, -1, 2**31, 2**53, 2**53 + 1, 2**63, 10**400, -(10**400), True, False, 0.0, -0.0, 1.5, 1e-320),
            *(1e308, 1e9, 1e10, math.nan, math.inf, -math.inf, Decimal(3), Decimal("NaN"), Fraction(1, 3), 3j),
            *(Fraction(10**400), Fraction(10**400, 7), np.float16(1), np.int8(-1), np.uint64(2**64 - 1)),
            *(np.longdouble("1e4000"), np.float32("nan"), _BadNumber(3), _BadFloat(0.5)),
        ]
    )


def _container(rng: Random) -> Any:
    items = [_number(rng) if rng.random() < 0.3 else rng.randrange(6) for _ in range(rng.randrange(5))]
    kind = rng.choice([list, tuple, set, frozenset, iter, dict.fromkeys, lambda x: dict.fromkeys(x).keys(), np.array])
    try:
        return kind(items)
    except (TypeError, ValueError, OverflowError):
        return items


MAKERS: tuple[Make, ...] = (
    lambda _: None,
    _number,
    _number,
    _text,
    lambda rng: bytes(rng.randrange(3)),
    _container,
    _container,
    _numpy,
    _mlx,
    _nested,
    _failing,
    _refusing,
    _mutating,
    _nameless,
    _dead_proxy,
    lambda rng: raising(rng.choice(DUNDERS), error(rng)),
    lambda rng: raising(rng.choice(DUNDERS), error(rng), int, 3),
    lambda rng: raising(rng.choice(DUNDERS), error(rng), float, 0.5),
    lambda rng: raising(rng.choice(DUNDERS), error(rng), str, "decode"),
    lambda rng: raising(rng.choice(DUNDERS), error(rng), set, (1, 2)),
    lambda rng: raising(rng.choice(DUNDERS), error(rng), list, (1, 2)),
    lambda rng: raising(rng.choice(DUNDERS), error(rng), dict, ((1, 2),)),
    lambda rng: answering(rng.choice(DUNDERS), rng.choice([None, -1, 2**70, "x", math.nan, True, [], NotImplemented])),
    lambda rng: answering(rng.choice(DUNDERS), rng.choice([None, -1, 2**70, "x", math.nan, True, []]), int, 3),
    lambda rng: answering(rng.choice(DUNDERS), rng.choice([None, -1, 2**70, "x", math.nan, True, []]), float, 0.5),
    lambda rng: answering(rng.choice(DUNDERS), rng.choice([None, -1, 2**70, "x", math.nan, True, []]), str, "submit"),
    lambda rng: _lying(rng.choice([set, frozenset, int, float, str, list, bool, dict, enum.Enum, Phase, type])),
    lambda _: _NoClass(),
    lambda _: _OfMeta(),
    lambda _: _Endless(),
    lambda _: itertools.count(),
    lambda _: itertools.repeat(7),
    lambda _: range(10**12),
    lambda _: iter(int, 1),
    lambda _: _Growing({1}),
    _fickle,
    _fickle,
    lambda rng: [_Fickle() for _ in range(rng.randrange(1, 5))],
    lambda rng: rng.choice(list(_Strange)),
    lambda rng: rng.choice([Phase.DECODE, Phase.PREFILL, Phase]),
    lambda rng: _BadText(rng.choice(["-1", "abc", "10" * 50])),
    lambda rng: rng.choice([object(), object, len, threading.Lock(), math, NotImplemented, ..., memoryview(b"ab")]),
)


def anything(rng: Random) -> Any:
    """One of them."""
    return rng.choice(MAKERS)(rng)
