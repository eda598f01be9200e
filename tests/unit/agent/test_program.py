"""`sharepod-agent` as a program, standalone: start, follow its files, serve, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from sharepod import protocol
from sharepod.agent.agent import Agent
from sharepod.agent.devices.inventory import SimulatedInventory
from sharepod.agent.telemetry import endpoints
from sharepod.api.gpunode import Tenant, TenantState
from sharepod.web.metrics_access import MetricsGuard
from unit.agent.client import GI, GPU0, GPU1, Client, row, settings_in, until
from unit.agent.small_disk import small_disk


def write_inventory(directory: Path, *processes: dict[str, Any]) -> None:
    gpus = [{"uuid": uuid, "index": i, "model": "Simulated", "memory": "16Gi"} for i, uuid in enumerate((GPU0, GPU1))]
    replace(directory / "inventory.yaml", yaml.safe_dump({"gpus": gpus, "processes": list(processes)}))


def write_tenants(directory: Path, rows: Sequence[Tenant]) -> None:
    replace(directory / "tenants.yaml", yaml.safe_dump({"tenants": [tenant.dump() for tenant in rows]}))


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


class Program:
    """The agent in a process of its own; its log is kept by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self._more = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, directory: Path, *, script: str | None = None, arguments: Sequence[str] = (), **changes: str
    ) -> Program:
        """Start the agent, or a script that runs it in its own way."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SHAREPOD_AGENT_")}
        environment |= {
            "SHAREPOD_AGENT_MODE": "standalone",
            "SHAREPOD_AGENT_STATE_DIR": str(directory / "state"),
            "SHAREPOD_AGENT_HOOK_FILE": str(directory / "hook.so"),
            "SHAREPOD_AGENT_INVENTORY_FILE": str(directory / "inventory.yaml"),
            "SHAREPOD_AGENT_TENANTS_FILE": str(directory / "tenants.yaml"),
            "SHAREPOD_AGENT_INVENTORY_INTERVAL_S": "0.05",
            "SHAREPOD_AGENT_HTTP_BIND": "127.0.0.1",
            "SHAREPOD_AGENT_HTTP_PORT": "0",
        } | changes
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(("-m", "sharepod.agent.main") if script is None else ("-c", script)),
            *arguments,
            env=environment,
            stderr=asyncio.subprocess.PIPE,
        )
        return cls(process)

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._more:
                text = line.decode()
                self.log.append(json.loads(text) if text.startswith("{") else {"event": text})
                self._more.notify_all()
        async with self._more:
            self._more.notify_all()

    async def says(
        self, event: str, matching: Callable[[dict[str, Any]], bool] = lambda _: True, *, times: int = 1
    ) -> dict[str, Any]:
        """The first line of the log with this event (or the second, ...), now or when it comes."""

        def found() -> dict[str, Any] | None:
            lines = [line for line in self.log if event in line["event"] and matching(line)]
            return lines[times - 1] if len(lines) >= times else None

        async with self._more, asyncio.timeout(20):
            await self._more.wait_for(lambda: found() is not None or self._reading.done())
        line = found()
        assert line is not None, f"{event!r} is not in {self.log}"
        return line

    async def get(self, path: str, *, times: int = 1) -> tuple[int, str]:
        """Answer of the agent, or of the second that the keeper has started, ..."""
        ports = await self.says("serving metrics", times=times)
        port = ports["health_port" if path == "/healthz" else "port"]
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, await response.text()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), 20)
        await self._reading
        return code


@contextlib.asynccontextmanager
async def running(directory: Path, *, arguments: Sequence[str] = (), **changes: str) -> AsyncIterator[Program]:
    program = await Program.start(directory, arguments=arguments, **changes)
    try:
        yield program
    finally:
        if program.process.returncode is None:
            await program.end(signal.SIGKILL)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    settings_in(tmp_path)
    write_inventory(tmp_path)
    write_tenants(tmp_path, [row("a", 400, 700)])
    return tmp_path


def tenant_directory(directory: Path, tenant_id: str) -> Path:
    return directory / "state" / "tenants" / tenant_id


def value(told: str, name: str, **labels: str) -> float:
    for line in told.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{text}"' in line for key, text in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} with {labels}")


async def test_it_serves_tenants_metrics_and_health_until_it_is_told_to_end(directory: Path) -> None:
    async with running(directory) as program:
        await program.says("tenant", lambda line: line.get("tenant") == "a")
        client = await Client.connect(tenant_directory(directory, "a"))
        grant = await client.granted()
        client.send(protocol.Drained(grant.grant_id))
        assert await client.reserve(1 * GI) == 1 * GI
        assert await program.get("/healthz") == (200, "ok\n")
        status, told = await program.get("/metrics")
        assert status == 200
        assert value(told, "sharepod_tenant_grants_total", tenant="a", namespace="default", pod="a") == 1
        assert value(told, "sharepod_tenant_memory_used_bytes", tenant="a", gpu=GPU0) == GI
        assert value(told, "sharepod_tenant_request_ratio", tenant="a") == 0.4
        assert value(told, "sharepod_gpu_memory_bytes", gpu=GPU1) == 16 * GI
        assert re.search(r"^sharepod_agent_inventory_simulated 1\.0$", told, re.MULTILINE)
        assert {line["event"] for line in program.log} >= {"the inventory is simulated: there is no GPU behind it"}
        assert await program.end() == 0
        assert await client.ends()
        client.close()


async def test_it_may_have_as_many_descriptors_as_the_node_allows(directory: Path) -> None:
    async with running(directory) as program:
        line = await program.says("limit of open files")
        assert line["now"] == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


async def test_it_follows_its_tenants_file_and_keeps_what_it_has_when_that_is_wrong(directory: Path) -> None:
    async with running(directory) as program:
        await program.says("tenant", lambda line: line.get("tenant") == "a")
        write_tenants(directory, [row("a", 500, 700), row("b", 400)])
        await program.says("tenant", lambda line: line.get("tenant") == "b")
        await program.says("tenant changed", lambda line: line["request"] == 500)
        replace(directory / "tenants.yaml", "tenants: [{id: x}]")
        await program.says("keeping the tenants as they were", lambda line: "namespace" in line["error"])
        client = await Client.connect(tenant_directory(directory, "a"))
        client.close()
        write_tenants(directory, [row("a", 500, 700), row("b", 400, state=TenantState.RELEASING)])
        program.process.send_signal(signal.SIGHUP)
        await program.says("tenant is drained", lambda line: line["tenant"] == "b")
        write_tenants(directory, [row("a", 500, 700)])
        await program.says("tenant's directory removed", lambda line: line["tenant"] == "b")
        assert await program.end() == 0


async def test_a_killed_agent_leaves_its_tenants_in_place_and_the_next_one_goes_on(directory: Path) -> None:
    async with running(directory) as program:
        await program.says("tenant", lambda line: line.get("tenant") == "a")
        client = await Client.connect(tenant_directory(directory, "a"))
        assert await client.reserve(3 * GI) == 3 * GI
        await program.end(signal.SIGKILL)
        assert await client.ends()
        client.close()
    async with running(directory) as program:
        await program.says("tenant", lambda line: line.get("tenant") == "a")
        client = await Client.connect(tenant_directory(directory, "a"))
        assert await client.reserve(3 * GI, handover=True) == 3 * GI
        assert await client.reserve(2 * GI) == 0
        client.close()
        assert await program.end() == 0


@contextlib.asynccontextmanager
async def started(directory: Path, **changes: Any) -> AsyncIterator[Agent]:
    settings = settings_in(directory, **changes)
    agent = Agent(settings, SimulatedInventory(directory / "inventory.yaml"))
    await agent.start()
    await agent.take_stock()
    try:
        yield agent
    finally:
        await agent.close()


async def test_no_process_is_a_strangers_before_the_ledger_is_known(directory: Path) -> None:
    write_inventory(directory, {"pid": 4242, "uuid": GPU0, "memory": "1Gi"})
    async with started(directory) as agent:
        await asyncio.sleep(0.2)
        assert all(gpu.shareable for gpu in agent.facts().gpus)
        await agent.tenants.apply([])
        async with asyncio.timeout(10):
            while agent.facts().gpus[0].shareable:  # noqa: ASYNC110 - the next reading tells
                await asyncio.sleep(0.01)


@pytest.mark.promise("node-release-soon")
async def test_a_release_waits_for_no_usual_reading(directory: Path) -> None:
    """The usual one comes a minute later."""
    left: dict[str, str] = {"a": "its volume is published"}

    async with started(directory, inventory_interval_s=60) as agent:
        agent.residue = left.get

        def drained() -> set[str]:
            return {each.id for each in agent.tenants.status() if each.drained}

        await agent.tenants.apply([row("a"), row("b")])
        await agent.tenants.apply([row("a", state=TenantState.RELEASING), row("b", state=TenantState.RELEASING)])
        await until(lambda: drained() == {"b"})
        left.clear()
        await until(lambda: drained() == {"a", "b"})


async def test_a_crowd_of_processes_is_put_together_into_few_reports(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, asked = asyncio.get_running_loop(), 0
    facts = Agent.facts

    def counted(agent: Agent) -> Any:
        nonlocal asked
        asked += 1
        return facts(agent)

    async with started(directory, inventory_interval_s=60) as agent:
        await agent.tenants.apply([row("a")])
        monkeypatch.setattr(Agent, "facts", counted)
        begun = loop.time()
        agent.changed.clear()
        for _ in range(50):
            (await Client.connect(agent.tenants.directory("a"))).close()
        await asyncio.wait_for(agent.changed.wait(), 10)
        assert 1 <= asked <= (loop.time() - begun) / 0.05 + 1


@asynccontextmanager
async def served_http(agent: Agent) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
    """Serve the agent over HTTP; give a function from a request to its whole answer, empty if closed unanswered."""
    http = await endpoints.serve(agent, MetricsGuard(None))

    async def ask(request: bytes) -> bytes:
        port = http.health_port if b" /he" in request else http.metrics_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    try:
        yield ask
    finally:
        await http.close()


async def test_many_who_ask_for_metrics_cost_no_more_than_one(directory: Path) -> None:
    async with started(directory) as agent, served_http(agent) as ask:
        await agent.tenants.apply([row("a")])
        first = await ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'tenant="a"' in first
        await agent.tenants.apply([])
        text = first.split(b"\r\n\r\n", 1)[1]
        for _ in range(3):
            answer = await ask(2 * b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.split(b"\r\n\r\n", 1)[1] == text, "one connection is one question"


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /secrets HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", b"HTTP/1.1 405 Method Not Allowed"),
        (b"\x16\x03\x01\x02\r\n\r\n", b"HTTP/1.0 400 Bad Request"),
        (b"GET /" + 10_000 * b"x" + b" HTTP/1.1\r\n\r\n", b"HTTP/1.0 400 Bad Request"),
    ],
)
async def test_what_is_no_question_is_told_so_and_closed(directory: Path, request_: bytes, answer: bytes) -> None:
    async with started(directory) as agent, served_http(agent) as ask:
        assert (await ask(request_)).split(b"\r\n")[0] == answer


@pytest.mark.promise("security-http")
async def test_who_asks_too_much_over_http_is_closed_and_who_says_nothing_takes_no_place_for_long(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharepod.web.http_server._ASKS_AT_ONCE", 30.0)
    monkeypatch.setattr("sharepod.web.http_server._ASKS_PER_S", 5.0)
    monkeypatch.setattr("sharepod.web.http_server._WITHIN_S", 0.3)
    question = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with started(directory) as agent, served_http(agent) as ask:
        async with asyncio.timeout(20):
            silent = await asyncio.gather(*(ask(b"GET /he") for _ in range(12)))
        assert silent == [b""] * 12, "four of them at once, for there were eight"
        answers = [await ask(question) for _ in range(60)]
        assert answers[0].endswith(b"ok\n")
        assert answers.count(b"") >= 20
        async with asyncio.timeout(20):
            while not await ask(question):  # noqa: ASYNC110 - in time it is answered again
                await asyncio.sleep(0.1)


@pytest.mark.promise("security-http")
async def test_an_address_has_eight_connections_at_a_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharepod.web.http_server._ASKS_AT_ONCE", 1e6)
    monkeypatch.setattr("sharepod.web.http_server._WITHIN_S", 60.0)
    question = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with started(directory) as agent, served_http(agent) as ask, asyncio.timeout(20):
        silent = [asyncio.ensure_future(ask(b"GET /he")) for _ in range(8)]
        while await ask(question):  # noqa: ASYNC110 - the eight are being accepted
            await asyncio.sleep(0.01)
        assert not any(each.done() for each in silent)
        silent[0].cancel()
        while not await ask(question):  # noqa: ASYNC110 - the end of one is noticed
            await asyncio.sleep(0.01)
        await asyncio.gather(*(_cancelled(each) for each in silent))


@pytest.mark.promise("security-probe-port")
async def test_silent_connections_from_everywhere_do_not_keep_a_probe_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharepod.web.http_server._OPEN_EACH", 1000)  # one address stands for many
    monkeypatch.setattr("sharepod.web.http_server._ASKS_AT_ONCE", 1e6)
    monkeypatch.setattr("sharepod.web.http_server._WITHIN_S", 60.0)
    question = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with started(directory) as agent, served_http(agent) as ask, asyncio.timeout(20):
        silent = [asyncio.ensure_future(ask(b"GET /he")) for _ in range(40)]
        await asyncio.sleep(0.2)
        assert not any(each.done() for each in silent)
        for _ in range(20):
            more = [asyncio.ensure_future(ask(b"GET /he")) for _ in range(8)]
            assert (await ask(question)).endswith(b"ok\n")
            silent += more
        assert any(each.done() for each in silent), "the oldest made room"
        await asyncio.gather(*(_cancelled(each) for each in silent))


async def _cancelled(task: asyncio.Future[bytes]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


_FAILS_WHILE_STOPPING = """
import asyncio, sys
from sharepod.agent import main, standalone
async def drive(agent, again):
    try:
        await asyncio.Event().wait()
    finally:
        raise OSError(5, "the disk is gone")
