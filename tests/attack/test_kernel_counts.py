"""Limits that the kernel counts per user over all containers: no tenant runs as a user of the agent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from sharepod import protocol
from sharepod.agent.apart.confinement import SHOWN
from unit.agent.apart.test_two_processes import apart, parts
from unit.agent.client import Client, row, until
from unit.agent.program import Program, tenant_directory, write_inventory, write_tenants
from unit.agent.test_hand_offs import Pair, World, world

__all__ = ["world"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run as the user of a Pod")

LARGEST_OF_A_POD = (1 << 31) - 1
"""Largest `runAsUser` that the API server takes."""
_AT_ONCE = 253
"""Largest number of descriptors in one message, by the Linux kernel's limit (SCM_MAX_FD)."""
_UCRED = struct.Struct("iII")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "hook.so").write_bytes(b"not really a hook")
    write_inventory(tmp_path)
    write_tenants(tmp_path, [row("a"), row("b")])
    return tmp_path


@contextlib.contextmanager
def descriptors_in_flight(user: int) -> Iterator[None]:
    """Run a process of this user during the block that has as many descriptors in flight between sockets as Linux
    allows one user."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(user, user, user)
            pairs = []
            with contextlib.suppress(OSError):
                while True:
                    pairs.append(socket.socketpair())
                    for _ in range(100):
                        socket.send_fds(pairs[-1][0], [b"x"], [0] * _AT_ONCE)
            theirs.send(b"full")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert ours.recv(4) == b"full"
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()
        theirs.close()


def sender_of_next(sock: socket.socket) -> int:
    """Receive a packet; return the user that the kernel reports as its sender."""
    _packet, ancillary, _flags, _address = sock.recvmsg(1024, socket.CMSG_SPACE(_UCRED.size) + 64)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            for (fd,) in struct.iter_unpack("i", content):
                os.close(fd)
    credentials = [content for level, kind, content in ancillary if kind == socket.SCM_CREDENTIALS]
    return int(_UCRED.unpack(credentials[0])[1])


async def asking(directory: Path, tenant: str) -> Client:
    """Connect as a tenant whose socket reports the sender of each packet (SO_PASSCRED), set before the first packet
    arrives."""
    client = await Client.connect(tenant_directory(directory, tenant), hello=False)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    client.send(protocol.Hello(1, protocol.VERSION_MAX, "abc123"))
    return client


async def sender(client: Client) -> int:
    found: list[int] = []

    def received() -> bool:
        with contextlib.suppress(BlockingIOError):
            found.append(sender_of_next(client.sock))
        return bool(found)

    await until(received)
    return found[0]


def real_user(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:"))


def was_killed(program: Program) -> list[str]:
    return [
        line["event"] for line in program.log if "was killed" in line["event"] or "lost their link" in line["event"]
    ]


@pytest.mark.promise("security-own-counts")
async def test_a_pod_of_the_user_that_tenants_see_takes_no_descriptor_in_flight_from_the_agent(
    directory: Path,
) -> None:
    async with apart(directory) as program:
        spy = await asking(directory, "a")
        with descriptors_in_flight(await sender(spy)):
            for tenant in ("a", "b"):
                (await Client.connect(tenant_directory(directory, tenant))).close()
        assert not was_killed(program)
        spy.close()
        assert await program.end() == 0


@pytest.mark.promise("security-own-counts")
async def test_the_agents_processes_are_counted_by_users_that_no_pod_can_name_and_no_tenant_sees(
    directory: Path,
) -> None:
    seen: set[int] = set()
    for _start in range(2):
        async with apart(directory) as program:
            users = {name: real_user(pid) for name, pid in parts(program).items()}
            assert min(users.values()) > LARGEST_OF_A_POD
            assert users["worker"] != users["privileged"]
            assert not seen & set(users.values())
            seen |= set(users.values())
            clients = [await asking(directory, tenant) for tenant in ("a", "b")]
            for client in clients:
                assert await sender(client) not in seen, "the greeting"
            clients[0].send(protocol.Want(1))
            assert await sender(clients[0]) not in seen, "a grant"
            for client in clients:
                client.close()
            assert await program.end() == 0


@pytest.mark.promise("security-own-counts")
def test_a_hand_off_by_the_event_loops_wait_shows_the_effective_user(world: World) -> None:
    successor: Pair = world.pairs[1]
    successor.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    world.put()
    world.pairs[0].sends(protocol.Drained(7, wanting=True))
    os.setresuid(LARGEST_OF_A_POD + 9, SHOWN, -1)
    try:
        world.wait()
    finally:
        os.setresuid(0, 0, -1)
    assert len(world.made) == 1
    assert sender_of_next(successor.theirs) == SHOWN
