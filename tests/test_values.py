"""What hooks are given, as Python numbers and sets or refused with a reason (cases C06, C07, C13, C26)."""

from __future__ import annotations

import math
from array import array
from decimal import Decimal
from fractions import Fraction
from itertools import count as endless

import lazies
import mlx.core as mx
import numpy as np
import pytest
from conftest import stable_repr
from hypothesis import given
from hypothesis import strategies as st

from moe_telemetry import catalog, values
from moe_telemetry.values import MAX_COUNT, MAX_ITEMS, MAX_SECONDS, Refused

no_evaluation = pytest.fixture(lazies.no_evaluation)


def reason(convert, value):
    """The reason for which `convert` refuses the value."""
    with pytest.raises(Refused) as caught:
        convert(value)
    assert type(value).__name__ == caught.value.kind
    return caught.value.reason


NUMBERS = [values.seconds, values.amount, values.count]
NOT_NUMBERS = [
    Decimal(1),
    "3",
    b"3",
    None,
    True,
    False,
    np.True_,
    np.array([1, 2]),
    np.array(3),
    [],
    {},
    1j,
    object(),
    float,
]


@pytest.mark.parametrize("convert", NUMBERS)
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=stable_repr)
def test_what_is_not_a_number_is_refused(convert, value):
    """Numbers are Python or NumPy scalars; strings, booleans, Decimals and arrays are mistakes."""
    assert "not_a_number" == reason(convert, value)


@pytest.mark.parametrize("convert", NUMBERS)
def test_numbers_that_a_counter_cannot_take_are_refused(convert):
    """NaN and infinities would poison a sum, a negative number would let a counter fall."""
    assert "not_finite" == reason(convert, math.nan)
    assert "not_finite" == reason(convert, math.inf)
    assert "not_finite" == reason(convert, -math.inf)
    assert "not_finite" == reason(convert, np.float32("nan"))
    assert "negative" == reason(convert, -3)
    assert "negative" == reason(convert, -1e-300)
    assert "negative" == reason(convert, np.int8(-1))


@pytest.mark.parametrize("convert", [*NUMBERS, values.layer_index])
def test_huge_numbers_are_refused(convert):
    """An int that no float holds is out of range, not an OverflowError."""
    assert "out_of_range" == reason(convert, 10**400)
    assert "out_of_range" == reason(convert, Fraction(10**400, 3))


def test_limits_are_inclusive():
    """The largest accepted values are accepted."""
    assert MAX_SECONDS == values.seconds(MAX_SECONDS)
    assert MAX_COUNT == values.count(MAX_COUNT) == values.amount(MAX_COUNT)
    assert values.MAX_LAYER == values.layer_index(values.MAX_LAYER)
    assert "out_of_range" == reason(values.seconds, MAX_SECONDS * 1.0000001)
    assert "out_of_range" == reason(values.count, MAX_COUNT + 1)
    assert "out_of_range" == reason(values.amount, MAX_COUNT + 1)
    assert "out_of_range" == reason(values.layer_index, values.MAX_LAYER + 1)


def test_numpy_scalars_do_not_wrap():
    """The sum of narrow NumPy scalars is exact: they are Python numbers before they are added."""
    assert 600 == sum(values.count(np.uint8(200)) for _ in range(3))
    assert 4_000_000_000 == sum(values.count(np.int32(2_000_000_000)) for _ in range(2))
    assert 5000 == sum(values.count(np.float16(1)) for _ in range(5000))
    assert 5000.0 == sum(values.seconds(np.float16(1)) for _ in range(5000))


@pytest.mark.parametrize("value", [5, 5.0, np.uint8(5), np.float32(5), Fraction(5)], ids=stable_repr)
def test_results_are_python_numbers(value):
    """Whatever the scalar, a cell gets a plain float or int."""
    assert (float, 5.0) == (type(values.seconds(value)), values.seconds(value))
    assert (int, 5) == (type(values.count(value)), values.count(value))
    assert (int, 5) == (type(values.amount(value)), values.amount(value))
    assert (int, 5) == (type(values.layer_index(value)), values.layer_index(value))


