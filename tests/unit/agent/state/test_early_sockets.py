"""Early sockets: a restarted container listens before it loads its code, if the state directory allows it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from sharepod import protocol
from sharepod.agent.state import early_sockets, tenant_socket, turn_lock
from sharepod.agent.state.directory import StateDir
from sharepod.agent.state.early_sockets import EarlySockets
from sharepod.agent.state.kept_descriptors import KeptDescriptor, KeptDescriptors
from unit.agent.apart.test_two_processes import parts
from unit.agent.client import Client
from unit.agent.program import Program, running, tenant_directory

_FOUND_AT_THE_IMPORT = """
import importlib.abc, os, socket, sys
from sharepod.agent import main

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "sharepod.agent.program":
            os.chdir({directory!r})
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
                caller.connect("agent.sock")
            loaded = {{"pydantic", "structlog", "asyncio", "aiohttp", "yaml", "argparse"}} & set(sys.modules)
            sys.exit(f"connected, with {{sorted(loaded)}} loaded")

sys.meta_path.insert(0, Blocked())
main.main(["--apart"])
"""

_WAITS_AT_THE_IMPORT = """
import importlib.abc, os, sys, time
from sharepod.agent import main

class Late(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "sharepod.agent.program":
            print("loading", file=sys.stderr, flush=True)
            while not os.path.exists({go!r}):
                time.sleep(0.01)

sys.meta_path.insert(0, Late())
sys.exit(main.main(["--apart"]))
"""


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Return a state directory as a killed agent leaves it: `a` and `b` had sockets, `released` had none."""
    for name in ("a", "b", "released"):
        (tmp_path / "state" / "tenants" / name).mkdir(parents=True)
    for name in "ab":
        (tmp_path / "state" / "tenants" / name / "agent.sock").touch()
    return tmp_path / "state"


def _connects(state_dir: Path, tenant: str) -> bool:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller,
        contextlib.chdir(state_dir / "tenants" / tenant),
    ):
        return caller.connect_ex("agent.sock") == 0


@contextlib.contextmanager
def _listening(state_dir: Path, *arguments: str, **environment: str) -> Iterator[Mapping[str, tuple[int, str]]]:
    named = {"SHAREPOD_AGENT_STATE_DIR": str(state_dir)} | environment
    held = early_sockets.listen(arguments, {name: value for name, value in named.items() if value}).of(state_dir)
    try:
        yield held
    finally:
        for descriptor, _mark in held.values():
            os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = turn_lock.opened(path)
    assert turn_lock.taken(lock)
    yield
    os.close(lock)


@pytest.mark.promise("install-listens-first")
def test_tenants_that_had_a_socket_can_be_connected_to_and_no_others(state_dir: Path) -> None:
    with _listening(state_dir) as held:
        assert set(held) == {"turn", "socket a", "socket b"}
        assert [_connects(state_dir, name) for name in ("a", "b", "released")] == [True, True, False]
        assert not (state_dir / "tenants" / "released" / "agent.sock").exists()


def test_the_agent_continues_with_the_same_sockets(state_dir: Path) -> None:
    with _listening(state_dir) as held:
        kept = KeptDescriptors({name: KeptDescriptor(os.dup(fd), mark) for name, (fd, mark) in held.items()})
        listener = StateDir(state_dir, state_dir / "hook.so", kept=kept).inherit("a")
        assert listener is not None
        assert _connects(state_dir, "a")
        listener.accept()[0].close()
        listener.close()
        for name in ("turn", "socket b"):
            found = kept.take(name)
            assert found is not None
            os.close(found.fd)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a" * 60, "b" * 60)])
def test_sockets_of_two_tenants_have_two_names(tmp_path: Path, first: str, second: str) -> None:
    """The privileged process identifies the tenant of a socket by its name, because descriptor numbers are reused."""
    names = []
    for tenant in (first, second):
        (tmp_path / tenant).mkdir()
        listener, identity = tenant_socket.listen(tmp_path / tenant)
        names.append(listener.getsockname())
        assert identity == tenant_socket.identity(tmp_path / tenant / "agent.sock")
        listener.close()
    assert names[0] != names[1]


