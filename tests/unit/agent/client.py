"""Scripted client of the agent, and the objects that a test needs with it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from sharepod import protocol
from sharepod.agent.devices.inventory import Process, Reading
from sharepod.agent.settings import AgentMode, AgentSettings
from sharepod.agent.tenants.registry import TenantRegistry
from sharepod.agent.tenants.served import ServedTenant
from sharepod.agent.tenants.view import TenantView
from sharepod.api.gpunode import Gpu, Tenant

GPU0 = "GPU-00000000-0000-0000-0000-000000000000"
GPU1 = "GPU-11111111-1111-1111-1111-111111111111"
GI = 1 << 30
TIMEOUT_S = 10.0

F = TypeVar("F", bound=protocol.AgentFrame)


def settings_in(directory: Path, **changes: Any) -> AgentSettings:
    """Return settings of an agent that keeps all state below `directory`."""
    hook = directory / "hook.so"
    if not hook.exists():
        hook.write_bytes(b"not really a hook")
    values: dict[str, Any] = {
        "mode": AgentMode.STANDALONE,
        "state_dir": directory / "state",
        "hook_file": hook,
        "inventory_file": directory / "inventory.yaml",
        "tenants_file": directory / "tenants.yaml",
        "inventory_interval_s": 0.05,
        "http_bind": "127.0.0.1",
        "http_port": 0,
    }
    return AgentSettings(**(values | changes))


def row(tenant_id: str, request: int = 500, limit: int = 1000, **changes: Any) -> Tenant:
    values: dict[str, Any] = {
        "id": tenant_id,
        "namespace": "default",
        "pod_name": tenant_id,
        "gpus": (GPU0,),
        "request_milli": request,
        "limit_milli": limit,
        "memory": 4 * GI,
    }
    return Tenant(**(values | changes))


def reading(*processes: Process) -> Reading:
    """Return a reading of two GPUs with these processes on them."""
    gpus = tuple(
        Gpu(uuid=uuid, index=index, model="Simulated", memory=16 * GI) for index, uuid in enumerate((GPU0, GPU1))
    )
    return Reading(gpus, processes)


@asynccontextmanager
async def tenants_with(settings: AgentSettings, rows: Sequence[Tenant]) -> AsyncIterator[TenantRegistry]:
    """Run a registry to which these rows have been applied. It is closed at the end."""
    tenants = TenantRegistry(settings, changed=lambda: None)
    await tenants.start()
    try:
        await tenants.apply(rows)
        yield tenants
    finally:
        await tenants.close()


def view_of(tenants: TenantRegistry, tenant_id: str) -> TenantView:
    """Return the view (`TenantView`) of one tenant, as metrics and HTTP read it."""
    return next(view for view in tenants.views() if view.row.id == tenant_id)


def memory_used(tenants: TenantRegistry, tenant_id: str) -> Mapping[str, int]:
    """Return the bytes of memory that a tenant uses on each GPU, by the GPU's UUID."""
    return view_of(tenants, tenant_id).memory_used


def served_in(tenants: TenantRegistry) -> list[ServedTenant]:
    """Return the objects (`ServedTenant`) of all tenants that the registry serves."""
    return [entry.serving for entry in tenants._entries.values() if entry.serving is not None]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that becomes true without further actions of the test."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the loop has to turn
            await asyncio.sleep(0.005)


class Client:
    """One connection to a tenant's socket, as a hook makes it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.hints_fd: int | None = None
        self.welcome: protocol.Welcome | None = None

    @classmethod
    async def connect(cls, directory: Path | None, *, hello: bool = True) -> Client:
        """Connect to the socket in a tenant's directory, and send HELLO."""
        assert directory is not None, "the tenant has a directory"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        fd = os.open(directory, os.O_PATH)
        try:
            sock.connect(f"/proc/self/fd/{fd}/agent.sock")
        except OSError:
            sock.close()
            raise
        finally:
            os.close(fd)
        client = cls(sock)
        if hello:
            client.send(protocol.Hello(1, 1, "abc123"))
            client.welcome = await client.expect(protocol.Welcome)
        return client

    def send(self, frame: protocol.Frame) -> None:
        self.send_raw(protocol.encode(frame))

    def send_raw(self, packet: bytes) -> None:
        self.sock.send(packet)

    async def receive(self, timeout_s: float = TIMEOUT_S) -> protocol.AgentFrame | None:
        """Return the next frame. None at the end of the connection."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        loop.add_reader(self.sock.fileno(), wake)
        try:
            await asyncio.wait_for(readable, timeout_s)
        finally:
            loop.remove_reader(self.sock.fileno())
        try:
            packet, fds, _flags, _address = socket.recv_fds(self.sock, protocol.FRAME_MAX + 1, 4)
        except ConnectionResetError:
            return None
        for fd in fds:
            if self.hints_fd is not None:
                os.close(self.hints_fd)
            self.hints_fd = fd
        return protocol.parse_agent(packet) if packet else None

    async def expect(self, kind: type[F], timeout_s: float = TIMEOUT_S) -> F:
        """Return the next frame. Fails if it is of another kind."""
        frame = await self.receive(timeout_s)
        assert isinstance(frame, kind), f"{frame} came, not {kind.__name__}"
        return frame

    async def granted_again(self, ended: int) -> protocol.Grant:
        """Return the next grant. A REVOKE of the grant `ended` may come before it: the agent sent that REVOKE before it
        had read the client's DRAINED.
        """
        while (frame := await self.receive()) == protocol.Revoke(ended):
            pass
        assert isinstance(frame, protocol.Grant), f"{frame} came, not Grant"
        return frame

    async def granted_anew(self) -> protocol.Grant:
        """Return the next grant that is not a renewal or a change of terms of an earlier grant."""
        while (frame := await self.receive()) is not None:
            if isinstance(frame, protocol.Grant) and not frame.renews:
                return frame
        raise AssertionError("the connection has ended")

    async def nothing_comes(self, for_s: float = 0.1) -> bool:
        """Return True if no frame arrives for this many seconds."""
        try:
            frame = await self.receive(for_s)
        except TimeoutError:
            return True
        raise AssertionError(f"{frame} came")

    async def ends(self) -> bool:
        """Return True if the connection ends before any further frame."""
        return await self.receive() is None

    async def told_to_end(self) -> int:
        """Return the id of the grant that the next frame ends: by new terms with an earlier end, or by a revocation."""
        frame = await self.receive(TIMEOUT_S)
        assert isinstance(frame, protocol.Revoke) or (isinstance(frame, protocol.Grant) and frame.renews), frame
        return frame.grant_id

    async def granted(self) -> protocol.Grant:
        self.send(protocol.Want(1))
        return await self.expect(protocol.Grant)

    async def reserve(self, size: int, gpu: int = 0, seq: int = 1, *, handover: bool = False) -> int:
        """Reserve memory; return the credited bytes."""
        self.send(protocol.Reserve(seq, gpu, size, handover))
        answer = await self.expect(protocol.Reserved)
        assert (answer.seq, answer.gpu) == (seq, gpu)
        return answer.bytes

    def close(self) -> None:
        self.sock.close()
        if self.hints_fd is not None:
            os.close(self.hints_fd)
            self.hints_fd = None