standalone.run = drive
sys.exit(main.main())
"""


async def test_a_failure_while_it_stops_leaves_its_exit_status_at_zero(directory: Path) -> None:
    agent = await Program.start(directory, script=_FAILS_WHILE_STOPPING)
    await agent.says("this agent serves")
    assert await agent.end() == 0
    assert "the disk is gone" in (await agent.says("a task failed while the agent stopped"))["error"]


@pytest.mark.promise("install-standby")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_second_agent_stands_by_and_serves_when_the_first_has_ended(
    directory: Path, number: signal.Signals
) -> None:
    async with running(directory) as first:
        await first.says("tenant is served")
        async with running(directory) as second:
            await second.says("standing by")
            async with asyncio.timeout(20):
                # It is being checked whether it could serve.
                while await second.get("/healthz") != (200, "stands by: another agent serves\n"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            listening = (tenant_directory(directory, "a") / "agent.sock").stat().st_ino
            assert [line for line in second.log if line["event"] == "tenant is served"] == []
            await first.end(number)
            await second.says("tenant is served")
            await until(lambda: (tenant_directory(directory, "a") / "agent.sock").stat().st_ino != listening)
            client = await Client.connect(tenant_directory(directory, "a"))
            await client.granted()
            client.close()
            assert await second.get("/healthz") == (200, "ok\n")
            assert await second.end() == 0


@pytest.mark.promise("install-unfit")
@pytest.mark.parametrize("missing", ["HOOK_FILE", "INVENTORY_FILE"])
async def test_an_agent_that_could_not_serve_is_not_ready_beside_one_that_serves(directory: Path, missing: str) -> None:
    async with running(directory) as first:
        await first.says("tenant is served")
        async with running(directory, **{f"SHAREPOD_AGENT_{missing}": "/none"}) as second:
            await second.says("this agent could not serve")
            status, text = await second.get("/healthz")
            assert status == 503
            assert "another agent serves; this one could not: " in text
            assert "/none" in text
            assert await second.end() == 0
        client = await Client.connect(tenant_directory(directory, "a"))
        await client.granted()
        client.close()


_KEPT = """
import sys, time
from sharepod import logs
from sharepod.agent import keeper
from sharepod.agent.settings import AgentSettings
logs.configure(AgentSettings().log_level, AgentSettings().log_format)
def agent(kept):
    print("begun", file=sys.stderr, flush=True)
    {body}
