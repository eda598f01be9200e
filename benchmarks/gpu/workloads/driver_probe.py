"""Prints the GPUs that the driver shows, without making a context: one JSON object."""

from __future__ import annotations

import ctypes
import json
import sys
import uuid


def main() -> None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        sys.exit(f"no CUDA driver: {error}")
    code = library.cuInit(0)
    if code:
        sys.exit(f"the CUDA driver does not start: cuInit answers {code}")
    count, version = ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    library.cuDriverGetVersion(ctypes.byref(version))
    gpus = []
    for index in range(count.value):
        device, raw, name, memory = ctypes.c_int(), (ctypes.c_ubyte * 16)(), (ctypes.c_char * 256)(), ctypes.c_size_t()
        library.cuDeviceGet(ctypes.byref(device), index)
        library.cuDeviceGetUuid(raw, device)
        library.cuDeviceGetName(name, len(name), device)
        library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        gpus.append(
            {
                "uuid": f"GPU-{uuid.UUID(bytes=bytes(raw))}",
                "index": index,
                "model": name.value.decode(errors="replace"),
                "memory": memory.value,
            }
        )
    print(json.dumps({"cuda": version.value, "gpus": gpus}))


if __name__ == "__main__":
    main()
