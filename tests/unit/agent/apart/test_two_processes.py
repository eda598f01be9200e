"""The agent in two processes: the rights of the worker, and the kill of either process while tenants run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sharepod import protocol
from sharepod.agent.apart.confinement import SHOWN
from unit.agent.client import GI, GPU0, Client, row, until
from unit.agent.program import Program, running, tenant_directory, value, write_inventory, write_tenants
from unit.agent.small_disk import small_disk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take rights away")

_PROBES = """
import ctypes, errno, json, mmap, os, signal, socket, subprocess, sys, threading
from pathlib import Path
from sharepod import logs
from sharepod.agent.apart import pair
from sharepod.agent.settings import AgentSettings

settings = AgentSettings()
libc = ctypes.CDLL(None, use_errno=True)
SECRET, OTHER = {secret!r}, {other!r}

def called(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

def lengthen(file):
    try:
        os.ftruncate(file, 1 << 30)
    finally:
        os.close(file)

PROBES = {{
    "read the state directory": lambda: os.listdir(settings.state_dir),
    "read a token": lambda: Path(SECRET).read_bytes(),
    "read the node's files": lambda: os.listdir("/etc"),
    "see another process": lambda: Path(f"/proc/{{OTHER}}/status").read_bytes(),
    "write a file": lambda: Path("/written").write_bytes(b""),
    "write the program": lambda: Path(pair.__file__).with_name("x").write_bytes(b""),
    "kill": lambda: os.kill(OTHER, 0),
    "fork": lambda: os._exit(0) if os.fork() == 0 else None,
    "run a program": lambda: os.execv("/bin/true", ["/bin/true"]),
    "connect": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "connect to a local socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "become root": lambda: os.setuid(0),
    "mount": lambda: called(165, b"none", b"/proc", b"tmpfs", 0, 0),
    "make a namespace": lambda: called(272, 0x10000000),
    "trace": lambda: called(101, 16, 1, 0, 0),
    "get a descriptor of a process": lambda: called(438, 1, 0, 0),
    "open by handle": lambda: called(304, 0, 0, 0),
    "use bpf": lambda: called(321, 0, 0, 0),
    "make a file long": lambda: lengthen(os.memfd_create("file")),
    "use a ring": lambda: called(425, 1, 0),
}}

def worker(control):
    found = {{}}
    for name, probe in PROBES.items():
        try:
            probe()
        except OSError as error:
            found[name] = errno.errorcode[error.errno]
        else:
            found[name] = "done"
    found["processes"] = [name for name in os.listdir("/proc") if name.isdecimal()]
    found["root"] = sorted(os.listdir("/"))
    found["descriptors"] = len(os.listdir("/proc/self/fd")) - 1
    found["interfaces"] = Path("/proc/net/dev").read_text().count(":")
    found["status"] = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found["thread"] = (lambda t: (t.start(), t.join(), True)[2])(threading.Thread(target=lambda: None))
    os.write(2, json.dumps(dict(found, event="probed")).encode() + b"\\n")
    return 0

def privileged(control, kept):
    signal.pause()
    return 0

logs.configure(settings.log_level, settings.log_format)
sys.exit(pair.keep_pair(privileged, worker, lambda: [], 0))
"""


_PRIVILEGED = """
import signal, sys, time
from sharepod import logs
from sharepod.agent.apart import pair
from sharepod.agent.settings import AgentSettings
logs.configure(AgentSettings().log_level, AgentSettings().log_format)
def worker(control):  # the filter of its system calls refuses pause()
    while control.recv(64):
        pass
    return 0
def privileged(control, kept):
    print("begun", file=sys.stderr, flush=True)
    {body}
    return 0
sys.exit(pair.keep_pair(privileged, worker, lambda: [], 0))
"""


def parts(program: Program) -> dict[str, int]:
    """Return the pids of the two processes, by name."""
    pid = program.process.pid
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return {"worker" if _user(child) == SHOWN else "privileged": child for child in children}


def _user(pid: int) -> int:
    return int(_status(pid)["Uid"].split()[1])


def _text(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def _links(pid: int, name: str) -> dict[str, str]:
    return {each.name: str(each.readlink()) for each in Path(f"/proc/{pid}/{name}").iterdir()}


def _status(pid: int) -> dict[str, str]:
    lines = _text(pid, "status").splitlines()
    return {name: text.strip() for name, _colon, text in (line.partition(":") for line in lines)}


@contextlib.asynccontextmanager
async def apart(directory: Path, **changes: str) -> AsyncIterator[Program]:
    async with running(directory, arguments=["--apart"], **changes) as program:
        await program.logged("tenant is served")
        yield program


@pytest.mark.promise("security-teller")
async def test_the_process_that_parses_frames_can_do_nothing_on_the_node(directory: Path) -> None:
    secret = directory / "token"
    secret.write_text("secret")
    script = _PROBES.format(secret=str(secret), other=os.getpid())
    program = await Program.start(directory, script=script)
    found = await program.logged("probed")
    await program.end(signal.SIGKILL)
    done = {name: result for name, result in found.items() if result == "done"}
    assert not done, "what it tried and could do"
    assert found["read the state directory"] == found["read a token"] == found["read the node's files"] == "ENOENT"
    assert found["write a file"] == found["write the program"] in ("EROFS", "EACCES")
    assert found["processes"] == ["1"]
    assert found["descriptors"] == 4, "standard ones and the way from its supervisor"
    assert set(found["root"]) <= {
        "lib",
        "lib64",
        "proc",
        "root",
        "usr",
        *(part for library in (protocol.__file__, os.__file__, sys.prefix) for part in Path(library).parts),
    }
    assert found["interfaces"] <= 1, "a loopback that is down"
    assert found["thread"], "threads it may have"


@pytest.mark.promise("security-teller")
async def test_the_process_that_serves_tenants_has_no_capability_and_a_filter_and_a_user_of_its_own(
    directory: Path,
) -> None:
    async with apart(directory) as program:
        pids = parts(program)
        metricsus = _status(pids["worker"])
        assert {text for name, text in metricsus.items() if name.startswith("Cap")} == {"0" * 16}
        assert (metricsus["Seccomp"], metricsus["NoNewPrivs"], metricsus["Groups"]) == ("2", "1", "")
        assert set(metricsus["Gid"].split()) == {str(SHOWN)}
        assert metricsus["NSpid"].split()[-1] == "1"
        for space in ("pid", "mnt", "net", "ipc", "uts"):
            assert _links(pids["worker"], "ns")[space] != _links(os.getpid(), "ns")[space], space
        mounts = _text(pids["worker"], "mountinfo")
        assert str(directory) not in mounts
        for line in mounts.splitlines():
            assert "ro" in line.split()[5].split(",") or line.split()[4] == "/proc", line
        files = _links(pids["worker"], "fd").values()
        assert not [each for each in files if each.startswith(str(directory)) and "/handover/" not in each]
        assert _status(pids["privileged"])["Seccomp"] == "0"


@pytest.mark.promise("node-teller-killed")
async def test_a_worker_that_is_killed_loses_neither_memory_nor_an_attempt_to_connect(directory: Path) -> None:
    async with apart(directory) as program:
        before = (tenant_directory(directory, "a") / "agent.sock").stat().st_ino
        client = await Client.connect(tenant_directory(directory, "a"))
        assert await client.reserve(3 * GI) == 3 * GI
        for times in range(2, 4):
            os.kill(parts(program)["worker"], signal.SIGKILL)
            waiting = await asyncio.wait_for(Client.connect(tenant_directory(directory, "a")), 20)
            waiting.close()  # the connection ends before its process has reported that it holds no memory
            taken = await program.logged("taken over from the earlier agent", times=times - 1)
            assert taken["processes"] == 1
            _status_code, metrics = await program.get("/metrics", times=times)
            assert value(metrics, "sharepod_tenant_memory_used_bytes", tenant="a") == 3 * GI
        assert (tenant_directory(directory, "a") / "agent.sock").stat().st_ino == before
        client.close()
        assert await program.end() == 0


@pytest.mark.promise("install-killed")
@pytest.mark.promise("node-steward-killed")
async def test_a_privileged_process_that_is_killed_interrupts_nothing_that_tenants_have(directory: Path) -> None:
    async with apart(directory) as program:
        client = await Client.connect(tenant_directory(directory, "a"))
        assert await client.reserve(GI) == GI
        for times in range(2, 4):
            os.kill(parts(program)["privileged"], signal.SIGKILL)
            assert await client.reserve(GI, seq=times) == GI, "while there is no privileged process"
            newcomer = await asyncio.wait_for(Client.connect(tenant_directory(directory, "a")), 20)
            newcomer.close()
            await program.logged("this agent serves", times=times)
        assert len([line for line in program.log if line["event"] == "tenant is served"]) == 1
        # a new tenant is served: so the new privileged process has read the tenants file
        write_tenants(directory, [row("a", 400, 700), row("b", 100)])
        await program.logged("tenant is served", lambda line: line["tenant"] == "b")
        (await Client.connect(tenant_directory(directory, "b"))).close()
        write_tenants(directory, [])
        await program.logged("tenant was removed from the ledger", times=2)
        await until(lambda: not tenant_directory(directory, "a").exists())
        client.close()
        assert await program.end() == 0


@pytest.mark.promise("node-teller-killed")
async def test_on_a_disk_that_has_become_read_only_a_killed_worker_is_followed_by_one_that_serves(
    directory: Path,
) -> None:
    with small_disk(directory / "state") as disk:
        async with apart(directory) as program:
            client = await Client.connect(tenant_directory(directory, "a"))
            assert await client.reserve(GI) == GI
            with disk.read_only():
                for part in ("worker", "privileged", "worker"):
                    os.kill(parts(program)[part], signal.SIGKILL)
                    await program.logged(f"the {part} was killed")
                    newcomer = await asyncio.wait_for(Client.connect(tenant_directory(directory, "a")), 20)
                    await newcomer.granted()
                    newcomer.close()
            client.close()
            assert await program.end() == 0


@pytest.mark.promise("node-read-only-killed")
async def test_an_agent_killed_on_a_read_only_disk_serves_its_tenants_and_knows_their_memory(directory: Path) -> None:
    with small_disk(directory / "state") as disk:
        async with apart(directory) as program:
            with disk.read_only():
                await kill_both(program, served=2)
                line = await program.logged("cannot keep a tenant's state for the next agent")
                assert "Read-only file system" in line["error"]
                client = await Client.connect(tenant_directory(directory, "a"))
                assert await client.reserve(3 * GI) == 3 * GI
                await kill_both(program, served=3)
                assert (await program.logged("taken over from the earlier agent"))["processes"] == 1
                _status_code, metrics = await program.get("/metrics", times=3)
                assert value(metrics, "sharepod_tenant_memory_used_bytes", tenant="a") == 3 * GI
                newcomer = await Client.connect(tenant_directory(directory, "a"))
                await newcomer.granted()
                client.close()
                newcomer.close()
                write_tenants(directory, [])
                await program.logged("tenant was removed from the ledger")
                await until(lambda: _refuses(tenant_directory(directory, "a")))
            assert await program.end() == 0


async def kill_both(program: Program, *, served: int) -> None:
    """Kill privileged process and worker. Return once the log contains `served` starts of serving a tenant."""
    for pid in parts(program).values():
        os.kill(pid, signal.SIGKILL)
    await program.logged("tenant is served", times=served)


def _refuses(directory: Path) -> bool:
    """Return whether a connection to the tenant's socket is refused. It is refused only after the supervisor, too, has
    closed its copy of the socket."""
    folder = os.open(directory, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as sock:
            return sock.connect_ex(f"/proc/self/fd/{folder}/agent.sock") == errno.ECONNREFUSED
    finally:
        os.close(folder)


@pytest.mark.promise("install-killed")
async def test_a_pair_that_is_killed_again_and_again_is_given_up(directory: Path) -> None:
    async with running(directory, arguments=["--apart"]) as program:
        for times in range(1, 6):
            await program.logged("serving metrics", times=times)
            os.kill(parts(program)["worker"], signal.SIGKILL)
        assert await asyncio.wait_for(program.process.wait(), 20) == 128 + signal.SIGKILL
        await program.logged("again and again")


_SPEAKS_NONSENSE = """
import asyncio, socket, sys, time
from sharepod import logs
from sharepod.agent.apart import pair
from sharepod.agent.apart.control_end import ControlEnd
from sharepod.agent.apart.link import Line, PartService
from sharepod.agent.settings import AgentSettings

def worker(control):
    _packet, (link,), _flags, _address = socket.recv_fds(control, 32, 1)
    socket.socket(fileno=link).send(b"x" * 100)
    time.sleep(600)
    return 0

def privileged(control, kept):
    async def follow():
        stop = asyncio.Event()
        line = Line(PartService({}, {}, {}), lost=lambda: end.say_lost())
        end = ControlEnd(control, line, stop.set)
        await stop.wait()
    asyncio.run(follow())
    return 0

logs.configure(AgentSettings().log_level, AgentSettings().log_format)
sys.exit(pair.keep_pair(privileged, worker, lambda: [], 0))
"""


@pytest.mark.promise("node-teller-killed")
async def test_a_worker_with_a_broken_link_is_restarted(directory: Path) -> None:
    program = await Program.start(directory, script=_SPEAKS_NONSENSE)
    await program.logged("the worker was killed", times=2)
    assert await asyncio.wait_for(program.process.wait(), 20) == 128 + signal.SIGKILL
    await program.logged("again and again")


@pytest.mark.promise("install-killed")
async def test_a_privileged_process_that_is_ended_before_it_handles_signals_is_not_restarted(directory: Path) -> None:
    program = await Program.start(directory, script=_PRIVILEGED.format(body="time.sleep(60)"))
    await program.logged("begun")
    assert await program.end() == 0
    assert len([line for line in program.log if "begun" in line["event"]]) == 1


async def test_an_exception_in_a_child_is_logged_and_ends_the_pair(directory: Path) -> None:
    program = await Program.start(directory, script=_PRIVILEGED.format(body="raise RuntimeError('of no use')"))
    assert await program.ended() == 1
    assert "of no use" in json.dumps(program.log)


async def test_both_end_with_their_supervisor(directory: Path) -> None:
    program = await Program.start(directory, arguments=["--apart"])
    await program.logged("tenant is served")
    children = parts(program).values()
    program.process.kill()
    await until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    await program.end(signal.SIGKILL)


@pytest.mark.promise("security-kill")
async def test_by_policy_a_process_is_ended_only_if_it_is_the_tenants(directory: Path) -> None:
    stranger = await asyncio.create_subprocess_exec("sleep", "60")
    child = """
import socket, sys, time
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
print("connected", flush=True)
time.sleep(60)
"""
    async with apart(
        directory, SHAREPOD_AGENT_UNENFORCED_POLICY="Kill", SHAREPOD_AGENT_UNHOOKED_AFTER_S="0"
    ) as program:
        path = (tenant_directory(directory, "a") / "agent.sock").relative_to(directory)
        offender = await asyncio.create_subprocess_exec(
            "python3", "-c", child, str(path), cwd=directory, stdout=asyncio.subprocess.PIPE
        )
        assert offender.stdout is not None
        await offender.stdout.readline()
        on_gpu = [{"pid": each.pid, "uuid": GPU0, "memory": "1Gi"} for each in (offender, stranger)]
        write_inventory(directory, *on_gpu)
        assert await asyncio.wait_for(offender.wait(), 20) == -signal.SIGKILL
        assert stranger.returncode is None
        stranger.kill()
        await stranger.wait()
        assert json.dumps(program.log).count("process is killed") >= 1
