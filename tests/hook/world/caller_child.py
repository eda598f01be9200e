"""Program behind `Caller`: makes the driver calls that a test composes, one JSON array per line.

`close` as the symbol closes a descriptor. A call is `[SYMBOL, ARGUMENT, ...]`. An argument is a number, `null`, or a
string with a prefix: `out:N` (a pointer to N zero bytes), `in:HEX` (a pointer to these bytes) or `by:HEX` (a structure
by value). The answer is `[CUresult, HEX, ...]`, with the bytes behind the pointers after the call. The program runs
with `-S` and the standard library only, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

_structures: dict[int, type[ctypes.Structure]] = {}


def _close(descriptor: ctypes.c_uint64) -> int:
    os.close(descriptor.value)
    return 0


_functions: dict[str, Callable[..., int]] = {"close": _close}


def _by_value(content: bytes) -> ctypes.Structure:
    if len(content) not in _structures:
        _structures[len(content)] = type(
            f"Bytes{len(content)}", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_ubyte * len(content))]}
        )
    return _structures[len(content)].from_buffer_copy(content)


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    for line in sys.stdin:
        symbol, *given = json.loads(line)
        arguments: list[Any] = []
        buffers = []
        for one in given:
            if one is None:
                arguments.append(None)
            elif isinstance(one, int):
                arguments.append(ctypes.c_uint64(one & 0xFFFFFFFFFFFFFFFF))
            elif one.startswith("by:"):
                arguments.append(_by_value(bytes.fromhex(one[3:])))
            else:
                content = bytes(int(one[4:])) if one.startswith("out:") else bytes.fromhex(one[3:])
                buffers.append(ctypes.create_string_buffer(content, len(content)))
                arguments.append(buffers[-1])
        if symbol not in _functions:
            _functions[symbol] = getattr(cuda, symbol)
        code = _functions[symbol](*arguments)
        sys.stdout.write(json.dumps([code, *(buffer.raw.hex() for buffer in buffers)]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
