"""A terminating agent sends its listening sockets to the standby agent: all of them arrive, and the event loop of the
terminating agent keeps running."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from sharepod.agent.state import succession, tenant_socket, turn_lock
from sharepod.agent.state.directory import StateDir
from sharepod.agent.state.kept_descriptors import KeptDescriptor, KeptDescriptors
from sharepod.agent.state.passing_on import Awaiting, PassingOn
from sharepod.agent.state.succession import Succession
from unit.agent.client import until


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[PassingOn]:
    serving = PassingOn(tmp_path)
    yield serving
    serving.close()


async def _standing_by(tmp_path: Path, serving: PassingOn, kept: KeptDescriptors) -> Awaiting:
    before = len(serving._waiting)
    awaiting = Awaiting(tmp_path, kept)
    await awaiting.look(0)
    await until(lambda: len(serving._waiting) == before + 1)
    return awaiting


def _open_of(path: Path) -> int:
    """Return how many of this process's descriptors refer to this file."""
    status = path.stat()
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found = os.fstat(int(name))
        except OSError:
            continue
        count += (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino)
    return count


def test_an_agent_that_ends_before_it_has_taken_everything_passes_that_on_too(tmp_path: Path) -> None:
    left, taken = KeptDescriptor(os.memfd_create("left"), "1"), KeptDescriptor(os.memfd_create("taken"), "2")
    kept = KeptDescriptors({"socket a": left, "socket b": taken})
    kept.take("socket b")
    assert StateDir(tmp_path, tmp_path / "hook.so", kept=kept).heirlooms() == {"socket a": left}
    for each in (left, taken):
        os.close(each.fd)


class Watched(KeptDescriptors):
    """Kept descriptors that call `look` after an entry is added or removed."""

    def __init__(self, found: dict[str, KeptDescriptor], look: Callable[[], object]) -> None:
        super().__init__(found)
        self._look = look

    def take(self, name: str) -> KeptDescriptor | None:
        taken = super().take(name)
        self._look()
        return taken

    def keep(self, name: str, fd: int, mark: str = "") -> None:
        super().keep(name, fd, mark)
        self._look()


@pytest.mark.promise("install-no-gap")
def test_an_agent_that_ends_while_it_takes_a_socket_over_or_makes_one_anew_passes_that_on(tmp_path: Path) -> None:
    """The agent takes the kept socket, reads the disk for milliseconds, and then listens. An agent that ends in between
    must pass the socket on.
    """
    (tmp_path / "tenants" / "a").mkdir(parents=True)
    left, mark = tenant_socket.listen(tmp_path / "tenants" / "a")
    seen: list[set[str]] = []
    kept = Watched({"socket a": KeptDescriptor(left.detach(), mark)}, lambda: seen.append(set(state.heirlooms())))
    state = StateDir(tmp_path, tmp_path / "hook.so", kept=kept)
    inherited = state.inherit("a")
    assert inherited is not None
    state.listen("a").close()
    inherited.close()
    assert seen == [{"socket a"}] * 2


async def test_only_the_agents_user_can_ask_for_it(tmp_path: Path, serving: PassingOn) -> None:
    assert stat.S_IMODE((tmp_path / "successor.sock").stat().st_mode) == 0o600


async def test_each_standby_gets_all_sockets_and_a_disconnected_one_is_dropped(
    tmp_path: Path, serving: PassingOn
) -> None:
    (tmp_path / "file").touch()
    kept = KeptDescriptors()
    closed = await _standing_by(tmp_path, serving, KeptDescriptors())
    awaiting = await _standing_by(tmp_path, serving, kept)
    closed.close(serves=False)
    await until(lambda: len(serving._waiting) == 1)
    with (tmp_path / "file").open() as file:
        await serving.pass_on({f"socket t{number}": KeptDescriptor(file.fileno(), str(number)) for number in range(40)})
        serving.close()
        awaiting.close(serves=True)
        assert _open_of(tmp_path / "file") == 41
    for number in range(40):
        found = kept.take(f"socket t{number}")
        assert found is not None
        assert found.mark == str(number)
        os.close(found.fd)