sys.exit(keeper.keep(agent))
"""


@pytest.mark.promise("install-killed")
async def test_a_keeper_that_is_told_to_end_before_its_agent_listens_ends(directory: Path) -> None:
    keeper = await Program.start(directory, script=_KEPT.format(body="time.sleep(60)"))
    await keeper.says("begun")
    assert await keeper.end() == 0
    assert len([line for line in keeper.log if "begun" in line["event"]]) == 1


async def test_what_ends_a_kept_agent_is_told(directory: Path) -> None:
    keeper = await Program.start(directory, script=_KEPT.format(body="raise RuntimeError('of no use')"))
    assert await asyncio.wait_for(keeper.process.wait(), 20) == 1
    await keeper._reading
    assert "of no use" in json.dumps(keeper.log)


@pytest.mark.promise("install-killed")
async def test_a_kept_agent_that_is_killed_is_there_again_and_one_that_ends_by_itself_is_not(directory: Path) -> None:
    async with running(directory, arguments=["--keep"]) as keeper:
        for times in range(1, 3):
            await keeper.says("tenant is served", times=times)
            os.kill(_child(keeper.process.pid), signal.SIGKILL)
            line = await keeper.says("agent was killed", times=times)
            assert line["signal"] == "SIGKILL"
        await keeper.says("tenant is served", times=3)
        child = _child(keeper.process.pid)
        assert await keeper.end() == 0
        assert not _exists(child)


@pytest.mark.promise("node-read-only-killed")
async def test_a_kept_agent_that_is_killed_serves_again_on_a_disk_that_has_become_read_only(tmp_path: Path) -> None:
    with small_disk(tmp_path / "state") as disk:
        settings_in(tmp_path)
        write_inventory(tmp_path)
        write_tenants(tmp_path, [row("a", 400, 700)])
        async with running(tmp_path, arguments=["--keep"]) as keeper:
            await keeper.says("tenant is served")
            with disk.read_only():
                os.kill(_child(keeper.process.pid), signal.SIGKILL)
                await keeper.says("tenant is served", times=2)
                assert "Read-only file system" in (await keeper.says("cannot apply the tenants"))["error"]
                client = await Client.connect(tenant_directory(tmp_path, "a"))
                assert await client.reserve(3 * GI) == 3 * GI
                os.kill(_child(keeper.process.pid), signal.SIGKILL)
                assert (await keeper.says("taken over from the earlier agent"))["processes"] == 1
                _status, told = await keeper.get("/metrics", times=3)
                assert value(told, "sharepod_tenant_memory_used_bytes", tenant="a") == 3 * GI
                newcomer = await Client.connect(tenant_directory(tmp_path, "a"))
                await newcomer.granted()
                client.close()
                newcomer.close()
                write_tenants(tmp_path, [])
                await keeper.says("tenant is gone from the ledger")
                with pytest.raises(ConnectionRefusedError):
                    await Client.connect(tenant_directory(tmp_path, "a"))
            assert await keeper.end() == 0


@pytest.mark.promise("node-read-only-killed")
async def test_once_the_disk_is_writable_again_an_agent_listens_on_a_socket_of_its_own(tmp_path: Path) -> None:
    with small_disk(tmp_path / "state") as disk:
        settings_in(tmp_path)
        write_inventory(tmp_path)
        write_tenants(tmp_path, [row("a", 400, 700)])
        async with running(tmp_path, arguments=["--keep"]) as keeper:
            await keeper.says("tenant is served")
            before = (tenant_directory(tmp_path, "a") / "agent.sock").stat().st_ino
            with disk.read_only():
                os.kill(_child(keeper.process.pid), signal.SIGKILL)
                await keeper.says("tenant is served", times=2)
                client = await Client.connect(tenant_directory(tmp_path, "a"))
            await until(lambda: (tenant_directory(tmp_path, "a") / "agent.sock").stat().st_ino != before)
            await client.granted()  # it stays connected
            other = await Client.connect(tenant_directory(tmp_path, "a"))
            other.close()
            client.close()
            assert await keeper.end() == 0


@pytest.mark.promise("install-killed")
async def test_a_keeper_gives_up_an_agent_that_is_killed_again_and_again(directory: Path) -> None:
    async with running(directory, arguments=["--keep"]) as keeper:
        for times in range(1, 6):
            await keeper.says("agent starts", times=times)
            os.kill(_child(keeper.process.pid), signal.SIGKILL)
        assert await asyncio.wait_for(keeper.process.wait(), 20) == 128 + signal.SIGKILL
        await keeper.says("again and again")


async def test_an_agent_ends_with_its_keeper(directory: Path) -> None:
    keeper = await Program.start(directory, arguments=["--keep"])
    await keeper.says("tenant is served")
    child = _child(keeper.process.pid)
    keeper.process.kill()
    async with asyncio.timeout(20):
        while _exists(child):  # noqa: ASYNC110 - somebody else's child by now
            await asyncio.sleep(0.01)
    await keeper.end(signal.SIGKILL)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _child(pid: int) -> int:
    """The only child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"SHAREPOD_AGENT_GRACE_MS": "soon"}, 2, "grace_ms"),
        ({"SHAREPOD_AGENT_HOOK_FILE": "/none.so"}, 1, "make shim"),
        ({"SHAREPOD_AGENT_INVENTORY_FILE": "/none.yaml"}, 1, "cannot read the inventory file /none.yaml"),
        ({"SHAREPOD_AGENT_TENANTS_FILE": "/none.yaml"}, 1, "cannot read the tenants file /none.yaml"),
        ({"SHAREPOD_AGENT_HTTP_BIND": "192.0.2.1"}, 1, "192.0.2.1"),
    ],
)
async def test_what_is_missing_ends_it_with_words(
    directory: Path, changes: dict[str, str], code: int, words: str
) -> None:
    async with running(directory, **changes) as program:
        assert await asyncio.wait_for(program.process.wait(), 20) == code
        await program._reading
        assert words in json.dumps(program.log)


