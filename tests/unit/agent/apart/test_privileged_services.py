"""A hostile worker gets from the privileged process only the ledger's tenants, their sockets and the kept files."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sharepod.agent.apart import calls, privileged_services
from sharepod.agent.apart.link import Failure, Line, PartService
from sharepod.agent.apart.outbox import close_all
from sharepod.agent.apart.privileged_services import PrivilegedServices
from sharepod.agent.devices.inventory import SimulatedInventory
from sharepod.agent.settings import AgentSettings, UnenforcedPolicy
from sharepod.agent.sockets.peers import peer_of
from sharepod.agent.state.directory import StateDir
from sharepod.agent.state.handover import NOTHING_INHERITED, Handover, start_time
from sharepod.agent.state.kept_descriptors import NOTHING_KEPT
from sharepod.api.gpunode import TenantState
from sharepod.web.metrics_access import TOKEN_REVIEWS
from unit.agent.client import GPU0, row, settings_in
from unit.agent.program import write_inventory


class World:
    """Privileged process and worker, played as two ends in the test process."""

    def __init__(self, settings: AgentSettings) -> None:
        inventory = SimulatedInventory(settings.state_dir.parent / "inventory.yaml")
        self.privileged = PrivilegedServices(settings, inventory, NOTHING_KEPT, lambda report: None)
        self.worker, self.there = Line(PartService({}, {}, calls.ERRORS)), Line(self.privileged.service())
        ours, theirs = socket.socketpair()
        self.worker.connect(ours)
        self.there.connect(theirs)

    async def ask(self, call: Any, argument: Any, *descriptors: int) -> tuple[Any, list[int]]:
        return await self.worker.call(call, argument, descriptors)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    settings = settings_in(tmp_path, unenforced_policy=UnenforcedPolicy.KILL)
    write_inventory(settings.state_dir.parent)
    world = World(settings)
    await world.privileged.prepare()
    world.privileged.rows, world.privileged.known = {"a": row("a", 300), "b": row("b", 300)}, True
    yield world
    world.worker.close()
    world.there.close()
    world.privileged.close()


async def _listening(world: World, tenant_id: str) -> int:
    """Let the privileged process open a tenant's files. Return the descriptor of the tenant's listening socket."""
    _made, (handover, listener) = await world.ask(calls.PRIVILEGED_OPEN, (calls.FilesAsked(tenant_id, 8),))
    os.close(handover)
    return listener


async def _connected(world: World, tenant_id: str) -> tuple[socket.socket, socket.socket]:
    """Connect to a tenant's socket. Return (the client's end, the accepted connection)."""
    listener = socket.socket(fileno=await _listening(world, tenant_id))
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(world.privileged.state.path(tenant_id), os.O_PATH)
    client.connect(f"/proc/self/fd/{folder}/agent.sock")
    os.close(folder)
    accepted, _address = listener.accept()
    listener.close()
    return client, accepted


@pytest.mark.promise("security-teller-asks")
@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (calls.PRIVILEGED_CREATE, calls.DirectoryWanted("c", "")),
        (calls.PRIVILEGED_CREATE, calls.DirectoryWanted("../hooks", "")),
        (calls.PRIVILEGED_COMPLETE, calls.DirectoryWanted("c", "")),
        (calls.PRIVILEGED_OPEN, (calls.FilesAsked("..", 4),)),
        (calls.PRIVILEGED_OPEN, (calls.FilesAsked("a", 4), calls.FilesAsked("c", 4))),
        (calls.PRIVILEGED_SHUT, "c"),
        (calls.PRIVILEGED_SHUT, "a"),
        (calls.PRIVILEGED_REMOVE, "a"),
        (calls.PRIVILEGED_REMOVE, "../hooks"),
        (calls.PRIVILEGED_READ_FILE, "ledger.json"),
        (calls.PRIVILEGED_READ_FILE, "../../etc/shadow"),
        (calls.PRIVILEGED_REPLACE_FILE, calls.FileContent("ledger.json", "{}", False)),
        (calls.PRIVILEGED_REPLACE_FILE, calls.FileContent("hooks/x.so", "", False)),
        (calls.PRIVILEGED_IDENTIFY, "a"),
        (calls.PRIVILEGED_REVIEW, calls.ReviewWanted(TOKEN_REVIEWS, {})),
    ],
)
async def test_a_directory_of_no_tenant_of_the_ledger_is_refused(world: World, call: Any, argument: Any) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    with pytest.raises(PermissionError):
        await world.ask(call, argument)


@pytest.mark.promise("security-teller-asks")
async def test_limits_and_hook_follow_the_ledger_whatever_the_worker_sends(world: World) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", "gpu x request 1000\n"))
    assert "request 300 " in (world.privileged.state.path("a") / "limits").read_text()
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    assert (world.privileged.state.path("a") / "libsharepod.so").exists()


@pytest.mark.promise("security-teller-asks")
async def test_a_directory_of_which_something_is_left_is_not_removed(world: World) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    world.privileged.rows = {}
    world.privileged.residue = lambda tenant_id: "a volume"
    with pytest.raises(PermissionError):
        await world.ask(calls.PRIVILEGED_REMOVE, "a")
    world.privileged.residue = lambda tenant_id: None
    await world.ask(calls.PRIVILEGED_REMOVE, "a")
    assert not world.privileged.state.path("a").exists()


async def test_the_socket_is_the_same_until_it_is_not_the_directorys_any_more(world: World) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    path = world.privileged.state.path("a") / "agent.sock"
    inodes = []
    for _ in range(3):
        os.close(await _listening(world, "a"))
        inodes.append(path.stat().st_ino)
    assert len(set(inodes)) == 1
    path.unlink()
    os.close(await _listening(world, "a"))
    client, accepted = await _connected(world, "a")
    client.close()
    accepted.close()


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_the_files_of_several_tenants_come_with_one_answer_and_one_that_fails_harms_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(state: StateDir, tenant_id: str) -> socket.socket:
        if tenant_id == "a":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(state, tenant_id)

    real = StateDir.listen
    monkeypatch.setattr(StateDir, "listen", listen)
    before = _open_descriptors()
    asked = tuple(calls.FilesAsked(tenant_id, 8) for tenant_id in ("a", "b"))
    (failed, made), (descriptor, listener) = await world.ask(calls.PRIVILEGED_OPEN, asked)
    assert isinstance(failed, Failure)
    assert failed.errno == errno.ENOSPC
    assert made.unwritten is None
    Handover.adopt(descriptor, (GPU0,), made.handover.slots, NOTHING_INHERITED).close()
    with socket.socket(fileno=listener) as listening:
        assert listening.getsockname().endswith("agent.sock.new"), "it was bound before it was renamed"
    assert _open_descriptors() == before + 1, "the privileged process keeps what listens, and nothing else"


async def test_processes_of_several_tenants_are_watched_by_one_call_and_none_under_another_tenants_name(
    world: World,
) -> None:
    runs = await asyncio.create_subprocess_exec("sleep", "60")
    began = start_time(runs.pid)
    asked = tuple(calls.FilesAsked(tenant_id, 8) for tenant_id in ("a", "b"))
    (made, _made), (descriptor, *others) = await world.ask(calls.PRIVILEGED_OPEN, asked)
    kept = Handover.adopt(descriptor, (GPU0,), made.handover.slots, NOTHING_INHERITED, {runs.pid: began}.get)
    kept.add(runs.pid)
    kept.close()
    close_all(others)
    _made, descriptors = await world.ask(calls.PRIVILEGED_OPEN, asked)
    close_all(descriptors)
    wanted = tuple(calls.WatchWanted(tenant_id, runs.pid) for tenant_id in ("b", "a"))
    there, (pidfd,) = await world.ask(calls.PRIVILEGED_WATCH, wanted)
    assert there == (False, True)
    runs.kill()
    assert select.select([pidfd], [], [], 20)[0]
    await runs.wait()
    os.close(pidfd)


@pytest.mark.promise("security-teller-asks")
async def test_a_process_is_told_only_of_a_connection_to_the_tenants_socket(world: World) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    client, accepted = await _connected(world, "a")
    identity, (pidfd,) = await world.ask(calls.PRIVILEGED_IDENTIFY, "a", accepted.fileno())
    os.close(pidfd)
    assert (identity.pid, identity.watched) == (os.getpid(), True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for wrong in (ours, client):
        with pytest.raises(PermissionError):
            await world.ask(calls.PRIVILEGED_IDENTIFY, "a", wrong.fileno())
    null = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(OSError, match="non-socket"):
        await world.ask(calls.PRIVILEGED_IDENTIFY, "a", null)
    os.close(null)
    for each in (client, accepted, ours, theirs):
        each.close()


@pytest.mark.promise("security-teller-asks")
async def test_no_process_is_ended_but_the_tenants_and_none_without_the_policy(world: World) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    strangers = [await asyncio.create_subprocess_exec("sleep", "60") for _ in range(2)]
    world.privileged.owner_of = lambda pid: "a" if pid == strangers[0].pid else None
    for tenant, process in (("a", strangers[1]), ("b", strangers[0]), ("c", strangers[0])):
        world.worker.notify(calls.PRIVILEGED_END, calls.EndWanted(tenant, process.pid))
    world.worker.notify(calls.PRIVILEGED_END, calls.EndWanted("a", 1))
    await world.ask(calls.PRIVILEGED_EXISTING, None)
    assert all(process.returncode is None for process in strangers)
    world.worker.notify(calls.PRIVILEGED_END, calls.EndWanted("a", strangers[0].pid))
    assert await asyncio.wait_for(strangers[0].wait(), 20) == -9
    strangers[1].kill()
    await strangers[1].wait()


@pytest.mark.promise("security-teller-asks")
async def test_the_privileged_process_is_not_told_for_the_peer_of_a_listening_socket(world: World) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    listening = await _listening(world, "a")
    with pytest.raises(PermissionError):
        await world.ask(calls.PRIVILEGED_IDENTIFY, "a", listening)
    os.close(listening)


@pytest.mark.promise("security-teller-asks")
async def test_a_process_that_the_worker_writes_into_the_handover_file_is_not_ended(world: World) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    stranger = await asyncio.create_subprocess_exec("sleep", "60")
    began = start_time(stranger.pid)
    assert began is not None
    (made,), (descriptor, listener) = await world.ask(calls.PRIVILEGED_OPEN, (calls.FilesAsked("a", 8),))
    forged = Handover.adopt(descriptor, (GPU0,), made.handover.slots, NOTHING_INHERITED, {stranger.pid: began}.get)
    forged.add(stranger.pid)
    forged.close()
    os.close(listener)
    (made,), descriptors = await world.ask(calls.PRIVILEGED_OPEN, (calls.FilesAsked("a", 8),))
    close_all(descriptors)
    assert [pid for pid, _start, _bytes in made.handover.survivors] == [stranger.pid]
    _there, pidfds = await world.ask(calls.PRIVILEGED_WATCH, (calls.WatchWanted("a", stranger.pid),))
    world.worker.notify(calls.PRIVILEGED_END, calls.EndWanted("a", stranger.pid))
    await world.ask(calls.PRIVILEGED_EXISTING, None)
    os.kill(stranger.pid, signal.SIGTERM)
    assert await stranger.wait() == -signal.SIGTERM
    for pidfd in pidfds:
        os.close(pidfd)


@pytest.mark.promise("security-teller-asks")
async def test_a_process_that_has_a_pid_after_the_one_that_connected_is_not_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    ended = await asyncio.create_subprocess_exec("sleep", "60")
    of_the_ended = os.pidfd_open(ended.pid)
    ended.kill()
    await ended.wait()
    later = await asyncio.create_subprocess_exec("sleep", "60")
    monkeypatch.setattr(privileged_services, "peer_of", lambda sock: (later.pid, of_the_ended))
    client, accepted = await _connected(world, "a")
    identity, (pidfd,) = await world.ask(calls.PRIVILEGED_IDENTIFY, "a", accepted.fileno())
    assert (identity.pid, identity.start) == (later.pid, None)
    world.worker.notify(calls.PRIVILEGED_END, calls.EndWanted("a", later.pid))
    await world.ask(calls.PRIVILEGED_EXISTING, None)
    os.kill(later.pid, signal.SIGTERM)
    assert await later.wait() == -signal.SIGTERM
    os.close(pidfd)
    client.close()
    accepted.close()


class _NobodyLeft:
    """Connection whose peer has exited, on a version of Linux that reports this (ESRCH)."""

    def getsockopt(self, _level: int, _option: int, size: int | None = None) -> bytes:
        if size is None:
            raise OSError(errno.ESRCH, "")
        return struct.pack("iII", os.getpid(), 0, 0)


def test_where_the_process_that_connected_has_ended_its_pid_is_not_looked_up() -> None:
    assert peer_of(_NobodyLeft()) == (os.getpid(), None)  # type: ignore[arg-type]


@pytest.mark.promise("security-teller-asks")
async def test_before_a_ledger_is_known_no_tenant_is_removed_or_reported_as_removed(world: World) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    world.privileged.rows, world.privileged.known = {}, False
    with pytest.raises(PermissionError):
        await world.ask(calls.PRIVILEGED_REMOVE, "a")
    seen, _none = await world.ask(calls.PRIVILEGED_READ, calls.ReadingWanted(("a",), {}))
    assert seen.residue["a"] is not None


async def test_a_releasing_tenants_socket_is_removed(world: World) -> None:
    await world.ask(calls.PRIVILEGED_CREATE, calls.DirectoryWanted("a", None))
    os.close(await _listening(world, "a"))
    world.privileged.rows = {"a": row("a", 300, state=TenantState.RELEASING)}
    await world.ask(calls.PRIVILEGED_SHUT, "a")
    assert not (world.privileged.state.path("a") / "agent.sock").exists()


async def test_a_reading_says_what_proc_says_of_whom_was_asked_for(world: World) -> None:
    write_inventory(world.privileged._settings.state_dir.parent, *({"pid": pid, "uuid": GPU0} for pid in (7, 8, 10)))
    world.privileged.owner_of = lambda pid: {7: "a", 8: "b"}.get(pid)
    world.privileged.residue = lambda tenant_id: {"deleted": None}.get(tenant_id, "a volume")
    world.privileged.replaced = lambda tenant_id, pids, hooked: dict.fromkeys(pids - hooked, "another")
    wanted = calls.ReadingWanted(("deleted", "there"), {"a": ((10, 11), (11,)), "stranger": ((9,), ())})
    found, _none = await world.ask(calls.PRIVILEGED_READ, wanted)
    assert [process.pid for process in found.reading.processes] == [7, 8, 10]
    assert found.owners == {7: "a", 8: "b"}
    assert found.residue == {"deleted": None, "there": "a volume"}
    assert found.replaced == {"a": {7: "another", 10: "another"}, "b": {8: "another"}}, "only current processes"


async def test_a_connection_identifies_the_tenant_of_a_process_before_its_pod_does(world: World) -> None:
    write_inventory(world.privileged._settings.state_dir.parent, *({"pid": pid, "uuid": GPU0} for pid in (7, 8)))
    world.privileged.owner_of = lambda pid: "b"
    world.privileged.replaced = lambda tenant_id, pids, hooked: dict.fromkeys(pids - hooked, tenant_id)
    wanted = calls.ReadingWanted((), {"a": ((7, 8), (8,)), "b": ((7,), ())})
    found, _none = await world.ask(calls.PRIVILEGED_READ, wanted)
    assert found.replaced == {"a": {7: "a"}}
