"""A program that sends its agent false reports gains nothing under the real agent, which reads the simulated GPU by
NVML.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from harness.host import Stolen
from hook.world.agent_node import FAKE_CUDA, GI, Node, Program, built, running, tenant, wait_for
from sharepod.agent.findings.surcharge import TOLERANCE

pytestmark = pytest.mark.skipif(not built(), reason="hook or double not built: run `make shim doubles`")

CHILD = Path(__file__).resolve().parents[1] / "world" / "lying_child.py"
CONTEXT = 64 << 20
MEASURED_S = 30
UNREAD_S = 0.5
"""Delay of NVML's readings in seconds. So work in this time at either end of the measurement may or may not count."""


def lie(node: Node, tenant_id: str, way: str) -> Program:
    """Start a program of this tenant that sends false reports."""
    environment = dict(os.environ) | {
        "LD_LIBRARY_PATH": str(FAKE_CUDA),
        "FAKE_CUDA_STATE": str(node.state),
        "FAKE_CUDA_VISIBLE": "0",
        "FAKE_CUDA_LABEL": tenant_id,
    }
    return Program([sys.executable, str(CHILD), str(node.path(tenant_id) / "agent.sock"), way], environment)


def of_tenant(node: Node, metric: str, tenant_id: str) -> list[float]:
    return [each.value for each in node.metrics() if each.name == metric and each.labels.get("tenant") == tenant_id]


@pytest.mark.alone
@pytest.mark.promise("time-liar")
def test_a_hook_that_says_at_once_that_it_has_drained_gets_no_more_than_its_share(tmp_path: Path) -> None:
    """A hook with a request of 0.1 reports *drained* at once, but runs 40 ms of work per grant. Its reports alone would
    charge it almost nothing: the agent adds a surcharge for the use that NVML shows."""
    rows = tenant("liar", 0.1), tenant("honest", 0.9)
    with running(tmp_path, *rows, context_bytes=CONTEXT, nvml=True) as node:
        node.launch("honest", "--kernel-us", "1000")
        wait_for(lambda: node.devices().busy_ns("honest") > 0, "work of the honest one")
        liar = lie(node, "liar", "drained")
        try:
            wait_for(lambda: any(of_tenant(node, "sharepod_tenant_surcharged_seconds_total", "liar")), "a surcharge")
            time.sleep(2)  # by now the liar's token buckets are empty
            stolen = Stolen()
            share = node.shares(MEASURED_S, "liar")["liar"]
            taken = stolen.part()
        finally:
            liar.close()
    assert share <= 0.1 + TOLERANCE + 2 * UNREAD_S / MEASURED_S + taken, "0.35 to 0.78 without the surcharge"


@pytest.mark.promise("security-claimed-memory")
def test_a_process_that_claims_memory_without_end_is_bounded_by_the_gpu_and_found_out(tmp_path: Path) -> None:
    rows = tenant("liar", 0.1), tenant("honest", 0.9)
    with running(tmp_path, *rows, context_bytes=CONTEXT, nvml=True) as node:
        honest = node.launch("honest", "--memory", "64M", "--kernel-us", "1000")
        liar = lie(node, "liar", "grown")
        try:
            findings = node.directory / "state" / "findings.json"
            wait_for(lambda: findings.exists() and "MemoryBeyondLimit" in findings.read_text(), "the finding")
            wait_for(lambda: "the GPU has" in node.log(), "the refusal of more")
            used = max(of_tenant(node, "sharepod_tenant_memory_used_bytes", "liar"))
            assert used <= 2 * 16 * GI + CONTEXT, "twice the GPU's memory, and what its context takes"
            assert max(of_tenant(node, "sharepod_tenant_memory_used_bytes", "honest")) < GI
            assert honest.process.poll() is None
        finally:
            liar.close()
