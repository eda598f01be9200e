"""Patterns of real programs, each of which checks its own results.

    --pattern NAME     one of PATTERNS; `run` repeats its round for some seconds and counts the wrong rounds

A round that raises an exception ends the run. Each pattern needs PyTorch, JAX or CuPy, or only the driver.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from conversation import Answer, by_hand
from driver_calls import Driver, DriverError

Round = Callable[[], bool]
_MIB = 1 << 20
_LEARNED = 12
"""Number of pieces of 64 MiB. While they are allocated, the agent learns how much memory a context takes, which is half
a GiB or more."""


def compiled() -> Round:
    """Pattern: a model under torch.compile with CUDA graphs. Each batch size has its own graph."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).cuda().eval()
    fast = torch.compile(model, mode="reduce-overhead")

    def one() -> bool:
        right = True
        with torch.no_grad():
            for batch in (8, 16):
                x = torch.randn(batch, 256, device="cuda")
                torch.compiler.cudagraph_mark_step_begin()
                right &= bool(torch.allclose(fast(x).clone(), model(x), atol=1e-3))
        return right

    for _ in range(3):
        one()
    return one


def loader() -> Round:
    """Pattern: batches from worker processes. Each batch is copied from pinned memory while the previous one is
    used."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(4096, dtype=torch.int64).repeat(64, 1).T.contiguous())
    batches = DataLoader(data, batch_size=256, num_workers=2, pin_memory=True, persistent_workers=True)

    def one() -> bool:
        total = torch.zeros(1, dtype=torch.int64, device="cuda")
        for (batch,) in batches:
            total += batch.to("cuda", non_blocking=True).sum()
        return int(total.item()) == 64 * 4095 * 4096 // 2

    one()
    return one


def _sums(asked: Any, answers: Any) -> None:
    import torch

    while (tensor := asked.get()) is not None:
        answers.put(int(tensor.sum(dtype=torch.int64).item()))
        del tensor


def shared_tensors() -> Round:
    """Pattern: tensors that another process reads by CUDA's interprocess handles."""
    import torch
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    asked, answers = context.Queue(), context.Queue()
    context.Process(target=_sums, args=(asked, answers), daemon=True).start()
    number = [0]

    def one() -> bool:
        number[0] += 1
        tensor = torch.full((_MIB,), number[0] % 1000, dtype=torch.int32, device="cuda")
        asked.put(tensor)
        return bool(answers.get(timeout=60) == (number[0] % 1000) * _MIB)

    one()
    return one


def collectives() -> Round:
    """Pattern: NCCL collectives with one rank."""
    import torch
    import torch.distributed as ranks

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)

    def one() -> bool:
        tensor = torch.full((_MIB,), 3, dtype=torch.int32, device="cuda")
        ranks.all_reduce(tensor)
        gathered = [torch.empty_like(tensor)]
        ranks.all_gather(gathered, tensor)
        return int(gathered[0].sum(dtype=torch.int64).item()) == 3 * _MIB

    one()
    return one


