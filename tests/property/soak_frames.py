"""Ten million frames of a hostile tenant: some directly to the parser, some through sockets next to well-behaved
tenants.

Nine of ten frames go to the parser: noise, frames with changed bytes, frames of a wrong length. Processes of one tenant
send the other frames. Each process first sends frames that require an answer, then frames like the parser's, until it
is disconnected. At the same time another tenant requests memory and the token.

Counters, which must be 0:
- `broken`: packets that gave neither a valid frame nor a ProtocolError, and exceptions of the agent.
- `lost`: missing answers.
- `kept`: credits of exited processes.
- `grown_mb`: growth of this process's memory since the first tenth of the run, in excess of `_FLAT_MB`.
- `descriptors`: descriptors opened since then.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from random import Random

from harness.soak import Run
from sharepod import protocol
from sharepod.agent.sockets.refusals import ClientRefusal
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.agent.tenants.served import ServedTenant
from sharepod.protocol import ProtocolError
from unit.agent.client import GI, GPU0, GPU1, Client, memory_used, row, served_in, settings_in, tenants_with

FRAMES = 10_000_000
WANTED = {"broken": 0, "lost": 0, "kept": 0, "grown_mb": 0, "descriptors": 0}
_LIMIT = 4 * GI
_BATCH = 2000
"""Number of packets that the parser gets between two processes of the hostile tenant."""
_SENT = 200
"""Frames that a process sends on average."""
_CHECK_EACH = 5
"""Rounds between two checks that nothing of exited processes remains."""
_WARM = 0.1
"""Part of the run after which memory must no longer grow: by then all code has run, and the C library's allocator has
reserved its arenas."""
_FLAT_MB = 8
"""Growth in MB that is tolerated, because the allocator creates and frees arenas."""
_UNEXPECTED = re.compile(r"^\w+(Error|Exception|Exit|Interrupt)?\(")


class _Packets:
    """Random packets, derived from every kind of frame that a client or the agent sends."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._said = [protocol.encode(frame) for frame in _frames(random)]

    def any(self) -> bytes:
        draw = self._random.random()
        if draw < 0.05:
            return self._random.randbytes(self._random.randrange(protocol.FRAME_MAX + 2))
        packet = self._random.choice(self._said)
        if draw < 0.15:
            length = self._random.randrange(protocol.FRAME_MAX + 2)
            return packet[:length].ljust(length, b"\0")
        if draw < 0.25:
            return packet
        changed = bytearray(packet)
        if draw < 0.35:  # replace all bytes from a random position on by one repeated byte
            start = self._random.randrange(len(changed))
            changed[start:] = self._random.choice((bytes([255]), self._random.randbytes(1))) * (len(changed) - start)
            return bytes(changed)
        for _ in range(self._random.choice((1, 1, 1, 2, 4))):
            changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed)


def _frames(random: Random) -> list[protocol.Frame]:
    def u32() -> int:
        return random.randrange(1 << 32)

    def size() -> int:
        return random.randrange(1, (1 << 62) + 1) if random.random() < 0.5 else random.randrange(1, _LIMIT)

    def flag() -> bool:
        return random.random() < 0.5

    def gpu() -> int:
        return random.randrange(protocol.MAX_GPUS)

    frames: list[protocol.Frame] = []
    for _ in range(100):
        terms = tuple(
            protocol.GpuTerms(random.randbytes(16), random.randrange(500), random.randrange(500, 1001), size(), flag())
            for _ in range(random.randrange(1, protocol.MAX_GPUS + 1))
        )
        frames += [
            protocol.Hello(1, random.randrange(1, 1 << 16), "abc123", flag(), flag()),
            protocol.Want(random.randrange(1, 1 << protocol.MAX_GPUS)),
            protocol.Draining(u32(), u32()),
            protocol.Drained(u32(), u32(), flag(), flag()),
            protocol.Reserve(u32(), gpu(), size(), flag()),
            protocol.Release(gpu(), size(), flag()),
            protocol.MemInfo(u32(), gpu(), size()),
            protocol.Welcome(u32(), terms, u32()),
            protocol.Grant(u32(), u32(), random.randrange(1, 1 << protocol.MAX_GPUS), flag(), flag(), flag()),
            protocol.Refused(random.choice(list(protocol.RefusedReason)), "text"),
        ]
    return frames


