"""Amounts of the resource line's two resources that a node advertises: enough for the ledger's free shares and for the
running Pods."""

from __future__ import annotations

import pytest
from sharepod.api.gpunode import Gpu, Tenant
from sharepod.api.resource_line import MEMORY, MILLI, Carried
from sharepod.api.units import MIB
from sharepod.controller.decisions.advertised import LineOnNode, advertised

GPUS = [Gpu(uuid=f"GPU-{index}", index=index, model="A", memory=16384 * MIB) for index in range(2)]


def line(milli: int, mib: int = 0) -> Carried:
    return Carried(milli, mib)


def row(milli: int, mib: int, *gpus: str) -> Tenant:
    return Tenant(
        id="t",
        namespace="n",
        pod_name="p",
        gpus=gpus or ("GPU-0",),
        request_milli=milli,
        limit_milli=1000,
        memory=mib * MIB,
        state="Reserved",
    )


def amounts(*lines: LineOnNode, in_force: bool = True) -> tuple[int, int]:
    found = advertised(GPUS, lines, in_force=in_force)
    return found[MILLI], found[MEMORY]


def test_without_lowered_shares_it_is_what_the_gpus_have() -> None:
    assert amounts() == (2000, 32768)
    assert amounts(LineOnNode(line(400, 1024), row(400, 1024)), LineOnNode(line(500), row(500, 8192))) == (2000, 32768)
    both = LineOnNode(line(2000, 4096), row(1000, 2048, "GPU-0", "GPU-1"))
    assert amounts(both) == (2000, 32768)


@pytest.mark.promise("operator-line-resize")
def test_what_a_lowered_share_carries_beyond_its_row_is_advertised_on_top() -> None:
    assert amounts(LineOnNode(line(800, 1024), row(200, 1024))) == (2600, 32768)


def test_a_bound_pod_without_a_row_is_advertised_on_top() -> None:
    assert amounts(LineOnNode(line(800, 1024), None)) == (2800, 33792)


@pytest.mark.promise("operator-sharepod-line-resize")
def test_a_raised_share_needs_no_more_than_the_gpus_have() -> None:
    assert amounts(LineOnNode(line(400, 1024), row(600, 4096))) == (2000, 32768)


@pytest.mark.promise("operator-line-capacity-least")
def test_it_is_never_less_than_what_runs_carries_whatever_the_agent_sees() -> None:
    lines = [LineOnNode(line(900, 9000), row(900, 9000, f"GPU-{index}")) for index in range(3)]
    found = advertised(GPUS[:1], lines, in_force=True)
    assert (found[MILLI], found[MEMORY]) == (2700, 27000)


@pytest.mark.promise("operator-line-never-unclaimed")
def test_where_nothing_turns_lines_into_claims_only_what_runs_is_advertised() -> None:
    assert amounts(in_force=False) == (0, 0)
    assert amounts(LineOnNode(line(800, 1024), row(200, 1024)), in_force=False) == (800, 1024)
