"""Everything that makes the device work waits for the token: each gated entry point of the table, in each of its forms.

Beside them the host copies, which do not. What an entry point is called with here is chosen by the types of its
parameters, so that a new one is called too.
"""

from __future__ import annotations

import pytest
from sharepod.protocol import Want
from table.render import read_table

from hook.conftest import Tenant

LAUNCHES = ("cuLaunch", "cuGraphLaunch")
GATED = [row for row in read_table() if row.kind == "gate" and not row.name.startswith(LAUNCHES)]
HOST_COPIES = [row for row in read_table() if row.kind == "pass" and row.name.startswith("cuMemcpy")]


def absent(row) -> bool:  # type: ignore[no-untyped-def]
    """The double answers CUDA_ERROR_NOT_SUPPORTED: to the forms of CUDA 2 and 3, of 32 bits, and to a very new one."""
    return row.since < 3020 or row.name.startswith("cuFabricCpy")


@pytest.mark.parametrize("row", GATED, ids=lambda row: row.symbol)
def test_device_work_waits_for_the_token(tenant: Tenant, row) -> None:  # type: ignore[no-untyped-def]
    daemon = tenant.daemon()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("work_memory")
    called = probe.post("work", row.symbol, row.parameters)
    client = daemon.client()
    daemon.next_frame(client, Want)
    assert not called.done()
    assert tenant.submitted() == 0
    daemon.grant(client)
    assert called.result(10).code in ((801,) if absent(row) else (0,))
    assert tenant.submitted() == (0 if absent(row) else 1)
    if "CUstream" not in row.parameters or absent(row):
        return
    probe.ok("capture_begin", "s")
    before = tenant.submitted()
    probe.call("work", row.symbol, row.parameters)  # some cannot be captured
    assert tenant.submitted() == before


@pytest.mark.parametrize("row", HOST_COPIES, ids=lambda row: row.symbol)
def test_host_copies_pass_a_closed_gate(tenant: Tenant, row) -> None:  # type: ignore[no-untyped-def]
    daemon = tenant.daemon()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("stream", "s")
    probe.ok("work_memory")
    assert probe.call("work", row.symbol, row.parameters).code == (801 if absent(row) else 0)
    assert not daemon.frames(daemon.client(), Want)