class _Tenants:
    """A hostile tenant and a well-behaved one, both served by this process."""

    def __init__(self, tenants: TenantRegistry, random: Random, packets: _Packets, counts: Counter[str]) -> None:
        self._tenants = tenants
        self._random = random
        self._packets = packets
        self._counts = counts
        self._bad: ServedTenant = {each.row.id: each for each in served_in(tenants)}["bad"]
        add = self._bad.refusals.add

        def noted(why: ClientRefusal, *, pid: int, error: str | None = None) -> None:
            counts["refused"] += 1
            counts["broken"] += bool(_UNEXPECTED.match(error or ""))
            add(why, pid=pid, error=error)

        self._bad.refusals.add = noted  # type: ignore[method-assign]

    async def process(self) -> None:
        """Act as one process of the hostile tenant."""
        client = await Client.connect(self._tenants.directory("bad"), hello=False)
        try:
            if self._random.random() < 0.9:
                await self._send(client, protocol.encode(protocol.Hello(1, 1, "abc123")))
                await client.expect(protocol.Welcome)
                await self._converse(client, self._random.randrange(2 * _SENT))
            for _ in range(50):  # send frames until the process is disconnected
                await self._send(client, self._packets.any())
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            client.close()

    async def _converse(self, client: Client, frames: int) -> None:
        """Send frames. Each frame about memory must get its answer, in the order of sending."""
        awaited: deque[int] = deque()
        for seq in range(frames):
            kind, gpu = self._random.randrange(4), self._random.randrange(2)
            if kind == 0:
                frame: protocol.Frame = protocol.Want(self._random.randrange(1, 4))
            elif kind == 1:
                frame = protocol.MemInfo(seq, gpu, 0)
            else:
                frame = protocol.Reserve(seq, gpu, self._random.randrange(1, 1 << 20))
            await self._send(client, protocol.encode(frame))
            if kind:
                awaited.append(seq)
            if len(awaited) >= 16:
                await self._collect(client, awaited)
        await self._collect(client, awaited)

    async def _collect(self, client: Client, awaited: deque[int]) -> None:
        while awaited:
            try:
                frame = await client.receive()
            except TimeoutError:
                frame = None
            if frame is None:
                self._counts["lost"] += len(awaited)
                raise ConnectionResetError
            if isinstance(frame, protocol.Reserved | protocol.Memory):
                self._counts["answers"] += 1
                self._counts["lost"] += frame.seq != awaited.popleft()

    async def _send(self, client: Client, packet: bytes) -> None:
        self._counts["frames"] += 1
        self._counts["sent"] += 1
        while True:
            try:
                client.send_raw(packet)
            except BlockingIOError:  # its socket is full; the agent continues to read in the loop's next turn
                await asyncio.sleep(0)
            else:
                return

    async def check(self) -> None:
        """Check that no state of exited processes remains, and that the other tenant is served."""
        deadline = time.monotonic() + 10
        while self._bad.connected and time.monotonic() < deadline:  # noqa: ASYNC110 - the loop has to turn
            await asyncio.sleep(0)
        self._bad._exited(os.getpid())
        self._counts["kept"] += any(memory_used(self._tenants, "bad").values())
        good = await Client.connect(self._tenants.directory("good"))
        try:
            self._counts["lost"] += await good.reserve(_LIMIT) != _LIMIT
            good.send(protocol.Want(3))
            await good.expect(protocol.Grant)
        except (AssertionError, TimeoutError):
            self._counts["lost"] += 1
        finally:
            good.close()


def _parse(packets: _Packets, counts: Counter[str], most: int) -> None:
    for _ in range(most):
        packet = packets.any()
        for parse in (protocol.parse_client, protocol.parse_agent):
            try:
                frame = parse(packet)
                counts["accepted"] += 1
                counts["broken"] += parse(protocol.encode(frame)) != frame
            except ProtocolError:
                continue
            except Exception:  # an exception of any kind is a fault that the run has found
                counts["broken"] += 1
    counts["frames"] += most


def _resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def _play(run: Run, directory: Path, counts: Counter[str]) -> None:
    settings = settings_in(directory, recall_ms=1, grace_ms=50, frames_per_s=1_000_000)
    rows = [row(name, 500, gpus=(GPU0, GPU1), memory=_LIMIT) for name in ("bad", "good")]
    packets = _Packets(run.random)
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: counts.update(broken=1))
    async with tenants_with(settings, rows) as registry:
        tenants = _Tenants(registry, run.random, packets, counts)
        warm: tuple[float, int] | None = None
        rounds = 0
        while counts["frames"] < FRAMES and not run.over():
            _parse(packets, counts, min(_BATCH, FRAMES - counts["frames"]))
            await tenants.process()
            rounds += 1
            if rounds % _CHECK_EACH == 0:
                await tenants.check()
                done = max(counts["frames"] / FRAMES, run.elapsed() / run.seconds)
                if warm is None and done >= _WARM:
                    warm = _resident_mb(), _descriptors()
        await tenants.check()
        if warm is not None:
            counts["grown_mb"] = max(0, round(_resident_mb() - warm[0]) - _FLAT_MB)
            counts["descriptors"] = max(0, _descriptors() - warm[1])


def soak(run: Run) -> dict[str, int]:
    """Send frames until all are sent or the time is over. The count `short` is the number of `FRAMES` that were
    not sent."""
    counts: Counter[str] = Counter(dict.fromkeys(("frames", "sent", "answers", "refused", "accepted", *WANTED), 0))
    with tempfile.TemporaryDirectory(prefix="shp-") as directory, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_play(run, Path(directory), counts))
    return {**counts, "short": max(0, FRAMES - counts["frames"])}
