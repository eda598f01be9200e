"""The double of libcuda: shared memory belongs to the process that created it. A process that opens it takes no
memory.
"""

from __future__ import annotations

from pathlib import Path

from hook.world.driver_script import MEMORY_PRELUDE, PRELUDE, memory_program

OTHER = f'''
import subprocess

def other(script, *arguments, files=()):
    """Makes calls in another process, which shares the state file."""
    environment = os.environ | {{"FAKE_CUDA_LABEL": "other"}}
    look = {MEMORY_PRELUDE!r}.replace('client("p")', 'client("other")')
    command = [sys.executable, "-S", "-c", os.environ["PRELUDE"] + look + script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, pass_fds=files, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr

class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]
'''


def test_a_handle_of_ipc_opens_the_memory_elsewhere_at_no_cost(state: Path) -> None:
    script = """
a = alloc(3 * MIB)
handle = new("cuIpcGetMemHandle", c_uint64(a + 5), kind=Handle)
assert cuda.cuIpcOpenMemHandle_v2(byref(c_uint64()), handle, 1) == 201, "not in the process itself"
pooled = new("cuMemAllocAsync", MIB, stream, kind=c_uint64).value
assert call("cuIpcGetMemHandle", byref(Handle()), pooled) == 1
OPEN = '''
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]
handle = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))
address, again, size = c_uint64(), c_uint64(), c_size_t()
for out in (address, again):
    code = cuda.cuIpcOpenMemHandle_v2(byref(out), handle, 1)
    if len(sys.argv) > 2:
        assert code == int(sys.argv[2]), code
        sys.exit()
    assert code == 0, code
assert address.value == again.value
ok("cuMemGetAddressRange_v2", None, byref(size), address)
assert size.value == 3 << 20
ok("cuMemsetD8_v2", address, 1, 3 << 20)
assert took("linear") == 0
assert call("cuMemFree_v2", address) == 1
ok("cuIpcCloseMemHandle", address), ok("cuIpcCloseMemHandle", address)
assert call("cuIpcCloseMemHandle", address) == 1
'''
other(OPEN, bytes(handle).hex())
assert took("linear") == 3 * MIB
dead = bytearray(bytes(handle))
dead[12:16] = (1).to_bytes(4, "little")
other(OPEN, dead.hex(), 201)
"""
    sharing(state, script)


def test_a_pool_and_its_allocations_are_imported_at_no_cost(state: Path) -> None:
    script = """
pool = new("cuMemPoolCreate", byref(Pool(1, 1, Where(1, 0))))
fd = c_int(-1)
ok("cuMemPoolExportToShareableHandle", byref(fd), pool, 1, 0)
a = new("cuMemAllocFromPoolAsync", 5 * MIB, pool, stream, kind=c_uint64).value
pointer = new("cuMemPoolExportPointer", a, kind=Handle)
private = new("cuMemPoolCreate", byref(Pool(1, 0, Where(1, 0))))
assert call("cuMemPoolExportToShareableHandle", byref(c_int()), private, 1, 0) == 1
other('''
pool = new("cuMemPoolImportFromShareableHandle", int(sys.argv[1]), 1, 0)
content = (ctypes.c_ubyte * 64).from_buffer_copy(bytes.fromhex(sys.argv[2]))
address = new("cuMemPoolImportPointer", pool, byref(content), kind=c_uint64).value
assert call("cuMemAllocFromPoolAsync", byref(c_uint64()), 1, pool, stream) == 1, "nothing is allocated from it here"
ok("cuMemsetD8_v2", address, 0, 5 * MIB)
ok("cuMemFreeAsync", address, stream)
ok("cuStreamSynchronize", stream)
ok("cuMemPoolDestroy", pool)
assert took("pool") == 0
''', fd.value, bytes(pointer).hex(), files=(fd.value,))
assert took("pool") == 32 * MIB
"""
    sharing(state, script)


def test_external_memory_is_mapped_at_no_cost_within_its_bounds(state: Path) -> None:
    script = """
class Imported(ctypes.Structure):
    _fields_ = [("type", c_int), ("fd", c_uint64), ("name", c_void_p), ("size", c_uint64), ("flags", c_uint),
                ("rest", c_uint * 16)]

class Buffer(ctypes.Structure):
    _fields_ = [("offset", c_uint64), ("size", c_uint64), ("flags", c_uint), ("rest", c_uint * 16)]

class Levels(ctypes.Structure):
    _fields_ = [("offset", c_uint64), ("shape", Shape), ("levels", c_uint), ("rest", c_uint * 16)]

fd = os.memfd_create("external")
what = Imported(1, fd, None, 4 * MIB, 0)
memory = new("cuImportExternalMemory", byref(what))
try:
    os.fstat(fd)
    raise SystemExit("the descriptor is the driver's now")
except OSError:
    pass
address = new("cuExternalMemoryGetMappedBuffer", memory, byref(Buffer(MIB, 3 * MIB, 0)), kind=c_uint64).value
assert call("cuExternalMemoryGetMappedBuffer", byref(c_uint64()), memory, byref(Buffer(MIB, 4 * MIB, 0))) == 1
mipmap = new("cuExternalMemoryGetMappedMipmappedArray", memory, byref(Levels(0, Shape(64, 64, 0, 0x20, 4, 0), 3)))
ok("cuMemsetD8_v2", address, 0, 3 * MIB)
ok("cuDestroyExternalMemory", memory)
ok("cuMemFree_v2", address), ok("cuMipmappedArrayDestroy", mipmap)
assert sum(map(took, ("linear", "array", "virtual"))) == 0
"""
    sharing(state, script)


def sharing(state: Path, script: str) -> None:
    memory_program(state, OTHER + script, PRELUDE=PRELUDE)
