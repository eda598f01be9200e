"""Fractions and sizes are exact, or are refused with a correct form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.api.units import (
    UnitError,
    format_fraction,
    parse_fraction,
    parse_quantity,
)


@given(st.integers(0, 1000))
def test_every_thousandth_survives_binary_floats_and_text(milli: int) -> None:
    assert parse_fraction(milli / 1000) == milli
    assert parse_fraction(format_fraction(milli)) == milli
    assert parse_fraction(f"{milli}m") == parse_fraction(f"{milli / 10}%") == milli


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (1.4, "with count"),
        (-0.1, "0 to 1"),
        (0.1234, "three decimals"),
        (1.0004, "three decimals"),
        (0.0001, "such as 0.001"),
        ("400.5m", "three decimals"),
        ("33.33%", "three decimals, such as 0.333"),
        ("1500m", "'1500m' is more than one GPU"),
        ("m", "such as 0.4"),
        ("40 percent", "such as 0.4"),
        (float("nan"), "such as 0.4"),
        (float("inf"), "such as 0.4"),
        ("half", "such as 0.4"),
        (True, "such as 0.4"),
    ],
)
def test_a_fraction_that_is_invalid_is_refused_with_the_fix(value: float | str, fix: str) -> None:
    with pytest.raises(UnitError, match=fix):
        parse_fraction(value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4Gi", 4 << 30),
        ("1.5Gi", 3 << 29),
        ("512Mi", 512 << 20),
        ("1G", 10**9),
        ("1e9", 10**9),
        ("4294967296", 1 << 32),
        (4294967296, 1 << 32),
        ("100m", 1),
        ("0", 0),
        ("1e-3", 1),
        ("-0", 0),
        ("+5.", 5),
        (".5Ki", 512),
        (1e-07, 1),
        ("9007199254740993", 9007199254740993),
        ("1152921504606846976.000000000000000000000000000000000000000001", (1 << 60) + 1),
    ],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str | int, size: int) -> None:
    assert parse_quantity(text) == size


NO_QUANTITIES = (
    "4 Gi", "4GB", "four", "", "-1Gi", "1e99999", "0x10", "1Gi2", "9Ei", ".", "+", "-", " 4Gi", "4Gi\n", "1_000", "٤Gi",
    "1e-31",
)  # fmt: skip


@pytest.mark.parametrize("text", [*NO_QUANTITIES, True, 1e300, float("nan"), float("inf"), 10**400, None, [], {}])
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_quantity(text)


@pytest.mark.parametrize("digits", ["1" * 1_000_000, "0." + "1" * 500_000, "1" * 65, 10**70])
def test_a_number_that_is_too_long_is_refused_unread_and_not_repeated(digits: str | int) -> None:
    with pytest.raises(UnitError, match="too long for a quantity; write a size such as 4Gi") as refused:
        parse_quantity(digits)
    assert len(str(refused.value)) < 200
    with pytest.raises(UnitError, match="is not a number") as refused:
        parse_fraction(digits)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("value", ["1e999999", "1e9999999999", 1e308, 10**60])
def test_a_fraction_beyond_all_bounds_is_refused_at_once(value: str | float) -> None:
    with pytest.raises(UnitError):
        parse_fraction(value)