async def test_descriptors_passed_to_an_agent_that_does_not_serve_are_closed(
    tmp_path: Path, serving: PassingOn
) -> None:
    (tmp_path / "file").touch()
    kept = KeptDescriptors()
    awaiting = await _standing_by(tmp_path, serving, kept)
    with (tmp_path / "file").open() as file:
        await serving.pass_on({"socket t": KeptDescriptor(file.fileno(), "")})
    serving.close()
    await awaiting.look(5)
    awaiting.close(serves=False)
    assert kept.take("socket t") is None
    assert _open_of(tmp_path / "file") == 0


@pytest.mark.promise("install-no-gap")
async def test_agents_that_accept_nothing_delay_no_other(tmp_path: Path, serving: PassingOn) -> None:
    """Stopped standby agents read nothing, so the queues of their sockets fill. The serving agent's loop must continue,
    and pass all sockets to standbys that read."""
    kept = KeptDescriptors()
    stopped = []
    for number in range(7):
        stopped.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        stopped[-1].connect(str(tmp_path / "successor.sock"))
        await until(lambda number=number: len(serving._waiting) == number + 1)  # type: ignore[misc]
    awaiting = await _standing_by(tmp_path, serving, kept)
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as file:
        heirlooms = {f"socket t{number}": KeptDescriptor(file.fileno(), "") for number in range(600)}
        passing = asyncio.create_task(serving.pass_on(heirlooms))
        await until(lambda: len(awaiting._passed) == len(heirlooms))
        assert not passing.done()
        async with asyncio.timeout(10):
            await passing
    serving.close()
    awaiting.close(serves=True)
    for each in stopped:
        each.close()
    assert len(kept.untaken()) == len(heirlooms)
    for name in heirlooms:
        found = kept.take(name)
        assert found is not None
        os.close(found.fd)


async def test_an_agent_that_is_next_and_stopped_keeps_no_other_from_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "_LATE_S", 0.1)
    with Succession(tmp_path) as first, Succession(tmp_path) as stopped, Succession(tmp_path) as third:
        assert first.free()
        # The stopped standby holds the lock of the next agent, and takes no further step
        assert turn_lock.taken(stopped._next)
        waiting = asyncio.create_task(third.turn())
        await until(lambda: third._looks_at > 0)
        fcntl.flock(first._serving, fcntl.LOCK_UN)  # the first agent has ended
        async with asyncio.timeout(10):
            await waiting
        assert not stopped.free()


async def test_an_agent_that_comes_after_the_next_one_leaves_it_the_time_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "_LATE_S", 3600.0)
    with Succession(tmp_path) as second, Succession(tmp_path) as third:
        assert turn_lock.taken(second._next)
        waiting = asyncio.create_task(third.turn())  # at its first check, no agent serves
        await until(lambda: third._looks_at > 0)
        assert second.free()
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("packet", [b"nonsense", b"[]", b'{"keep": 1}', b'{"keep": "x", "mark": 2}'])
async def test_what_is_no_message_ends_nothing_but_the_passing_on(tmp_path: Path, packet: bytes) -> None:
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, (tmp_path / "file").open() as file:
        listener.bind(str(tmp_path / "successor.sock"))
        listener.listen()
        kept = KeptDescriptors()
        awaiting = Awaiting(tmp_path, kept)
        await awaiting.look(0)
        former, _address = listener.accept()
        socket.send_fds(former, [packet], [file.fileno()])
        former.close()
        await awaiting.look(5)
        awaiting.close(serves=True)
        assert kept.untaken() == {}
    assert _open_of(tmp_path / "file") == 0


async def test_without_an_agent_that_passes_on_time_goes_by(tmp_path: Path) -> None:
    awaiting = Awaiting(tmp_path, KeptDescriptors())
    await awaiting.look(0.001)
    awaiting.close(serves=True)
