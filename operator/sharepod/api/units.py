"""Units: fractions of a GPU as integer thousandths ("milli"), sizes as integer bytes.

In YAML, a fraction is a `number` and a size is a Kubernetes quantity. Both are parsed here, so that no other module
computes with binary floats.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal, DecimalException
from functools import lru_cache
from typing import NewType

from .bounds import MAX_QUANTITY, quoted

Milli = NewType("Milli", int)
"""Thousandths of one GPU's time, 0 to 1000."""

Bytes = NewType("Bytes", int)
"""Size in bytes."""

GpuUuid = NewType("GpuUuid", str)
"""UUID of a physical GPU as NVML prints it, `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`."""

TenantId = NewType("TenantId", str)
"""UID that identifies a tenant: of its SharePod, its ResourceClaim, or a plain Pod."""

MIB = 1 << 20
"""Bytes of one MiB."""

WHOLE_GPU = Milli(1000)
"""The whole time of one GPU."""

# Accepted distance from whole thousandths: far above the error of a binary float near 1, far below a thousandth.
_TOLERANCE = Decimal("1e-6")

_QUANTITY = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?[0-9]{1,5})?")
_BINARY = {suffix: 1024**power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
"""Power of ten, by decimal suffix of a quantity."""

_PARTS = {"m": -3, "%": -2}
"""Power of ten, by suffix of a fraction."""

_MAX_EXPONENT = 30
"""Largest exponent of a quantity, positive or negative: 1e30 is far beyond 64 bits."""

_REMEMBERED = 4096
"""Most quantities whose value is cached: a cluster's pods use few different ones. Under 1 MB."""


class UnitError(ValueError):
    """Error for a fraction or size that cannot be read. The message has the input and the remedy."""


def parse_fraction(value: float | int | str) -> Milli:
    """Parse a fraction of a GPU, 0 to 1 with at most three decimals, as thousandths.

    Text may also have thousandths (`400m`) or percent (`40%`).

    Raises `UnitError` for input that is no number, is outside 0 to 1, or is finer than a thousandth.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not _short(value):
        raise UnitError(_no_fraction(value))
    return _fraction(value)


@lru_cache(_REMEMBERED, typed=True)
def _fraction(value: float | int | str) -> Milli:
    text = str(value)
    power = _PARTS.get(text[-1:], 0)
    try:
        number = Decimal(text[:-1] if power else text).scaleb(power)
    except DecimalException:
        raise UnitError(_no_fraction(value)) from None
    if not number.is_finite():
        raise UnitError(_no_fraction(value))
    if number < 0:
        raise UnitError(f"{quoted(value)} is negative; a fraction of a GPU is 0 to 1")
    milli = int((min(number, Decimal(2)) * 1000).to_integral_value(ROUND_HALF_UP))
    if milli > WHOLE_GPU:
        raise UnitError(
            f"{quoted(value)} is more than one GPU; ask for several GPUs with count, each at a fraction of 0 to 1"
        )
    if abs(number - Decimal(milli) / 1000) > _TOLERANCE:
        raise UnitError(
            f"{quoted(value)} is finer than a thousandth of a GPU; write at most three decimals, such as "
            f"{format_fraction(max(milli, 1))}"
        )
    return Milli(milli)


def _no_fraction(value: object) -> str:
    return f"{quoted(value)} is not a number; write a fraction of one GPU, such as 0.4"


def format_fraction(milli: int) -> str:
    """Format thousandths as users write them: 400 is `0.4`, 1000 is `1`."""
    whole, rest = divmod(milli, 1000)
    return str(whole) if not rest else f"{whole}.{rest:03d}".rstrip("0")


def parse_quantity(value: int | float | str) -> Bytes:
    """Parse a Kubernetes quantity (`4Gi`, `512Mi`, `1e9`, `4294967296`) as bytes, rounded up as Kubernetes does.

    Raises `UnitError` for input that is no quantity or is negative.
    """
    return Bytes(_parse_scaled(value, scale=0, example="a size such as 4Gi"))


def parse_cpu(value: int | float | str) -> int:
    """Parse a Kubernetes CPU quantity (`500m`, `2`, `0.5`) as thousandths of a core, rounded up as Kubernetes does.

    Raises `UnitError` for input that is no quantity or is negative.
    """
    return _parse_scaled(value, scale=3, example="a number of cores such as 2 or 500m")


def parse_whole(value: int | float | str) -> int:
    """Parse a Kubernetes quantity that is a whole number, in any notation (`1000`, `1k`).

    Raises `UnitError` for input that is no quantity, is negative or has a fraction.
    """
    example = "a whole number such as 400"
    billionths = _parse_scaled(value, scale=9, example=example)
    if billionths % 10**9:
        raise UnitError(f"{quoted(value)} is not whole; write {example}")
    return billionths // 10**9


def _parse_scaled(value: int | float | str, *, scale: int, example: str) -> int:
    """Parse a quantity and return it times 10 to the power `scale`, rounded up. `example`: a valid input, for error
    messages."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UnitError(_no_quantity(value, scale, example))
    if not _short(value):
        raise UnitError(f"{quoted(value)} is too long for a quantity; write {example}")
    try:
        return _scaled(str(value), scale)
    except OverflowError:
        raise UnitError(f"{quoted(value)} is out of range; write {example}") from None
    except ArithmeticError:
        raise UnitError(f"{quoted(value)} is negative; write {example}") from None
    except ValueError:
        raise UnitError(_no_quantity(value, scale, example)) from None


def _short(value: float | int | str) -> bool:
    """Return whether a number or text is no longer than a quantity may be. Converts no huge integer to text."""
    if isinstance(value, str):
        return len(value) <= MAX_QUANTITY
    return isinstance(value, float) or value.bit_length() <= 3 * MAX_QUANTITY


def _no_quantity(value: object, scale: int, example: str) -> str:
    also = ", 512Mi or a number of bytes" if scale == 0 else ""
    return f"{quoted(value)} is not a quantity; write {example}{also}"


@lru_cache(_REMEMBERED)
def _scaled(text: str, scale: int) -> int:
    """Parse a quantity and return it times 10 to the power `scale`, rounded up, by exact integer arithmetic.

    Raises `ValueError` for a text that is no quantity, `ArithmeticError` for a negative quantity, and `OverflowError`
    (a subclass of that) beyond 63 bits.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        raise ValueError(text)
    sign, whole, decimals, suffix = match[1], match[2], match[3] or "", match[4] or ""
    amount = int(whole + decimals)
    if sign == "-" and amount:
        raise ArithmeticError(text)
    power = scale - len(decimals)
    if suffix in _BINARY:
        amount *= _BINARY[suffix]
    elif suffix:
        exponent = _DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:])
        if abs(exponent) > _MAX_EXPONENT:
            raise OverflowError(text)
        power += exponent
    factor: int = 10 ** abs(power)
    amount = amount * factor if power >= 0 else -(-amount // factor)
    if amount >= 1 << 63:
        raise OverflowError(text)
    return amount
