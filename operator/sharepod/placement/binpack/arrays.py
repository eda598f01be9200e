"""How arrays reach the C of this package (native/)."""

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
    """What C reads and writes as this array, which the caller keeps alive for as long. Raises `KeyError` for a type of
    number that C has no name for."""
    return ffi.from_buffer(_TYPES[array.dtype.type], array)
