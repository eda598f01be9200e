"""A tenant's processes may send anything in any order: nothing breaks, and nothing remains after they have exited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharepod import protocol
from sharepod.agent import on_time
from sharepod.agent.sockets.refusals import ClientRefusal
from unit.agent.client import GI, GPU0, GPU1, Client, memory_used, row, served_in, settings_in, tenants_with

LIMIT = 4 * GI
sizes = st.one_of(st.integers(1, LIMIT), st.sampled_from([1, LIMIT, LIMIT + 1, 1 << 47, (1 << 63) - 1]))
gpus = st.integers(0, 2)
seqs = st.integers(1, 4)
grants = st.integers(0, 6)
flags = st.booleans()
frames = st.one_of(
    st.builds(protocol.Want, st.integers(1, 7)),
    st.builds(protocol.Drained, grants, st.integers(0, 9), flags, flags),
    st.builds(protocol.Draining, grants, st.one_of(st.integers(0, 1 << 40), st.just((1 << 64) - 1))),
    st.builds(protocol.Reserve, seqs, gpus, sizes, flags, flags, flags),
    st.builds(protocol.Release, gpus, sizes, flags),
    st.builds(protocol.MemInfo, seqs, gpus, sizes),
    st.builds(protocol.Hello, st.just(1), st.just(1), st.just(""), flags, flags),
)
acts = st.lists(
    st.tuples(st.integers(0, 2), st.one_of(frames, frames, frames, st.binary(max_size=40), st.none())), max_size=40
)
UNEXPECTED = re.compile(r"^\w+(Error|Exception|Exit|Interrupt)?\(")


async def play(directory: Path, done: list[tuple[int, protocol.ClientFrame | bytes | None]]) -> None:
    """Open three processes' connections and send the frames of `done` on them. None closes a connection."""
    rows = [row("bad", 500, gpus=(GPU0, GPU1), memory=LIMIT), row("good", 500, gpus=(GPU0, GPU1), memory=LIMIT)]
    async with tenants_with(settings_in(directory, recall_ms=1, grace_ms=50), rows) as tenants:
        served = {each.row.id: each for each in served_in(tenants)}
        errors: list[str] = []
        add = served["bad"].refusals.add

        def noted(why: ClientRefusal, *, pid: int, error: str | None = None) -> None:
            errors.append(error or "")
            add(why, pid=pid, error=error)

        served["bad"].refusals.add = noted  # type: ignore[method-assign]
        clients: dict[int, Client] = {}
        for which, payload in done:
            with contextlib.suppress(OSError):  # the agent has already closed the connection
                if payload is None:
                    if which in clients:
                        clients.pop(which).close()
                elif which not in clients:
                    clients[which] = await Client.connect(tenants.directory("bad"), hello=False)
                    clients[which].send(protocol.Hello(1, 1))
                if isinstance(payload, bytes):
                    clients[which].send_raw(payload)
                elif payload is not None:
                    clients[which].send(payload)
            await asyncio.sleep(0)
        for _ in range(5):  # the agent reads frames that are still in the sockets before these are closed
            await asyncio.sleep(0)
        for client in clients.values():
            client.close()
        async with asyncio.timeout(10):
            while served["bad"].connected:  # noqa: ASYNC110 - the loop has to turn
                await asyncio.sleep(0.001)
        assert not [error for error in errors if UNEXPECTED.match(error)], errors
        served["bad"]._exited(os.getpid())
        assert set(memory_used(tenants, "bad").values()) == {0}
        good = await Client.connect(tenants.directory("good"))
        assert await good.reserve(LIMIT) == LIMIT
        good.send(protocol.Want(3))
        await good.expect(protocol.Grant)
        good.close()


@pytest.mark.promise("security-input", "security-bad-frames", "security-own-credits")
@given(acts)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_input_of_clients_breaks_nothing_and_leaves_nothing_behind(
    tmp_path_factory: pytest.TempPathFactory, done: list[tuple[int, protocol.ClientFrame | bytes | None]]
) -> None:
    on_time.run(play(tmp_path_factory.mktemp("a"), done))
