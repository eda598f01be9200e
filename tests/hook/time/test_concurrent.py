"""Real programs with gaps under the real agent and the real hook, with `sharing: Concurrent`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hook.world.agent_node import GPUS, MODEL, PROGRAMS, Node, Program, built, running, tenant, wait_for

pytestmark = pytest.mark.skipif(not built(), reason="hook or double not built: run `make shim doubles`")

SETTLE_S = 2.0
MEASURED_S = 4.0
SLICES = {"FAKE_CUDA_SLICE_US": "1024", "FAKE_CUDA_SWITCH_US": "91"}


def gaps(node: Node, name: str, kind: str = "e22") -> Program:
    environment = node.environment(name) | SLICES
    return Program([str(PROGRAMS / "gaps"), kind, "--slept", "0.7"], environment)


def co_run_seconds(node: Node) -> list[float]:
    """Return by tenant the seconds for which it held the GPU while another tenant held it, too."""
    return [each.value for each in node.metrics() if each.name == "sharepod_tenant_co_run_seconds_total"]


def kernel_seconds(directory: Path, sharing: str, kinds: dict[str, str]) -> dict[str, float]:
    """Return by program the seconds of the window in which the GPU ran its kernels."""
    directory.mkdir()
    rows = [tenant(name, 1 / len(kinds)) for name in kinds]
    with running(directory, *rows, sharing=sharing) as node:
        programs = [gaps(node, name, kind) for name, kind in kinds.items()]
        try:
            wait_for(lambda: all(node.devices().busy_ns(name) > 0 for name in kinds), "device time of all")
            time.sleep(SETTLE_S)
            if sharing == "Concurrent":
                wait_for(lambda: min(co_run_seconds(node)) > 1, "a second of co-running")
            shares = node.shares(MEASURED_S, *kinds)
        finally:
            for program in programs:
                program.close()
    return {name: share * MEASURED_S for name, share in shares.items()}


@pytest.mark.promise("time-concurrent")
def test_two_programs_with_gaps_do_more_at_once_than_in_turns(tmp_path: Path) -> None:
    kinds = {"a": "e22", "b": "e22"}
    in_turns = kernel_seconds(tmp_path / "turns", "Exclusive", kinds)
    at_once = kernel_seconds(tmp_path / "once", "Concurrent", kinds)
    assert sum(at_once.values()) > 1.3 * sum(in_turns.values()), (at_once, in_turns)


@pytest.mark.promise("time-concurrent-agent-ends")
def test_tenants_that_run_at_once_live_through_a_restart_of_the_agent(tmp_path: Path) -> None:
    with running(tmp_path, tenant("a", 0.5), tenant("b", 0.5), sharing="Concurrent") as node:
        programs = [gaps(node, name) for name in ("a", "b")]
        try:
            wait_for(lambda: all(node.devices().busy_ns(name) > 0 for name in ("a", "b")), "device time of both")
            time.sleep(SETTLE_S)
            node.stop_agent()
            node.start_agent(tenant("a", 0.5), tenant("b", 0.5))
            time.sleep(SETTLE_S)
            shares = node.shares(2, "a", "b")
            assert all(program.process.poll() is None for program in programs)
        finally:
            for program in programs:
                program.close()
    assert all(share > 0.05 for share in shares.values()), shares


def co_run(
    directory: Path, sharing: str, *, by_gpu: dict[str, str] | None = None, denies: str = "", until_s: float = 0
) -> list[float]:
    """Return the co-run seconds of two programs with gaps, after `SETTLE_S` or once both have more than `until_s`."""
    rows = [tenant(name, 0.5, coRunning="Deny" if name == denies else "Allow") for name in ("a", "b")]
    with running(directory, *rows, sharing=sharing, sharing_by_gpu=json.dumps(by_gpu or {})) as node:
        programs = [gaps(node, name) for name in ("a", "b")]
        try:
            wait_for(lambda: all(node.devices().busy_ns(name) > 0 for name in ("a", "b")), "device time of both")
            if until_s:
                wait_for(lambda: min(co_run_seconds(node)) > until_s, "co-running")
            else:
                time.sleep(SETTLE_S)
            return co_run_seconds(node)
        finally:
            for program in programs:
                program.close()


@pytest.mark.promise("time-co-running-denied")
def test_no_tenant_runs_at_the_same_time_as_one_that_denies_it(tmp_path: Path) -> None:
    assert co_run(tmp_path, "Concurrent", denies="b") == [0, 0]


def test_sharing_of_one_gpu_has_precedence(tmp_path: Path) -> None:
    assert co_run(tmp_path, "Concurrent", by_gpu={GPUS[0]: "Exclusive"}) == [0, 0]


def test_sharing_of_a_model_is_that_of_its_gpus(tmp_path: Path) -> None:
    assert min(co_run(tmp_path, "Exclusive", by_gpu={MODEL: "Concurrent"}, until_s=0.1)) > 0.1