async def test_facts_tell_of_changes_and_not_of_usage(directory: Path) -> None:
    settings = settings_in(directory)
    agent = Agent(settings, SimulatedInventory(directory / "inventory.yaml"))
    await agent.start()
    await agent.take_stock()
    try:
        await agent.tenants.apply([row("a")])
        await asyncio.wait_for(agent.changed.wait(), 5)
        agent.changed.clear()
        client = await Client.connect(agent.tenants.directory("a"))
        await asyncio.wait_for(agent.changed.wait(), 5)
        assert [status.connected for status in agent.facts().tenants] == [True]
        async with asyncio.timeout(10):
            while agent.changed.is_set():  # the process was seen before its hello, perhaps
                agent.changed.clear()
                await asyncio.sleep(4 * settings.inventory_interval_s)
        await client.reserve(1 * GI)
        grant = await client.granted()
        client.send(protocol.Drained(grant.grant_id))
        await asyncio.sleep(4 * settings.inventory_interval_s)
        assert not agent.changed.is_set(), "usage alone is no change"
        assert [status.memory for status in agent.facts().tenants] == [GI]
        client.close()
        assert agent.unhealthy() is None
    finally:
        await agent.close()
    assert agent.unhealthy() is not None


@pytest.mark.promise("node-foreign-process", "node-mig")
async def test_a_foreign_process_makes_a_gpu_unfit_to_be_shared_and_a_tenants_own_does_not(directory: Path) -> None:
    agent = Agent(settings_in(directory), SimulatedInventory(directory / "inventory.yaml"))
    await agent.start()
    await agent.take_stock()
    try:
        await agent.tenants.apply([row("a")])
        client = await Client.connect(agent.tenants.directory("a"))
        agent.changed.clear()
        write_inventory(
            directory, {"pid": os.getpid(), "uuid": GPU0, "memory": "1Gi"}, {"pid": 1, "uuid": GPU1, "memory": "1Gi"}
        )
        async with asyncio.timeout(10):
            while agent.facts().gpus[1].shareable:
                await agent.changed.wait()
                agent.changed.clear()
        first, second = agent.facts().gpus
        assert first.shareable
        assert "process 1 on the node uses it" in second.reason
        agent.owner_of = lambda pid: "a"
        await asyncio.wait_for(agent.changed.wait(), 10)
        assert agent.facts().gpus[1].shareable
        client.close()
    finally:
        await agent.close()


async def test_an_inventory_that_cannot_be_read_any_more_makes_the_agent_unhealthy(directory: Path) -> None:
    settings = settings_in(directory, nvml_timeout_s=0.1)
    agent = Agent(settings, SimulatedInventory(directory / "inventory.yaml"))
    await agent.start()
    await agent.take_stock()
    try:
        replace(directory / "inventory.yaml", "gpus: nonsense")
        async with asyncio.timeout(10):
            while agent.unhealthy() is None:  # noqa: ASYNC110 - it becomes so by time passing
                await asyncio.sleep(0.02)
        assert "is not valid" in (agent.unhealthy() or "")
        assert len(agent.facts().gpus) == 2, "the last reading stands"
    finally:
        await agent.close()