def test_only_amounts_and_seconds_have_fractions():
    """Half a token is refused; half a second and a float counter's absolute value are not."""
    assert 0.5 == values.seconds(0.5) == values.amount(0.5)
    assert "not_integer" == reason(values.count, 0.5)
    assert "not_integer" == reason(values.layer_index, np.float32(1.5))


@given(st.floats())
def test_any_float_is_a_duration_or_refused(value):
    """No float gets through that is not finite, not negative and in range."""
    if 0 <= value <= MAX_SECONDS:
        assert value == values.seconds(value)
    else:
        assert reason(values.seconds, value) in ("negative", "not_finite", "out_of_range")


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (3, 3),
        (3, "3"),
        (3, "03"),
        (3, np.int64(3)),
        (3, 3.0),
        (-1, None),
        (-1, -1),
        (-1, -17),
        (-1, "-17"),
        (-1, -(10**400)),
    ],
)
def test_layers_in_any_form(index, value):
    """A layer is its index in whatever type; unknown ones are -1."""
    assert index == values.layer_index(value)


@pytest.mark.parametrize("value", ["", "-", "--3", "3.0", " 3", "+3", "\u0663", "decode", "9" * 5000])
def test_strings_that_are_no_layer_are_refused(value):
    """A string is taken as a layer only when it is a decimal integer of sensible length."""
    assert "unknown_label" == reason(values.layer_index, value)


@pytest.mark.parametrize("value", [True, b"3", np.array([3]), Decimal(3), object()], ids=stable_repr)
def test_other_things_are_no_layer(value):
    """What is neither number nor string is refused."""
    assert "not_a_number" == reason(values.layer_index, value)


class Iterating:
    """Iterable by __getitem__ alone, as old sequence types are."""

    def __getitem__(self, index):
        if index > 2:
            raise IndexError
        return index + 1


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, 3},
        frozenset((1, 2, 3)),
        [3, 2, 1, 1],
        (1, 2, 3),
        range(1, 4),
        {1: "a", 2: "b", 3: "c"},
        {1: "a", 2: "b", 3: "c"}.keys(),
        iter([1, 2, 3]),
        (number for number in (1, 2, 3, 3)),
        array("i", [1, 2, 3]),
        Iterating(),
        np.array([1, 2, 3]),
        np.array([[1, 2], [3, 1]], dtype=np.uint8),
        np.array([[[1, 2, 3]]], dtype=np.int16)[:, :, ::-1],
        [np.int32(1), np.uint8(2), np.int64(3)],
        [1.0, 2, np.float16(3)],
        {np.int64(1), np.int64(2), np.int64(3)},
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_ids_from_any_iterable(value):
    """Ids are a set whatever they come in; duplicates collapse."""
    assert {1, 2, 3} == values.ids(value)


@pytest.mark.parametrize("value", [[], (), set(), range(0), np.array([], dtype=np.int32), iter(())], ids=stable_repr)
def test_no_ids(value):
    """Nothing routed is a set, too."""
    assert set() == values.ids(value)


def test_ids_of_numpy_are_python_ints():
    """A NumPy scalar in a set would be compared by NumPy for ever after."""
    assert {int} == {type(item) for item in values.ids([np.int32(1), np.uint8(2)])}
    assert {int} == {type(item) for item in values.ids(np.array([1, 2]))}


def test_a_set_is_copied():
    """What comes back is ours: the caller may go on changing its set."""
    given = {1, 2}
    taken = values.ids(given)
    given.add(3)
    assert {1, 2} == taken


