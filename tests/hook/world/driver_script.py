"""Scripts of driver calls, each run in a separate process on the double of libcuda.

`program` runs a script after PRELUDE; `memory_program` runs it after PRELUDE and MEMORY_PRELUDE.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from doubles.gpus import State, read_state
from hook.conftest import BUILD

PRELUDE = """
import ctypes, os, sys
from ctypes import byref, c_void_p, c_size_t, c_uint64, c_int, c_uint, c_float
cuda = ctypes.CDLL("libcuda.so.1")

def call(name, *args):
    args = [c_uint64(a) if isinstance(a, int) else a for a in args]
    return getattr(cuda, name)(*args)

def ok(name, *args):
    code = call(name, *args)
    assert code == 0, f"{name} returned {code}"

def new(name, *args, kind=c_void_p):
    out = kind()
    ok(name, byref(out), *args)
    return out

MIB = 1 << 20
ok("cuInit", 0)
context = new("cuDevicePrimaryCtxRetain", 0)
ok("cuCtxSetCurrent", context)
stream = new("cuStreamCreate", 1)

def alloc(size):
    return new("cuMemAlloc_v2", size, kind=c_uint64).value
"""
"""Names for the scripts: `call`, `ok`, `new`, `alloc`, a context and a stream."""

MEMORY_PRELUDE = """
sys.path.insert(0, os.environ["TESTS"])
from doubles.gpus import read_state

def took(kind):
    usage = next(iter(read_state(os.environ["FAKE_CUDA_STATE"]).client("p").usage.values()))
    assert usage.memory == sum(usage.kinds.values())
    return usage.kinds[kind]

PAGE = 2 * MIB

class Where(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]

class Physical(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("where", Where), ("more", c_uint64 * 4)]

class Pool(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("where", Where), ("security", c_void_p), ("most", c_size_t),
                ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 54)]

class Alloc(ctypes.Structure):
    _fields_ = [("pool", Pool), ("access", c_void_p), ("count", c_size_t), ("bytes", c_size_t), ("address", c_uint64)]

class Shape(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("depth", c_size_t), ("format", c_int),
                ("channels", c_uint), ("flags", c_uint)]
"""
"""More names for the scripts: `took(kind)` (bytes of the first device by the state file), and structures of cuda.h."""


def program(state: Path, script: str, *, folder: str = "libcuda", **more: str) -> State:
    """Run a script of calls in a separate process. AssertionError with its output if it fails."""
    double = str(BUILD / "doubles" / folder)
    done = subprocess.run(
        [sys.executable, "-S", "-c", PRELUDE + script],
        env={"LD_LIBRARY_PATH": double, "FAKE_CUDA_STATE": str(state), "FAKE_CUDA_LABEL": "p", **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_state(state)


def memory_program(state: Path, script: str, **more: str) -> None:
    """Run a script of memory calls. AssertionError with its output if it fails."""
    tests = str(Path(__file__).resolve().parents[2])
    program(state, MEMORY_PRELUDE + script, TESTS=tests, **more)
