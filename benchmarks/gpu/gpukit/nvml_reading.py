"""One reading of NVML as JSON: driver, GPUs, and the processes on them. It is a separate program, because a call into a
faulty driver may never return."""

from __future__ import annotations

import json
import sys
from typing import Any

import pynvml  # type: ignore[import-untyped, unused-ignore]


def main() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        sys.exit(f"NVML does not start: {error}")
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        gpus.append(
            {
                "index": index,
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
                "model": pynvml.nvmlDeviceGetName(handle),
                "memory": int(memory.total) - int(memory.reserved),
                "used": int(memory.used),
                "mig": _or_none(lambda handle=handle: int(pynvml.nvmlDeviceGetMigMode(handle)[0])),
                "processes": _or_none(
                    lambda handle=handle: {
                        str(process.pid): process.usedGpuMemory
                        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                    }
                ),
            }
        )
    print(json.dumps({"driver": pynvml.nvmlSystemGetDriverVersion(), "gpus": gpus}))


def _or_none(ask: Any) -> Any:
    try:
        return ask()
    except pynvml.NVMLError:
        return None


if __name__ == "__main__":
    main()