@pytest.mark.parametrize(
    ("why", "value"),
    [
        ("not_a_number", 3),
        ("not_a_number", None),
        ("not_a_number", "123"),
        ("not_a_number", b"\x01\x02"),
        ("not_a_number", bytearray(b"\x01")),
        ("not_a_number", memoryview(b"\x01")),
        ("not_a_number", np.array([1.0, 2.0])),
        ("not_a_number", np.array([True, False])),
        ("not_a_number", np.array([1, None], dtype=object)),
    ],
    ids=stable_repr,
)
def test_what_holds_no_ids_is_refused(why, value):
    """Text, bytes, masks and single numbers are not sets of ids."""
    assert why == reason(values.ids, value)


@pytest.mark.parametrize(
    ("why", "value"),
    [
        ("not_a_number", [1, None]),
        ("not_a_number", [1, "2"]),
        ("not_a_number", [2, True]),
        ("not_a_number", [[1, 2], [3]]),
        ("not_a_number", (item for item in ([1], [2]))),
        ("not_integer", [1, 2.5]),
        ("not_finite", [1, math.nan]),
        ("lazy_array", [mx.array(1), mx.array(2)]),
    ],
)
def test_one_wrong_item_refuses_all(why, value):
    """A partial set would count a union that never was."""
    with pytest.raises(Refused, match=why):
        values.ids(value)


@pytest.mark.parametrize("value", [endless(), (0 for _ in endless()), range(10**12)], ids=stable_repr)
def test_endless_iterables_are_given_up(value):
    """What may never end is read to 65,536 items, and then refused."""
    assert "too_many" == reason(values.ids, value)


def test_the_last_readable_item():
    """65,536 items of a generator are taken, and more of a list."""
    assert MAX_ITEMS == len(values.ids(iter(range(MAX_ITEMS))))
    with pytest.raises(Refused, match="too_many"):
        values.ids(iter(range(MAX_ITEMS + 1)))
    assert MAX_ITEMS + 1 == len(values.ids(list(range(MAX_ITEMS + 1))))


def test_an_endless_iterable_is_read_no_further():
    """One item more than the limit is asked for, and no other."""
    source = endless()
    assert "too_many" == reason(values.ids, source)
    assert MAX_ITEMS + 1 == next(source)


def test_what_an_iterable_raises_is_not_hidden():
    """An error of the caller's own code is not taken for a refusal."""

    def broken():
        yield 1
        raise KeyError("theirs")

    with pytest.raises(KeyError):
        values.ids(broken())


@pytest.mark.parametrize("convert", [*NUMBERS, values.layer_index, values.ids])
def test_lazy_arrays_are_refused_without_evaluating_them(convert, no_evaluation):
    """An MLX array is refused as lazy, and stays lazy."""
    for lazy in (mx.array(3), mx.array([1, 2]) + 1):
        assert "lazy_array" == reason(convert, lazy)


def test_a_subclass_of_a_lazy_array_is_lazy_too(no_evaluation):
    """It is the class's origin that counts, not where the subclass was written."""

    class Mine(mx.array):
        pass

    assert "lazy_array" == reason(values.ids, Mine([1, 2]))


def test_every_reason_is_in_the_catalog():
    """A reason outside the closed set would be a KeyError in the hook that counts it."""
    found = {reason(values.seconds, value) for value in ("3", math.nan, -1, 10**400, mx.array(1))}
    found |= {reason(values.count, 0.5), reason(values.ids, endless()), reason(values.layer_index, "x")}
    assert found <= set(catalog.LOST_REASONS)
    assert 8 == len(found)


@pytest.mark.parametrize("unit", ["ns", "ms", "s"])
def test_numpy_durations_are_no_numbers(unit):
    """A timedelta64 is an Integral of its own unit: as seconds it would be wrong by powers of ten."""
    for convert in (values.seconds, values.count, values.amount, values.layer_index):
        with pytest.raises(values.Refused) as refused:
            convert(np.timedelta64(5, unit))
        assert "not_a_number" == refused.value.reason


def test_a_list_subclass_is_read_like_any_iterable():
    """Its iterator may never end."""

    class Endless(list):
        def __iter__(self):
            while True:
                yield 1

    with pytest.raises(values.Refused) as refused:
        values.ids(Endless())
    assert "too_many" == refused.value.reason