def test_a_tenant_of_any_name_has_a_socket(tmp_path: Path) -> None:
    (tmp_path / ("a" * 128)).mkdir()
    listener, _identity = tenant_socket.listen(tmp_path / ("a" * 128))
    listener.close()


@pytest.mark.parametrize("lock", [turn_lock.SERVING, turn_lock.NEXT])
def test_while_another_agent_serves_or_is_next_its_sockets_stay(state_dir: Path, lock: str) -> None:
    before = (state_dir / "tenants" / "a" / "agent.sock").stat().st_ino
    with _locked(state_dir / lock), _listening(state_dir) as held:
        assert held == {}
        assert (state_dir / "tenants" / "a" / "agent.sock").stat().st_ino == before
    # _locked() fails unless the lock is free: both must be free now.
    with _locked(state_dir / turn_lock.SERVING), _locked(state_dir / turn_lock.NEXT):
        pass


def test_a_directory_that_takes_no_socket_keeps_no_other_from_it(state_dir: Path) -> None:
    (state_dir / "tenants" / "a" / ".agent.sock.new").mkdir()
    with _listening(state_dir) as held:
        assert set(held) == {"turn", "socket b"}


@pytest.mark.parametrize("how", ["environment", "argument", "one word"])
def test_the_state_directory_is_that_of_the_settings_file(state_dir: Path, how: str) -> None:
    file = state_dir / "settings.yaml"
    file.write_text(yaml.safe_dump({"state_dir": str(state_dir), "namespace": "x"}))
    arguments = {"environment": [], "argument": ["--config", str(file)], "one word": [f"--config={file}"]}[how]
    config = str(file) if how == "environment" else ""
    with _listening(state_dir, *arguments, SHAREPOD_AGENT_STATE_DIR="", SHAREPOD_AGENT_CONFIG=config) as held:
        assert "socket a" in held


def test_sockets_of_another_directory_than_the_agents_are_closed(state_dir: Path) -> None:
    early = early_sockets.listen([], {"SHAREPOD_AGENT_STATE_DIR": str(state_dir)})
    assert early.of(state_dir / "other") == {}
    assert not _connects(state_dir, "a")
    with _locked(state_dir / turn_lock.SERVING):
        pass


@pytest.mark.parametrize("config", ["missing.yaml", "[", "- list"])
def test_unreadable_settings_end_no_agent(tmp_path: Path, config: str) -> None:
    (tmp_path / "wrong.yaml").write_text(config)
    path = tmp_path / ("missing.yaml" if config == "missing.yaml" else "wrong.yaml")
    assert early_sockets.listen([], {"SHAREPOD_AGENT_CONFIG": str(path)}).of(tmp_path) == {}
    assert EarlySockets().of(tmp_path) == {}


@pytest.mark.promise("install-listens-first")
def test_it_listens_before_anything_is_loaded_that_takes_long(state_dir: Path) -> None:
    script = _FOUND_AT_THE_IMPORT.format(directory=str(state_dir / "tenants" / "a"))
    environment = dict(os.environ) | {"SHAREPOD_AGENT_STATE_DIR": str(state_dir)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == "connected, with [] loaded\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take rights away")
@pytest.mark.promise("install-listens-first")
async def test_a_client_that_connects_during_a_containers_restart_is_served(directory: Path) -> None:
    a = tenant_directory(directory, "a")
    async with running(directory, arguments=["--apart"]) as former:
        await former.logged("tenant is served")
        ends = [os.pidfd_open(pid) for pid in parts(former).values()]
        await former.end(signal.SIGKILL)
        for end in ends:  # the lock of the turn is free once all these processes have exited
            assert await asyncio.to_thread(select.select, [end], [], [], 60.0) != ([], [], [])
            os.close(end)
    program = await Program.start(directory, script=_WAITS_AT_THE_IMPORT.format(go=str(directory / "go")))
    try:
        await program.logged("loading")
        caller = await Client.connect(a, hello=False)
        caller.send(protocol.Hello(1, 1, "abc123"))
        identity = (a / "agent.sock").stat().st_ino
        (directory / "go").touch()
        await caller.expect(protocol.Welcome)
        await caller.granted()
        assert (a / "agent.sock").stat().st_ino == identity
        assert (await program.logged("listened first"))["tenants"] == 1
        caller.close()
    finally:
        assert await program.end() == 0
