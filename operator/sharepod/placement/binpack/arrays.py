"""Conversion of NumPy arrays to pointers for this package's C functions (native/)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._scores import ffi

_TYPES = {
    np.bool_: "uint8_t[]",
    np.uint8: "uint8_t[]",
    np.int64: "int64_t[]",
    np.float32: "float[]",
    np.float64: "double[]",
}


def pointer(array: npt.NDArray[Any]) -> Any:
    """Return the array as a C pointer. The caller must keep the array alive while C uses the pointer.

    Raises `KeyError` for a number type that no C function takes.
    """
    return ffi.from_buffer(_TYPES[array.dtype.type], array)
