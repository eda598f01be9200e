"""Calls of the probed process that take or free device memory, in addition to plain linear memory.

Each call returns (CUresult, value). Handles and addresses are numbers.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

DEVICE, HOST = 1, 2  # CU_MEM_LOCATION_TYPE_*
FABRIC = 8
"""CU_MEM_HANDLE_TYPE_FABRIC"""


PIDFD_GETFD = 438
"""Number of the system call, on every architecture; Python's os module has no function for it."""


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Physical(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", _Location), ("more", c_uint64 * 4)]


class _Pool(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("security", c_void_p),
        ("most", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


class _AllocNode(ctypes.Structure):
    _fields_ = [
        ("pool", _Pool),
        ("access", c_void_p),
        ("access_count", c_size_t),
        ("bytes", c_size_t),
        ("address", c_uint64),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


class _Tile(ctypes.Structure):
    _fields_ = [
        ("kind", c_int),
        ("array", c_void_p),
        ("type", c_int),
        ("place", c_uint * 9),
        ("operation", c_int),
        ("handles", c_int),
        ("handle", c_uint64),
        ("offset", c_uint64),
        ("devices", c_uint),
        ("flags", c_uint),
        ("reserved", c_uint * 2),
    ]


class _Multicast(ctypes.Structure):
    _fields_ = [("devices", c_uint), ("size", c_size_t), ("handles", c_uint64), ("flags", c_uint64)]


class _Instantiate(ctypes.Structure):
    _fields_ = [("flags", c_uint64), ("stream", c_void_p), ("failed", c_void_p), ("result", c_int)]


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def _descriptor_of(pid: int, descriptor: int) -> int:
    """Return a copy of another process's descriptor."""
    pidfd = os.pidfd_open(pid)
    copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, descriptor, 0)
    os.close(pidfd)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return int(copy)


class MemoryCalls:
    """Mix-in of the probe's calls. Its class must provide `cuda` and `handles`."""

    handles: dict[str, c_void_p]

    def cuda(self, name: str, *arguments: Any) -> int:
        """Make a driver call; return its CUresult."""
        raise NotImplementedError

    # ---- arrays

    def array(
        self, width: int, height: int, depth: int = 0, flags: int = 0, levels: int = 0, channels: int = 4
    ) -> tuple[int, Any]:
        """Create an array of floats. `levels` > 0: a mipmapped array."""
        handle, shape = c_void_p(), _Shape(width, height, depth, 0x20, channels, flags)
        if levels:
            return self.cuda("cuMipmappedArrayCreate", byref(handle), byref(shape), c_uint(levels)), handle.value
        return self.cuda("cuArray3DCreate_v2", byref(handle), byref(shape)), handle.value

    def array_free(self, array: int, levels: int = 0) -> tuple[int, Any]:
        return self.cuda("cuMipmappedArrayDestroy" if levels else "cuArrayDestroy", c_void_p(array)), None

    # ---- stream-ordered

    def alloc_async(self, size: int, stream: str = "", pool: int = 0) -> tuple[int, Any]:
        address, on = c_uint64(), self.handles.get(stream)
        if pool:
            code = self.cuda("cuMemAllocFromPoolAsync", byref(address), c_size_t(size), c_void_p(pool), on)
        else:
            code = self.cuda("cuMemAllocAsync", byref(address), c_size_t(size), on)
        return code, address.value

    def free_async(self, address: int, stream: str = "") -> tuple[int, Any]:
        return self.cuda("cuMemFreeAsync", c_uint64(address), self.handles.get(stream)), None

    def pool_create(self, most: int = 0, device: int = 0, where: int = DEVICE, handles: int = 0) -> tuple[int, Any]:
        pool = c_void_p()
        properties = _Pool(1, handles, _Location(where, device), None, most)
        return self.cuda("cuMemPoolCreate", byref(pool), byref(properties)), pool.value

    def pool_destroy(self, pool: int) -> tuple[int, Any]:
        return self.cuda("cuMemPoolDestroy", c_void_p(pool)), None

    def pool_default(self, device: int = 0) -> tuple[int, Any]:
        pool = c_void_p()
        return self.cuda("cuDeviceGetDefaultMemPool", byref(pool), device), pool.value

    def pool_use(self, pool: int, device: int = 0) -> tuple[int, Any]:
        return self.cuda("cuDeviceSetMemPool", device, c_void_p(pool)), None

    def pool_keep(self, pool: int, threshold: int) -> tuple[int, Any]:
        """Set the release threshold, in bytes."""
        return self.cuda("cuMemPoolSetAttribute", c_void_p(pool), 4, byref(c_uint64(threshold))), None

    def pool_trim(self, pool: int, keep: int = 0) -> tuple[int, Any]:
        return self.cuda("cuMemPoolTrimTo", c_void_p(pool), c_size_t(keep)), None

    # ---- virtual memory management

    def physical(self, size: int, device: int = 0, where: int = DEVICE) -> tuple[int, Any]:
        handle, properties = c_uint64(), _Physical(1, 1, _Location(where, device))
        return self.cuda("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0)), handle.value

    def physical_fabric(self, size: int) -> tuple[int, Any]:
        """Create physical memory that can be exported by a fabric handle."""
        handle, properties = c_uint64(), _Physical(1, FABRIC, _Location(DEVICE, 0))
        return self.cuda("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0)), handle.value

    def fabric_export(self, handle: int) -> tuple[int, Any]:
        """Return the fabric handle, in hexadecimal."""
        out = _Handle()
        code = self.cuda("cuMemExportToShareableHandle", byref(out), c_uint64(handle), FABRIC, c_uint64(0))
        return code, bytes(out).hex()

    def fabric_import(self, handle: str) -> tuple[int, Any]:
        imported, of = c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(handle))
        return self.cuda("cuMemImportFromShareableHandle", byref(imported), byref(of), FABRIC), imported.value

    def physical_release(self, handle: int) -> tuple[int, Any]:
        return self.cuda("cuMemRelease", c_uint64(handle)), None

    def physical_of(self, address: int) -> tuple[int, Any]:
        handle = c_uint64()
        return self.cuda("cuMemRetainAllocationHandle", byref(handle), c_uint64(address)), handle.value

    def physical_export(self, handle: int) -> tuple[int, Any]:
        """Export a handle. The value is a descriptor."""
        descriptor = c_int(-1)
        code = self.cuda("cuMemExportToShareableHandle", byref(descriptor), c_uint64(handle), 1, c_uint64(0))
        return code, descriptor.value

    def physical_import(self, descriptor: int, pid: int = 0) -> tuple[int, Any]:
        """Import a descriptor, by default of this process."""
        imported, own = c_uint64(), _descriptor_of(pid, descriptor) if pid else descriptor
        code = self.cuda("cuMemImportFromShareableHandle", byref(imported), c_uint64(own), 1)
        if pid:
            os.close(own)
        return code, imported.value

    def range_export(self, address: int, size: int) -> tuple[int, Any]:
        """Create a descriptor (dma-buf) of a range of addresses."""
        descriptor = c_int(-1)
        arguments = c_uint64(address), c_size_t(size), 1, c_uint64(0)
        return self.cuda("cuMemGetHandleForAddressRange", byref(descriptor), *arguments), descriptor.value

    def free_exported(self, opened: int, count: int) -> tuple[int, Any]:
        """Export `opened` + `count` allocations by a descriptor each, then free `count` of them.

        Return the seconds of processor time of one free.
        """
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))
        addresses = [c_uint64() for _ in range(opened + count)]
        for address in addresses:
            code = self.cuda("cuMemAlloc_v2", byref(address), c_size_t(4096))
            code = code or self.range_export(address.value, 4096)[0]
            if code != 0:
                return code, None
        begun = time.process_time()
        codes = [self.cuda("cuMemFree_v2", address) for address in addresses[:count]]
        return max(codes), (time.process_time() - begun) / count

    def descriptor_copy(self, descriptor: int, pid: int) -> tuple[int, Any]:
        return 0, _descriptor_of(pid, descriptor)

    def descriptor_close(self, descriptor: int) -> tuple[int, Any]:
        os.close(descriptor)
        return 0, None

    def physical_again(self, handle: int) -> tuple[int, Any]:
        """Export a handle and import it again. The value is the second handle."""
        code, descriptor = self.physical_export(handle)
        if code != 0:
            return code, None
        code, imported = self.physical_import(descriptor)
        os.close(descriptor)
        return code, imported

    def addresses(self, size: int) -> tuple[int, Any]:
        address = c_uint64()
        code = self.cuda("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        return code, address.value

    def map(self, address: int, size: int, handle: int, offset: int = 0) -> tuple[int, Any]:
        return self.cuda(
            "cuMemMap", c_uint64(address), c_size_t(size), c_size_t(offset), c_uint64(handle), c_uint64(0)
        ), None

    def unmap(self, address: int, size: int) -> tuple[int, Any]:
        return self.cuda("cuMemUnmap", c_uint64(address), c_size_t(size)), None

    def sparse_map(self, array: int, x: int, handle: int) -> tuple[int, Any]:
        """Map a tile of 128 x 128 at column `x`; `handle` 0: unmap it."""
        tile = _Tile(0, array, 0, (0, 0, 0, x, 0, 0, 128, 128, 1), 1 if handle else 2, 0, handle, 0, 1, 0)
        return self.cuda("cuMemMapArrayAsync", byref(tile), c_uint(1), None), None

    def multicast(self, size: int, device: int = 0) -> tuple[int, Any]:
        """Make a multicast object of one device."""
        handle, properties = c_uint64(), _Multicast(1, size, 0, 0)
        code = self.cuda("cuMulticastCreate", byref(handle), byref(properties))
        return code or self.cuda("cuMulticastAddDevice", handle, device), handle.value

    def multicast_bind(self, handle: int, at: int, memory: int, size: int) -> tuple[int, Any]:
        arguments = c_uint64(handle), c_size_t(at), c_uint64(memory), c_size_t(0), c_size_t(size), c_uint64(0)
        return self.cuda("cuMulticastBindMem", *arguments), None

    def multicast_bind_address(self, handle: int, at: int, address: int, size: int) -> tuple[int, Any]:
        arguments = c_uint64(handle), c_size_t(at), c_uint64(address), c_size_t(size), c_uint64(0)
        return self.cuda("cuMulticastBindAddr", *arguments), None

    def multicast_unbind(self, handle: int, at: int, size: int, device: int = 0) -> tuple[int, Any]:
        return self.cuda("cuMulticastUnbind", c_uint64(handle), device, c_size_t(at), c_size_t(size)), None

    # ---- graphs

    def memory_graph(
        self, name: str, *sizes: int, inside: bool = False, uploaded: bool = False, frees: bool = False
    ) -> tuple[int, Any]:
        """Create an executable graph with a node for each allocation. `frees`: each is followed by a node that frees
        it.
        """
        graph, node, executable = c_void_p(), c_void_p(), c_void_p()
        code = self.cuda("cuGraphCreate", byref(graph), 0)
        for size in sizes:
            parameters = _AllocNode(_Pool(1, 0, _Location(DEVICE, 0)), None, 0, size, 0)
            code = code or self.cuda("cuGraphAddMemAllocNode", byref(node), graph, None, c_size_t(0), byref(parameters))
            if frees:
                freed = graph, byref(node), c_size_t(1), c_uint64(parameters.address)
                code = code or self.cuda("cuGraphAddMemFreeNode", byref(c_void_p()), *freed)
        if inside:  # a child of another graph
            parent = c_void_p()
            code = code or self.cuda("cuGraphCreate", byref(parent), 0)
            code = code or self.cuda("cuGraphAddChildGraphNode", byref(node), parent, None, c_size_t(0), graph)
            graph = parent
        if uploaded:
            upload = _Instantiate(2, None, None, 0)  # CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
            code = code or self.cuda("cuGraphInstantiateWithParams", byref(executable), graph, byref(upload))
        else:
            code = code or self.cuda("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        self.handles[name] = executable
        return code, None

    def child_graph(self, name: str, *sizes: int) -> tuple[int, Any]:
        return self.memory_graph(name, *sizes, inside=True)

    def freeing_graph(self, name: str, *sizes: int) -> tuple[int, Any]:
        return self.memory_graph(name, *sizes, frees=True)

    def uploaded_graph(self, name: str, *sizes: int) -> tuple[int, Any]:
        return self.memory_graph(name, *sizes, uploaded=True)

    def graph_upload(self, name: str, stream: str = "") -> tuple[int, Any]:
        return self.cuda("cuGraphUpload", self.handles[name], self.handles.get(stream)), None

    def graph_trim(self, device: int = 0) -> tuple[int, Any]:
        return self.cuda("cuDeviceGraphMemTrim", device), None

    # ---- other processes' memory

    def ipc_handle(self, address: int) -> tuple[int, Any]:
        """Return the IPC handle of an address, in hexadecimal."""
        handle = _Handle()
        return self.cuda("cuIpcGetMemHandle", byref(handle), c_uint64(address)), bytes(handle).hex()

    def ipc_open(self, handle: str) -> tuple[int, Any]:
        address = c_uint64()
        of = _Handle.from_buffer_copy(bytes.fromhex(handle))
        return self.cuda("cuIpcOpenMemHandle_v2", byref(address), of, c_uint(1)), address.value

    def ipc_close(self, address: int) -> tuple[int, Any]:
        return self.cuda("cuIpcCloseMemHandle", c_uint64(address)), None

    def pool_export(self, pool: int) -> tuple[int, Any]:
        """Export a pool. The value is a descriptor."""
        descriptor = c_int(-1)
        code = self.cuda("cuMemPoolExportToShareableHandle", byref(descriptor), c_void_p(pool), 1, c_uint64(0))
        return code, descriptor.value

    def pointer_export(self, address: int) -> tuple[int, Any]:
        """Return the export data of an allocation of a pool, in hexadecimal."""
        out = _Handle()
        return self.cuda("cuMemPoolExportPointer", byref(out), c_uint64(address)), bytes(out).hex()

    def pointer_import(self, pool: int, pointer: str) -> tuple[int, Any]:
        address, of = c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(pointer))
        return self.cuda("cuMemPoolImportPointer", byref(address), c_void_p(pool), byref(of)), address.value

    def pool_import(self, pid: int, descriptor: int) -> tuple[int, Any]:
        """Import a pool from a descriptor of another process."""
        imported, own = c_void_p(), os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        code = self.cuda("cuMemPoolImportFromShareableHandle", byref(imported), c_void_p(own), 1, c_uint64(0))
        os.close(own)
        return code, imported.value

    # ---- contexts

    def green_context(self, name: str, device: int = 0) -> tuple[int, Any]:
        """Make a green context and make it current."""
        resource, description, green, context = (ctypes.c_ubyte * 1024)(), c_void_p(), c_void_p(), c_void_p()
        code = self.cuda("cuDeviceGetDevResource", device, resource, 1)
        code = code or self.cuda("cuDevResourceGenerateDesc", byref(description), resource, c_uint(1))
        code = code or self.cuda("cuGreenCtxCreate", byref(green), description, device, c_uint(1))
        code = code or self.cuda("cuCtxFromGreenCtx", byref(context), green)
        self.handles[name] = green
        return code or self.cuda("cuCtxSetCurrent", context), None

    def green_stream(self, name: str, green: str) -> tuple[int, Any]:
        self.handles[name] = handle = c_void_p()
        return self.cuda("cuGreenCtxStreamCreate", byref(handle), self.handles[green], c_uint(1), 0), None

    def green_context_destroy(self, name: str) -> tuple[int, Any]:
        return self.cuda("cuGreenCtxDestroy", self.handles.pop(name)), None

    def context_limit(self, limit: int, value: int) -> tuple[int, Any]:
        return self.cuda("cuCtxSetLimit", limit, c_size_t(value)), None

    def memory_info_of(self, free: bool, total: bool) -> tuple[int, Any]:
        """Call cuMemGetInfo, with NULL for the sizes that are not requested."""
        amounts = c_size_t(), c_size_t()
        return self.cuda(
            "cuMemGetInfo_v2", byref(amounts[0]) if free else None, byref(amounts[1]) if total else None
        ), [amounts[0].value, amounts[1].value]
