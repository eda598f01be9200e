"""Residue of a pod: found in every layout of cgroups; a tenant has none only after a scan."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.kubelet import pod_processes as cgroups
from sharepod.agent.kubelet.csi import mounts
from sharepod.agent.kubelet.csi.volumes import Volumes
from sharepod.agent.kubelet.pod_processes import PodCgroups, PodResidue, count_processes, pod_of_process

UID = "0c9d5e1e-7c41-4a7f-9a53-3d1e8f4f0a11"
OTHER = "0c9d5e1e-7c41-4a7f-9a53-3d1e8f4f0a12"
SYSTEMD = UID.replace("-", "_")

SLICE = f"pod{SYSTEMD}.slice"

LAYOUTS = {
    "v1 cgroupfs": f"12:cpu,cpuacct:/kubepods/burstable/pod{UID}/c0\n1:name=systemd:/kubepods/burstable/pod{UID}/c0\n",
    "v1 systemd": f"9:memory:/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-{SLICE}/cri-c0.scope\n",
    "v2 cgroupfs": f"0::/kubepods/pod{UID}/c0ffee\n",
    "v2 systemd": f"0::/kubepods.slice/kubepods-{SLICE}/cri-containerd-c0.scope\n",
    "v2 in a cgroup namespace": f"0::/../../kubepods-burstable-{SLICE}/crio-c0.scope\n",
    "kind": f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable-{SLICE}/c\n",
    "own root and a cgroup below": f"0::/shp-a/kubepods/burstable/pod{UID}/c0ffee/init.scope\n",
}


class Proc:
    """A /proc of the test's making."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir()

    def add(self, pid: int, cgroup: str, *, state: str = "S", threads: int = 1, name: str = "train (x) R") -> None:
        folder = self.root / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(cgroup)
        zeros = " ".join(["0"] * 16)
        (folder / "stat").write_text(f"{pid} ({name}) {state} {zeros} {threads} 0 0\n")

    def end(self, pid: int) -> None:
        for file in ("cgroup", "stat"):
            (self.root / str(pid) / file).unlink()
        (self.root / str(pid)).rmdir()


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    (tmp_path / "proc").mkdir()
    return Proc(tmp_path / "proc")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pods_processes_are_found_in_every_layout(layout: str, proc: Proc) -> None:
    proc.add(7, LAYOUTS[layout])
    proc.add(8, LAYOUTS[layout].replace(UID, OTHER).replace(SYSTEMD, OTHER.replace("-", "_")))
    proc.add(9, "0::/system.slice/podman.service\n")
    assert count_processes([UID], proc.root) == {UID: 1}
    assert count_processes([UID, OTHER], proc.root) == {UID: 1, OTHER: 1}
    assert pod_of_process(7, PodCgroups([OTHER, UID]), proc.root) == UID
    assert pod_of_process(9, PodCgroups([OTHER, UID]), proc.root) is None
    assert pod_of_process(10, PodCgroups([OTHER, UID]), proc.root) is None


@given(st.binary(max_size=200))
def test_no_text_is_mistaken_for_a_pod_nor_breaks_the_search(text: bytes) -> None:
    assert PodCgroups([UID]).find(text) is None


@pytest.mark.parametrize("near", [f"pod{UID}x", f"xpod{UID}", f"kubepods-pod{SYSTEMD}x.slice", f"pod{SYSTEMD}.slice.d"])
def test_names_that_only_look_alike_do_not_count(near: str) -> None:
    assert PodCgroups([UID]).find(f"0::/kubepods/{near}/c\n".encode()) is None


def test_the_dead_do_not_count_and_a_dead_leader_of_living_threads_does(proc: Proc) -> None:
    cgroup = LAYOUTS["v2 systemd"]
    proc.add(1, cgroup, state="Z")
    proc.add(2, cgroup, state="X")
    assert count_processes([UID], proc.root) == {}
    proc.add(3, cgroup, state="Z", threads=4)
    proc.add(4, cgroup, state="D")
    proc.add(5, cgroup, name=") Z 0 (")
    assert count_processes([UID], proc.root) == {UID: 3}


def test_this_machines_own_processes_can_be_read() -> None:
    own = Path(f"/proc/{os.getpid()}/cgroup").read_bytes()
    assert own
    assert pod_of_process(os.getpid(), PodCgroups([UID])) is None
    assert count_processes([UID]) == {}


