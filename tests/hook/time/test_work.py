"""All work on the device waits for the token: each gated entry point of the table, in each of its forms.

The list comes from the table, and the arguments are chosen by the prototype, so a new entry point is called too. Work
that a stream capture only records does not wait. While a capture is open, every call returns the same as without the
hook.
"""

from __future__ import annotations

import pytest
from hook.conftest import Tenant
from hook.world.probe import Probe
from sharepod.protocol import Drained, Want
from table.render import read_table

GATED = [row for row in read_table() if row.kind == "gate"]
HOST_COPIES = [row for row in read_table() if row.kind == "observe" and row.name.startswith("cuMemcpy")]
INTO_STREAMS = [row for row in GATED if "CUstream" in row.parameters or "CUlaunchConfig" in row.parameters]
GLOBAL, THREAD_LOCAL, RELAXED = range(3)


def prepare(probe: Probe) -> None:
    """Create streams `s` and `t`, memory, and a graph of one kernel that does nothing."""
    probe.start_cuda()
    for name in ("s", "t"):
        probe.ok("stream", name)
    probe.ok("work_memory")
    probe.ok("capture_begin", "s", RELAXED)
    probe.ok("launch", "noop", "s")
    probe.ok("capture_end", "s", "graph")


@pytest.mark.promise("program-device-work", "security-share")
def test_all_device_work_waits_for_the_token(tenant: Tenant) -> None:
    """With the token, each call returns and works as without the hook. The double does not have the array functions of
    CUDA 2."""
    bare = tenant.probe("bare", LD_PRELOAD="")
    prepare(bare)
    due = []
    for row in GATED:
        before = tenant.submitted("bare")
        due.append((bare.call("work", row.symbol, row.parameters).code, tenant.submitted("bare") - before))
    assert sum(worked for _, worked in due) > 80
    agent = tenant.agent()
    probe = tenant.probe()
    prepare(probe)
    wrong = []
    for turn, (row, expected) in enumerate(zip(GATED, due, strict=True)):
        before = tenant.submitted()
        called = probe.post("work", row.symbol, row.parameters)
        client = agent.client()
        agent.wait_asked(client, turn + 1)
        waited = not called.done() and tenant.submitted() == before
        grant = agent.grant(client)
        seen = called.result(10).code, tenant.submitted() - before
        if not waited or seen != expected:
            wrong.append((row.symbol, waited, seen, expected))
        agent.revoke(client, grant)
        agent.next_frame(client, Drained, turn)
    assert wrong == []


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_nothing_is_gated_on_a_capturing_stream(tenant: Tenant, mode: int) -> None:
    """On a capturing stream no call waits, nothing runs, and each call returns the same as without the hook."""
    agent = tenant.agent()
    answers: dict[str, list[tuple[str, int, int]]] = {"hooked": [], "bare": []}
    for name, seen in answers.items():
        probe = tenant.probe(name) if name == "hooked" else tenant.probe(name, LD_PRELOAD="")
        prepare(probe)
        for row in INTO_STREAMS:
            probe.ok("capture_begin", "s", mode)
            code = probe.call("work", row.symbol, row.parameters).code
            seen.append((row.symbol, code, probe.call("capture_end", "s").code))
        assert tenant.submitted(name) == 0
    assert answers["hooked"] == answers["bare"]
    assert not agent.frames(agent.client(), Want)


@pytest.mark.promise("program-captures")
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_capture_stays_as_it_is_beside_all_device_work(tenant: Tenant, mode: int) -> None:
    """One thread captures while another thread makes the calls. After each call the capture is valid if it would be
    valid without the hook."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(5, metered=True)
    answers: dict[str, list[tuple[str, int, int]]] = {"hooked": [], "bare": []}
    for name, seen in answers.items():
        probe = tenant.probe(name) if name == "hooked" else tenant.probe(name, LD_PRELOAD="")
        prepare(probe)
        probe.ok("context_use", thread="other")
        for row in GATED:
            probe.ok("capture_begin", "s", mode)
            code = probe.call("work", row.symbol, row.parameters, "t", thread="other").code
            seen.append((row.symbol, code, probe.call("capture_end", "s").code))
    assert answers["hooked"] == answers["bare"]
    assert sum(valid == 0 for _, _, valid in answers["bare"]) > 20


DESCRIBED = ("cuMemcpy2D_v2", "cuMemcpy2DAsync_v2", "cuMemcpy3D_v2_ptds", "cuMemcpy3DAsync_v2_ptsz")
DIRECTIONS = [
    ("cuMemcpy", "host", "device", False),
    ("cuMemcpy_ptds", "device", "host", False),
    ("cuMemcpyAsync", "host", "device", False),
    ("cuMemcpyAsync_ptsz", "device", "host", False),
    ("cuMemcpyBatchAsync_v2", "host", "device", False),
    ("cuMemcpyBatchAsync_v2_ptsz", "device", "device", True),
    ("cuMemcpy3DBatchAsync_v2", "device", "host", False),
    ("cuMemcpy3DBatchAsync_v2", "device", "device", True),
    *((symbol, "host", "device", False) for symbol in DESCRIBED),
    *((symbol, "device", "unified host", False) for symbol in DESCRIBED),
    *((symbol, "unified host", "unified device", False) for symbol in DESCRIBED),
    *((symbol, "unified device", "device", True) for symbol in DESCRIBED),
    *((symbol, "unified device", "unified device", True) for symbol in DESCRIBED),
]


@pytest.mark.promise("program-host-copies")
def test_only_copies_between_device_memories_wait(tenant: Tenant) -> None:
    """Only the descriptor or the driver shows the direction of these copies."""
    parameters = {row.symbol: row.parameters for row in GATED}
    agent = tenant.agent()
    probe = tenant.probe()
    prepare(probe)
    asked = 0
    for symbol, to, source, waits in DIRECTIONS:
        called = probe.post("work", symbol, parameters[symbol], "s", to, source)
        if waits:
            asked += 1
            agent.wait_asked(agent.client(), asked)
            grant = agent.grant(agent.client())
        assert called.result(10).code == 0, (symbol, to, source)
        if waits:
            agent.revoke(agent.client(), grant)
            agent.next_frame(agent.client(), Drained, asked - 1)
        assert len(agent.frames(agent.client(), Want)) == asked, (symbol, to, source)


@pytest.mark.promise("program-host-copies")
def test_host_copies_pass_a_closed_gate(tenant: Tenant) -> None:
    agent = tenant.agent()
    probe = tenant.probe()
    prepare(probe)
    codes = [probe.call("work", row.symbol, row.parameters).code for row in HOST_COPIES]
    assert set(codes) <= {0, 801}
    assert codes.count(0) > 10
    assert not agent.frames(agent.client(), Want)
