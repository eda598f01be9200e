"""Calls of the probed process that make the device work: any such entry point, by its prototype in the table.

The arguments are chosen by the types and names of the parameters, so a new entry point is called too. A call copies,
fills or moves 64 bytes between two pieces of memory, or launches a kernel or graph that does nothing.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

SIZES = {"N": 16, "Width": 8, "Height": 1, "dstPitch": 64, "ByteCount": 64, "size": 64}
ONE = ("count", "numOps", "numAttrs", "numPrefetchLocs", "numDevices")
MEMORY_TYPES = {"host": 1, "device": 2, "unified host": 4, "unified device": 4}


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


def _side(word: Any, side: str, three: bool) -> list[tuple[str, Any]]:
    pointer = ctypes.c_void_p
    fields = [("X", word), ("Y", word)] + ([("Z", word), ("LOD", word)] if three else [])
    fields += [("Type", ctypes.c_uint), ("Host", pointer), ("Device", word), ("Array", pointer)]
    fields += [("Context", pointer)] * three + [("Pitch", word)] + [("Rows", word)] * three
    return [(side + name, kind) for name, kind in fields]


def copy_2d(word: Any) -> Any:
    """Return the type CUDA_MEMCPY2D; `word`: unsigned of 32 or 64 bits."""
    fields = [*_side(word, "src", False), *_side(word, "dst", False), ("Width", word), ("Height", word)]
    return type("Copy2D", (ctypes.Structure,), {"_fields_": fields})


def copy_3d(word: Any) -> Any:
    """Return the type CUDA_MEMCPY3D or CUDA_MEMCPY3D_PEER; `word`: unsigned of 32 or 64 bits."""
    fields = [*_side(word, "src", True), *_side(word, "dst", True)]
    fields += [("Width", word), ("Height", word), ("Depth", word)]
    return type("Copy3D", (ctypes.Structure,), {"_fields_": fields})


class WorkCalls:
    """Mix-in of the probe's calls: `work_memory` and `work`."""

    context: ctypes.c_void_p
    handles: dict[str, ctypes.c_void_p]

    def cuda(self, name: str, *arguments: Any) -> int:
        raise NotImplementedError

    def _function(self, kernel: str) -> ctypes.c_void_p:
        raise NotImplementedError

    def work_memory(self) -> tuple[int, Any]:
        """Create the objects for `work`: two pieces of each kind of memory, and two arrays."""
        code = 0
        self.places: dict[str, list[int]] = {}
        for kind, symbol, word in (
            ("device", "cuMemAlloc_v2", ctypes.c_uint64),
            ("managed", "cuMemAllocManaged", ctypes.c_uint64),
            ("low", "cuMemAlloc", ctypes.c_uint32),
        ):
            for _ in range(2):
                address = word()
                flags = (1,) if kind == "managed" else ()
                code = code or self.cuda(symbol, ctypes.byref(address), word(4096), *flags)
                self.places.setdefault(kind, []).append(address.value)
        self.host = [ctypes.create_string_buffer(4096) for _ in range(2)]
        self.places["host"] = [ctypes.addressof(buffer) for buffer in self.host]
        self.arrays = [ctypes.c_void_p(), ctypes.c_void_p()]
        descriptor = struct.pack("=QQII", 64, 0, 1, 1)  # width, height, CU_AD_FORMAT_UNSIGNED_INT8, channels
        for array in self.arrays:
            code = code or self.cuda("cuArrayCreate_v2", ctypes.byref(array), descriptor)
        return code, None

    def work(
        self, symbol: str, parameters: str, stream: str = "s", to: str = "device", source: str = "device"
    ) -> tuple[int, Any]:
        """Call an entry point. `to` and `source`: host, device, unified host or unified device."""
        self.kinds = {"dst": to, "src": source}
        self.kept: list[Any] = []  # objects to which pointers refer during the call
        self.stream_handle = self.handles.get(stream)
        arrays = iter(self.arrays)
        managed = "Prefetch" in symbol
        return self.cuda(symbol, *(self._argument(part, arrays, managed) for part in parameters.split(", "))), None

    def _address(self, side: str, *, low: bool = False, managed: bool = False) -> int:
        kind = self.kinds[side].removeprefix("unified ")
        place = "low" if low and kind == "device" else "managed" if managed else kind
        return self.places[place][side == "src"]

    def _argument(self, part: str, arrays: Any, managed: bool) -> Any:
        kind, _, name = part.rpartition(" ")
        kind, name = kind + "*" * name.count("*"), name.lstrip("*")
        if kind in ("unsigned int", "int", "size_t"):
            one = name in ONE or name.startswith(("gridDim", "blockDim", "grid_"))
            return (ctypes.c_size_t if kind == "size_t" else ctypes.c_uint)(1 if one else SIZES.get(name, 0))
        if kind in ("CUdeviceptr", "CUdeviceptr_v1"):
            low = kind.endswith("v1")
            address = self._address("src" if name.startswith("src") else "dst", low=low, managed=managed)
            return ctypes.c_uint32(address) if low else ctypes.c_uint64(address)
        if kind == "CUarray":
            return next(arrays)
        plain = {
            "CUstream": self.stream_handle,
            "CUcontext": self.context,
            "CUfunction": self._function("noop"),
            "CUgraphExec": self.handles.get("graph"),
            "CUdevice": ctypes.c_int(0),
            "CUmemLocation": Location(1, 0),  # CU_MEM_LOCATION_TYPE_DEVICE
            "unsigned char": ctypes.c_ubyte(1),
            "unsigned short": ctypes.c_ushort(1),
            "unsigned long long": ctypes.c_uint64(0),
            "void*": ctypes.c_void_p(self.places["host"][0]),
            "const void*": ctypes.c_void_p(self.places["host"][0]),
            "void**": None,
        }
        if kind in plain:
            return plain[kind]
        self.kept.append(self._struct(kind, name))
        return ctypes.byref(self.kept[-1])

    def _struct(self, kind: str, name: str) -> Any:
        if kind == "CUdeviceptr*":
            side = "src" if name.startswith("src") else "dst"
            return (ctypes.c_uint64 * 1)(self._address(side, managed=name == "dptrs"))
        if kind == "size_t*":
            return (ctypes.c_size_t * 1)(64 if name == "sizes" else 0)
        if kind == "CUmemLocation*":
            return Location(1, 0)
        if kind == "CUmemcpyAttributes*":
            return ctypes.create_string_buffer(struct.pack("=IiiiiI", 1, 0, 0, 0, 0, 0))
        if kind == "CUDA_MEMCPY3D_BATCH_OP*":
            sides = [struct.pack("=I4xQQQii", 1, self._address(side), 0, 0, 0, 0) for side in ("src", "dst")]
            return ctypes.create_string_buffer(b"".join(sides) + struct.pack("=QQQII", 64, 1, 1, 1, 0))
        stream = self.stream_handle.value if self.stream_handle else 0
        if kind == "const CUlaunchConfig*":
            return ctypes.create_string_buffer(struct.pack("@7IPPI", 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
        if kind == "CUDA_LAUNCH_PARAMS*":
            function = self._function("noop").value
            return ctypes.create_string_buffer(struct.pack("@P7IPP", function, 1, 1, 1, 1, 1, 1, 0, stream, 0))
        if kind.startswith("const CUDA_MEMCPY"):
            return self._copy(kind)
        return ctypes.create_string_buffer(256)

    def _copy(self, kind: str) -> Any:
        low = kind.endswith("_v1*")
        copy = (copy_2d if "2D" in kind else copy_3d)(ctypes.c_uint if low else ctypes.c_size_t)()
        for side, memory in self.kinds.items():
            setattr(copy, side + "Type", MEMORY_TYPES[memory])
            setattr(copy, side + ("Host" if memory == "host" else "Device"), self._address(side, low=low))
            setattr(copy, side + "Pitch", 64)
            if "PEER" in kind:
                setattr(copy, side + "Context", self.context)
        copy.Width, copy.Height, copy.Depth = 64, 1, 1
        return copy
