"""Units: fractions of a GPU as thousandths, sizes as bytes.

A fraction is a `number` in YAML and becomes integer thousandths ("milli") here: nothing inside the system computes with
binary floats. A size is a Kubernetes quantity and becomes integer bytes.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import NewType

Milli = NewType("Milli", int)
"""Thousandths of one GPU's time, 0 to 1000."""

Bytes = NewType("Bytes", int)
"""A size in bytes."""

GpuUuid = NewType("GpuUuid", str)
"""The UUID of a physical GPU as NVML prints it, `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`."""

TenantId = NewType("TenantId", str)
"""The UID of the SharePod that a reservation is for, or of the plain pod."""

WHOLE_GPU = Milli(1000)
"""The whole time of one GPU."""

# Far below a thousandth, far above the error of a binary float near 1.
_TOLERANCE = Decimal("1e-6")

_QUANTITY = re.compile(r"^([+-]?(?:\d+(?:\.\d*)?|\.\d+))(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?\d+)?$")
_SUFFIX: dict[str, Decimal] = {
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{suffix: Decimal(1000) ** -power for power, suffix in enumerate(("m", "u", "n"), start=1)},
}


class UnitError(ValueError):
    """Fraction or size that cannot be read. The message says what was given and what to write."""


def parse_fraction(value: float | int | str | Decimal) -> Milli:
    """Parse a fraction of a GPU, 0 to 1 with at most three decimals, as thousandths.

    Raises `UnitError` for what is no number, is outside 0 to 1, or is finer than a thousandth.
    """
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise UnitError(f"{value!r} is not a number; write a fraction of one GPU such as 0.4") from None
    if not number.is_finite() or isinstance(value, bool):
        raise UnitError(f"{value!r} is not a number; write a fraction of one GPU such as 0.4")
    scaled = number * 1000
    milli = int(scaled.to_integral_value())
    if milli < 0 or number < 0:
        raise UnitError(f"{value} is negative; a fraction of a GPU is 0 to 1")
    if milli > WHOLE_GPU:
        raise UnitError(f"{value} is more than one GPU; ask for several GPUs with count, each at a fraction of 0 to 1")
    if abs(scaled - milli) > _TOLERANCE * 1000:
        raise UnitError(
            f"{value} is finer than a thousandth of a GPU; write at most three decimals, such as {milli / 1000}"
        )
    return Milli(milli)


def format_fraction(milli: int) -> str:
    """Format thousandths as users write them: 400 is `0.4`, 1000 is `1`."""
    whole, rest = divmod(milli, 1000)
    return str(whole) if not rest else f"{whole}.{rest:03d}".rstrip("0")


def parse_quantity(value: int | float | str) -> Bytes:
    """Parse a Kubernetes quantity (`4Gi`, `512Mi`, `1e9`, `4294967296`) as bytes, rounded up as Kubernetes does.

    Raises `UnitError` for what is no quantity or is negative.
    """
    return Bytes(_parse_scaled(value, scale=0, example="a size such as 4Gi"))


def parse_cpu(value: int | float | str) -> int:
    """Parse a Kubernetes CPU quantity (`500m`, `2`, `0.5`) as thousandths of a core, rounded up as Kubernetes does.

    Raises `UnitError` for what is no quantity or is negative.
    """
    return _parse_scaled(value, scale=3, example="a number of cores such as 2 or 500m")


def _parse_scaled(value: int | float | str, *, scale: int, example: str) -> int:
    """Parse a quantity times 10 to the power `scale`, rounded up. `example` is what error messages advise."""
    text = str(value).strip()
    match = _QUANTITY.match(text)
    if match is None or isinstance(value, bool):
        also = ", 512Mi or a number of bytes" if scale == 0 else ""
        raise UnitError(f"{value!r} is not a quantity; write {example}{also}")
    number, suffix = match.groups()
    if suffix is None:
        amount = Decimal(number)
    elif suffix in _SUFFIX:
        amount = Decimal(number) * _SUFFIX[suffix]
    else:
        if abs(int(suffix[1:])) > 30:
            raise UnitError(f"{value!r} is out of range; write {example}")
        amount = Decimal(number).scaleb(int(suffix[1:]))
    if amount < 0:
        raise UnitError(f"{value} is negative; write {example}")
    scaled = int(amount.scaleb(scale).to_integral_value(rounding="ROUND_CEILING"))
    if scaled >= 1 << 63:
        raise UnitError(f"{value} is out of range; write {example}")
    return scaled