@pytest.fixture
async def volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Volumes:
    def bind(source: Path, target: Path, staging: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(mounts, "bind_readonly", bind)
    return Volumes(pods_dir=tmp_path / "pods", tenants_dir=tmp_path / "tenants", state_dir=tmp_path / "state")


def target(volumes_root: Path, uid: str = UID) -> Path:
    return volumes_root / "pods" / uid / "volumes" / "kubernetes.io~csi" / "sharepod-gpu" / "mount"


async def test_a_tenant_that_never_had_a_volume_leaves_nothing(volumes: Volumes, proc: Proc) -> None:
    assert PodResidue(volumes, proc.root).residue("tenant-a") is None


async def test_volume_then_processes_then_nothing(volumes: Volumes, proc: Proc, tmp_path: Path) -> None:
    residue = PodResidue(volumes, proc.root)
    proc.add(7, LAYOUTS["v1 cgroupfs"])
    proc.add(8, LAYOUTS["v1 cgroupfs"])
    await volumes.publish(target=target(tmp_path), tenant_id="tenant-a", source=tmp_path)
    assert residue.owner_of(7) == "tenant-a"
    assert residue.owner_of(99) is None
    assert residue.residue("tenant-a") == f"its volume is still published at {target(tmp_path)}"
    await volumes.unpublish(target(tmp_path))
    assert residue.residue("tenant-a") == "its pod's processes are being looked for"
    await residue.look()
    assert residue.residue("tenant-a") == "2 processes of its pod still run"
    proc.end(7)
    await residue.look()
    assert residue.residue("tenant-a") == "1 process of its pod still runs"
    proc.end(8)
    assert residue.residue("tenant-a") == "1 process of its pod still runs"
    await residue.look()
    assert residue.residue("tenant-a") is None


async def test_a_tenant_that_is_published_again_is_looked_for_again(
    volumes: Volumes, proc: Proc, tmp_path: Path
) -> None:
    residue = PodResidue(volumes, proc.root)
    for uid in (UID, OTHER):
        await volumes.publish(target=target(tmp_path, uid), tenant_id="tenant-a", source=tmp_path)
        assert "published" in (residue.residue("tenant-a") or "")
        await volumes.unpublish(target(tmp_path, uid))
        assert residue.residue("tenant-a") is not None
        await residue.look()
        assert residue.residue("tenant-a") is None
    proc.add(7, LAYOUTS["v2 cgroupfs"])


async def test_a_scan_for_one_pod_says_nothing_of_the_next(volumes: Volumes, proc: Proc, tmp_path: Path) -> None:
    residue = PodResidue(volumes, proc.root)
    await volumes.publish(target=target(tmp_path, OTHER), tenant_id="tenant-a", source=tmp_path)
    await volumes.unpublish(target(tmp_path, OTHER))
    assert residue.residue("tenant-a") is not None
    await residue.look()
    assert residue.residue("tenant-a") is None
    proc.add(7, LAYOUTS["v1 cgroupfs"])
    await volumes.publish(target=target(tmp_path), tenant_id="tenant-a", source=tmp_path)
    await volumes.unpublish(target(tmp_path))  # nobody asked while it was published
    assert residue.residue("tenant-a") == "its pod's processes are being looked for"
    await residue.look()
    assert residue.residue("tenant-a") == "1 process of its pod still runs"


async def test_looking_goes_on_by_itself_for_whom_was_asked_about(
    volumes: Volumes, proc: Proc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "SCAN_INTERVAL_S", 0.01)
    residue = PodResidue(volumes, proc.root)
    await volumes.publish(target=target(tmp_path), tenant_id="tenant-a", source=tmp_path)
    await volumes.unpublish(target(tmp_path))
    looking = asyncio.create_task(residue.run())
    try:
        async with asyncio.timeout(10):
            while residue.residue("tenant-a") is not None:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
    finally:
        looking.cancel()


async def test_an_unreadable_proc_keeps_the_share_taken(volumes: Volumes, tmp_path: Path) -> None:
    residue = PodResidue(volumes, tmp_path / "nowhere")
    await volumes.publish(target=target(tmp_path), tenant_id="tenant-a", source=tmp_path)
    await volumes.unpublish(target(tmp_path))
    assert residue.residue("tenant-a") is not None
    await residue.look()
    assert residue.residue("tenant-a") is not None