def threads() -> Round:
    """Pattern: threads that each launch into their own stream and then end."""
    import torch

    base = torch.arange(4096, device="cuda")

    def one() -> bool:
        sums: list[int] = []

        def work(number: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                sums.append(int((base + number).sum().item()) - 4096 * number)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(32)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sums == [4095 * 4096 // 2] * 32

    one()
    return one


def pooled() -> Round:
    """Pattern: PyTorch with the driver's memory pools. Pieces of various sizes, on four streams, are passed from each
    stream to the next."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    import torch

    streams = [torch.cuda.Stream() for _ in range(4)]
    number = [0]

    def one() -> bool:
        number[0] += 1
        with torch.cuda.stream(streams[0]):
            piece = torch.full((number[0] % 97 * _MIB // 4 + 1,), 1, dtype=torch.int32, device="cuda")
        for before, stream in itertools.pairwise(streams):
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                piece = piece + 1
        with torch.cuda.stream(streams[-1]):
            right = int(piece.min().item()) == int(piece.max().item()) == 4
        torch.cuda.synchronize()
        return right

    one()
    return one


def jitted() -> Round:
    """Pattern: training steps with donated buffers, in JAX."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as numbers

    def loss(weights: Any, x: Any) -> Any:
        return numbers.mean((numbers.tanh(x @ weights) - 0.5) ** 2)

    step = jax.jit(lambda weights, x: weights - 0.1 * jax.grad(loss)(weights, x), donate_argnums=0)
    x = jax.random.normal(jax.random.PRNGKey(1), (512, 256))
    first: list[float] = []

    def one() -> bool:
        weights = jax.random.normal(jax.random.PRNGKey(2), (256, 256))
        for _ in range(20):
            weights = step(weights, x)
        first.append(float(loss(weights, x)))
        return abs(first[-1] - first[0]) < 1e-4

    one()
    return one


def cupy_streams() -> Round:
    """Pattern: a custom kernel, pinned memory, and streams that wait for each other's events, in CuPy."""
    import cupy
    import numpy

    kernel = cupy.RawKernel(
        'extern "C" __global__ void add(int* x) { x[blockIdx.x * 256 + threadIdx.x] += 7; }',
        "add",
    )
    size = 1 << 18
    pinned = numpy.frombuffer(cupy.cuda.alloc_pinned_memory(4 * size), dtype=numpy.int32, count=size)
    pinned[:] = numpy.arange(size, dtype=numpy.int32)
    upward, working = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream()

    def one() -> bool:
        there = cupy.empty(size, dtype=numpy.int32)
        cupy.cuda.Device().synchronize()
        there.set(pinned, stream=upward)
        working.wait_event(upward.record())
        with working:
            for _ in range(5):
                kernel((size // 256,), (256,), (there,))
        working.synchronize()
        return bool((there.get() == pinned + 35).all())

    one()
    return one


def contexts() -> Round:
    """Pattern: contexts that are created, launched into and destroyed with pending work, while another thread uses its
    own context."""
    driver = Driver()
    steady = driver.launcher(driver.functions({100})[100], driver.stream())

    def one() -> bool:
        codes: list[int] = []

        def lives() -> None:
            for _ in range(3):
                context = ctypes.c_void_p()
                driver.call("cuCtxCreate_v2", ctypes.byref(context), 0, driver.device)
                launch = driver.launcher(driver.functions({200})[200], driver.stream())
                codes.extend(launch() for _ in range(20))
                driver.call("cuCtxDestroy_v2", context)

        others = [threading.Thread(target=lives) for _ in range(2)]
        for other in others:
            other.start()
        while any(other.is_alive() for other in others):
            codes.append(steady())
            time.sleep(0.0001)
        driver.call("cuCtxSynchronize")
        return len(codes) > 120 and not any(codes)

    one()
    return one


class _Properties(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = (("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int))


def exported() -> Round:
    """Pattern: memory that is exported as a descriptor, freed, imported again and read."""
    driver, size = Driver(), 256 * _MIB
    properties = _Properties(1, 1, 1, driver.device, None, (ctypes.c_ubyte * 8)())
    access = _Access(1, driver.device, 3)

    def mapped(handle: ctypes.c_ulonglong) -> ctypes.c_ulonglong:
        address = ctypes.c_ulonglong()
        driver.call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0),
                    ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))  # fmt: skip
        driver.call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        driver.call("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
        return address

    def assert_freed(address: ctypes.c_ulonglong) -> None:
        driver.call("cuMemUnmap", address, ctypes.c_size_t(size))
        driver.call("cuMemAddressFree", address, ctypes.c_size_t(size))

    number = [0]

    def one() -> bool:
        number[0] += 1
        handle, again, descriptor = ctypes.c_ulonglong(), ctypes.c_ulonglong(), ctypes.c_int()
        driver.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties),
                    ctypes.c_ulonglong(0))  # fmt: skip
        address = mapped(handle)
        driver.call("cuMemsetD32_v2", address, ctypes.c_uint(number[0]), ctypes.c_size_t(size // 4))
        driver.call("cuCtxSynchronize")
        driver.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, 1, ctypes.c_ulonglong(0))
        driver.call("cuMemRelease", handle)
        assert_freed(address)
        driver.call("cuMemImportFromShareableHandle", ctypes.byref(again), ctypes.c_void_p(descriptor.value), 1)
        os.close(descriptor.value)
        address = mapped(again)
        value = ctypes.c_uint()
        last = ctypes.c_ulonglong(address.value + size - 4)
        driver.call("cuMemcpyDtoH_v2", ctypes.byref(value), last, ctypes.c_size_t(4))
        assert_freed(address)
        driver.call("cuMemRelease", again)
        return value.value == number[0]

    one()
    return one


def callbacks() -> Round:
    """Pattern: kernels in a blocking stream, host functions in the legacy stream, and events between streams."""
    driver = Driver()
    blocking = ctypes.c_void_p()
    driver.call("cuStreamCreate", ctypes.byref(blocking), 0)
    other, event = driver.stream(), driver.event()
    functions = driver.functions({100})
    launches = [driver.launcher(functions[100], stream) for stream in (blocking, other)]
    called: list[int] = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: called.append(number or 0))

    def one() -> bool:
        called.clear()
        codes = []
        for number in range(1, 21):
            codes.append(launches[0]())
            driver.call("cuLaunchHostFunc", None, note, ctypes.c_void_p(number))
            driver.call("cuEventRecord", event, blocking)
            driver.call("cuStreamWaitEvent", other, event, 0)
            codes.append(launches[1]())
        driver.call("cuCtxSynchronize")
        return called == list(range(1, 21)) and not any(codes)

    one()
    return one


def full() -> Round:
    """Pattern: memory of pools and of the device is allocated up to the limit, repeatedly. Freed memory must be
    allocatable again."""
    driver, piece = Driver(), 64 * _MIB
    stream = driver.stream()
    most: list[int] = []

    def one() -> bool:
        held: list[ctypes.c_ulonglong] = []
        try:
            while len(held) < 1024:
                address = ctypes.c_ulonglong()
                driver.call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(piece), stream)
                held.append(address)
        except DriverError as error:
            if error.code != 2:
                raise
        for address in held:
            driver.call("cuMemFreeAsync", address, stream)
        driver.call("cuStreamSynchronize", stream)
        most.append(len(held))
        return abs(most[-1] - most[-2:][0]) <= _LEARNED

    one()
    return one


PATTERNS: dict[str, Callable[[], Round]] = {
    "torch.compile with graphs": compiled,
    "worker processes and pinned memory": loader,
    "tensors shared with a process": shared_tensors,
    "NCCL": collectives,
    "threads that come and go": threads,
    "PyTorch on cudaMallocAsync": pooled,
    "JAX": jitted,
    "CuPy": cupy_streams,
    "contexts destroyed with work": contexts,
    "exported memory": exported,
    "functions in the legacy stream": callbacks,
    "memory up to the limit": full,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pattern", choices=PATTERNS, required=True)
    parser.add_argument("--seconds", type=float, help="measure once and end")
    arguments = parser.parse_args()
    one = PATTERNS[arguments.pattern]()

    def run(*, settle: float, seconds: float, tail: float = 0.0) -> Answer:
        """Repeat the round. Return the number of rounds, and of rounds with a wrong result."""
        until = time.monotonic() + settle + seconds + tail
        rounds = wrong = 0
        longest = 0.0
        while (begin := time.monotonic()) < until:
            wrong += not one()
            rounds += 1
            longest = max(longest, time.monotonic() - begin)
        return {"rate": rounds / (settle + seconds + tail), "rounds": rounds, "wrong": wrong, "longest_s": longest}

    by_hand({"run": run}, arguments.seconds)


if __name__ == "__main__":
    main()
