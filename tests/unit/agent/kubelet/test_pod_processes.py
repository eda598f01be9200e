"""Residue of a tenant: found by pod in every cgroup layout, and by mount. Only a scan can show that a tenant
has none."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.kubelet import mounts
from sharepod.agent.kubelet import pod_processes as cgroups
from sharepod.agent.kubelet.attachments import Attachments
from sharepod.agent.kubelet.csi.volumes import Volumes
from sharepod.agent.kubelet.dra.entitlement import ClaimIdentity
from sharepod.agent.kubelet.dra.prepared_claims import PreparedClaims
from sharepod.agent.kubelet.pod_processes import PodResidue, pod_of_cgroup, scan_processes
from sharepod.agent.kubelet.reading_time import THREAD_PER_S, ReadingTime
from sharepod.agent.kubelet.tenant_mounts import TenantMounts

UID = "0c9d5e1e-7c41-4a7f-9a53-3d1e8f4f0a11"
OTHER = "0c9d5e1e-7c41-4a7f-9a53-3d1e8f4f0a12"
SYSTEMD = UID.replace("-", "_")

SLICE = f"pod{SYSTEMD}.slice"

TENANTS = "/var/lib/sharepod/tenants"
NOWHERE = TenantMounts(None, "")
THERE = TenantMounts(PurePosixPath(TENANTS), "8:1")

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
    """Folder that a test fills in place of /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir()

    def add(self, pid: int, cgroup: str, *, state: str = "S", threads: int = 1, name: str = "train (x) R") -> None:
        folder = self.root / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(cgroup)
        zeros = " ".join(["0"] * 16)
        (folder / "stat").write_text(f"{pid} ({name}) {state} {zeros} {threads} 0 0\n")

    def mount(self, pid: int, *roots: str, device: str = "8:1", point: str = "/run/sharepod") -> None:
        """Give a process a mount namespace of its own, with mounts of these directories of a filesystem."""
        lines = [f"30 1 {device} {root} {point} ro - ext4 /dev/x rw" for root in ("/", *roots)]
        (self.root / str(pid) / "mountinfo").write_text("\n".join(lines) + "\n")
        (self.root / str(pid) / "ns").mkdir()
        (self.root / str(pid) / "ns/mnt").symlink_to(f"mnt:[{pid}]")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    (tmp_path / "proc").mkdir()
    return Proc(tmp_path / "proc")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pods_processes_are_found_in_every_layout(layout: str, proc: Proc) -> None:
    proc.add(7, LAYOUTS[layout])
    proc.add(8, LAYOUTS[layout].replace(UID, OTHER).replace(SYSTEMD, OTHER.replace("-", "_")))
    proc.add(9, "0::/system.slice/podman.service\n")
    assert scan_processes({"a": [UID]}, NOWHERE, ReadingTime(THREAD_PER_S), proc.root).processes == {"a": 1}
    assert scan_processes({"a": [UID], "b": [OTHER]}, NOWHERE, ReadingTime(THREAD_PER_S), proc.root).processes == {
        "a": 1,
        "b": 1,
    }


@pytest.mark.promise("node-outermost-cgroup")
@pytest.mark.parametrize("nested", [f"pod{UID}/c", f"kubepods/pod{UID}", f"kubepods-burstable-{SLICE}/x", SLICE])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_process_is_not_taken_for_another_pods_by_what_its_own_pod_names_its_cgroups(
    layout: str, nested: str, proc: Proc, volumes: Volumes, attachments: Attachments, tmp_path: Path
) -> None:
    outer = LAYOUTS[layout].replace(UID, OTHER).replace(SYSTEMD, OTHER.replace("-", "_"))
    proc.add(7, outer.replace("\n", f"/{nested}\n"))
    await volumes.publish(target=target(tmp_path), tenant_id="tenant-a", source=tmp_path)
    assert PodResidue(attachments, NOWHERE, proc.root).owner_of(7) is None
    assert scan_processes({"a": [UID], "b": [OTHER]}, NOWHERE, ReadingTime(THREAD_PER_S), proc.root).processes == {
        "b": 1
    }


@pytest.mark.parametrize("near", [f"pod{UID}x", f"xpod{UID}", f"kubepods-pod{SYSTEMD}x.slice", f"pod{SYSTEMD}.slice.d"])
def test_names_that_only_look_alike_do_not_count(near: str) -> None:
    assert pod_of_cgroup(f"0::/kubepods/{near}/c\n".encode()) is None


def test_the_dead_do_not_count_and_a_dead_leader_of_living_threads_does(proc: Proc) -> None:
    cgroup = LAYOUTS["v2 systemd"]
    proc.add(1, cgroup, state="Z")
    proc.add(2, cgroup, state="X")
    assert scan_processes({"a": [UID]}, NOWHERE, ReadingTime(THREAD_PER_S), proc.root).processes == {}
    proc.add(3, cgroup, state="Z", threads=4)
    proc.add(4, cgroup, state="D")
    proc.add(5, cgroup, name=") Z 0 (")
    assert scan_processes({"a": [UID]}, NOWHERE, ReadingTime(THREAD_PER_S), proc.root).processes == {"a": 3}


def test_this_machines_own_processes_can_be_read() -> None:
    own = Path(f"/proc/{os.getpid()}/cgroup").read_bytes()
    assert own
    assert pod_of_cgroup(own) != UID
    assert scan_processes({"a": [UID]}, NOWHERE, ReadingTime(THREAD_PER_S)).processes == {}


@pytest.fixture
async def volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Volumes:
    def bind(source: Path, target: Path, staging: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(mounts, "bind_readonly", bind)
    return Volumes(pods_dir=tmp_path / "pods", tenants_dir=tmp_path / "tenants", state_dir=tmp_path / "state")


@pytest.fixture
async def claims(tmp_path: Path) -> PreparedClaims:
    return PreparedClaims(cdi_dir=tmp_path / "cdi", tenants_dir=tmp_path / "tenants", state_dir=tmp_path / "state")


@pytest.fixture
async def attachments(volumes: Volumes, claims: PreparedClaims) -> Attachments:
    return Attachments(volumes, claims)


async def prepare(claims: PreparedClaims, tenant_id: str = "tenant-a", uid: str = "claim-1") -> None:
    await claims.prepare(ClaimIdentity(namespace="team", name="gpu", uid=uid), lambda: tenant_id)


def target(volumes_root: Path, uid: str = UID) -> Path:
    return volumes_root / "pods" / uid / "volumes" / "kubernetes.io~csi" / "sharepod-gpu" / "mount"


async def test_a_tenant_that_never_had_a_volume_leaves_nothing(
    volumes: Volumes, attachments: Attachments, proc: Proc
) -> None:
    assert PodResidue(attachments, THERE, proc.root).residue("tenant-a") is None


async def test_volume_then_processes_then_nothing(
    volumes: Volumes, attachments: Attachments, proc: Proc, tmp_path: Path
) -> None:
    residue = PodResidue(attachments, THERE, proc.root)
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
    volumes: Volumes, attachments: Attachments, proc: Proc, tmp_path: Path
) -> None:
    residue = PodResidue(attachments, THERE, proc.root)
    for uid in (UID, OTHER):
        await volumes.publish(target=target(tmp_path, uid), tenant_id="tenant-a", source=tmp_path)
        assert "published" in (residue.residue("tenant-a") or "")
        await volumes.unpublish(target(tmp_path, uid))
        assert residue.residue("tenant-a") is not None
        await residue.look()
        assert residue.residue("tenant-a") is None
    proc.add(7, LAYOUTS["v2 cgroupfs"])


async def test_a_scan_for_one_pod_is_no_result_for_the_next(
    volumes: Volumes, attachments: Attachments, proc: Proc, tmp_path: Path
) -> None:
    residue = PodResidue(attachments, THERE, proc.root)
    await volumes.publish(target=target(tmp_path, OTHER), tenant_id="tenant-a", source=tmp_path)
    await volumes.unpublish(target(tmp_path, OTHER))
    assert residue.residue("tenant-a") is not None
    await residue.look()
    assert residue.residue("tenant-a") is None
    proc.add(7, LAYOUTS["v1 cgroupfs"])
    await volumes.publish(target=target(tmp_path), tenant_id="tenant-a", source=tmp_path)
    await volumes.unpublish(target(tmp_path))  # no scan of /proc has taken place while the volume was published
    assert residue.residue("tenant-a") == "its pod's processes are being looked for"
    await residue.look()
    assert residue.residue("tenant-a") == "1 process of its pod still runs"


async def test_looking_goes_on_by_itself_for_whom_was_asked_about(
    volumes: Volumes, attachments: Attachments, proc: Proc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "SCAN_INTERVAL_S", 0.01)
    residue = PodResidue(attachments, THERE, proc.root)
    await volumes.publish(target=target(tmp_path), tenant_id="tenant-a", source=tmp_path)
    await volumes.unpublish(target(tmp_path))
    looking = asyncio.create_task(residue.run())
    try:
        async with asyncio.timeout(10):
            while residue.residue("tenant-a") is not None:  # noqa: ASYNC110 - no event to await
                await asyncio.sleep(0.01)
    finally:
        looking.cancel()


async def test_an_unreadable_proc_keeps_the_share_taken(
    volumes: Volumes, attachments: Attachments, tmp_path: Path
) -> None:
    residue = PodResidue(attachments, THERE, tmp_path / "nowhere")
    await volumes.publish(target=target(tmp_path), tenant_id="tenant-a", source=tmp_path)
    await volumes.unpublish(target(tmp_path))
    assert residue.residue("tenant-a") is not None
    await residue.look()
    assert residue.residue("tenant-a") is not None


async def test_a_claim_then_processes_that_have_its_directory_then_nothing(
    claims: PreparedClaims, attachments: Attachments, proc: Proc
) -> None:
    residue = PodResidue(attachments, THERE, proc.root)
    assert residue.residue("tenant-a") is None
    await prepare(claims)
    assert residue.residue("tenant-a") == "its claim team/gpu is still prepared"
    proc.add(7, LAYOUTS["v2 systemd"])
    proc.mount(7, f"{TENANTS}/tenant-a")
    proc.add(8, LAYOUTS["v2 systemd"].replace(SYSTEMD, OTHER.replace("-", "_")))
    proc.mount(8, f"{TENANTS}/tenant-b")
    await claims.unprepare("claim-1")
    assert residue.residue("tenant-a") == "its pod's processes are being looked for"
    await residue.look()
    assert residue.residue("tenant-a") == "1 process of its pod still runs"
    proc.end(7)
    await residue.look()
    assert residue.residue("tenant-a") is None
    await prepare(claims)
    await claims.unprepare("claim-1")
    assert residue.residue("tenant-a") == "its pod's processes are being looked for"


async def test_the_pod_of_a_claim_is_learned_and_its_processes_that_hide_their_mounts_count(
    claims: PreparedClaims, attachments: Attachments, proc: Proc
) -> None:
    residue = PodResidue(attachments, THERE, proc.root)
    await prepare(claims)
    proc.add(7, LAYOUTS["v1 cgroupfs"])
    proc.mount(7, f"{TENANTS}/tenant-a/ld.so.preload", point="/etc/ld.so.preload")
    proc.add(8, LAYOUTS["v1 cgroupfs"])
    proc.mount(8)
    assert residue.owner_of(8) is None
    await residue.look()
    assert residue.owner_of(8) == "tenant-a"
    assert residue.owner_of(7) == "tenant-a"
    proc.end(7)
    await claims.unprepare("claim-1")
    await residue.look()
    assert residue.residue("tenant-a") is not None
    await residue.look()
    assert residue.residue("tenant-a") == "1 process of its pod still runs"
    await claims.forget_all_but(())
    assert residue.owner_of(8) is None


async def test_an_unknown_pod_is_looked_for_now_and_then_only(
    claims: PreparedClaims, attachments: Attachments, proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = []

    def scan(*_: object) -> cgroups.ProcessScan:
        scans.append(1)
        return cgroups.ProcessScan()

    monkeypatch.setattr(cgroups, "scan_processes", scan)
    monkeypatch.setattr(cgroups, "SCAN_INTERVAL_S", 0.0)
    residue = PodResidue(attachments, THERE, proc.root)
    await prepare(claims)
    proc.add(8, LAYOUTS["v2 cgroupfs"])
    looking = asyncio.create_task(residue.run())
    try:
        for _ in range(50):
            assert residue.owner_of(8) is None
            await asyncio.sleep(0.001)
    finally:
        looking.cancel()
    assert len(scans) <= 2


async def test_only_a_tenants_own_directory_at_its_place_makes_a_process_the_tenants(
    claims: PreparedClaims, attachments: Attachments, proc: Proc
) -> None:
    residue = PodResidue(attachments, THERE, proc.root)
    await prepare(claims)
    root, elsewhere = f"{TENANTS}/tenant-a", "/var/lib/kubelet/pods/x/volumes/y/mount"
    feigned = [
        ("/tenants/tenant-a", "8:1", "/run/sharepod"),
        (root, "0:77", "/run/sharepod"),
        (root, "8:1", elsewhere),
        (f"{TENANTS}/unknown", "8:1", "/run/sharepod"),
        (TENANTS, "8:1", "/run/sharepod"),
    ]
    for pid, (source, device, point) in enumerate(feigned, start=10):
        proc.add(pid, "0::/system.slice/other.service\n")
        proc.mount(pid, source, device=device, point=point)
        assert residue.owner_of(pid) is None
    proc.add(6, "0::/system.slice/other.service\n")
    proc.mount(6, f"{TENANTS}/tenant-a//deleted")
    assert residue.owner_of(6) == "tenant-a"


def test_the_folder_of_the_tenants_is_found_among_the_mounts(tmp_path: Path) -> None:
    there = TenantMounts.of(tmp_path)
    on = mounts.mount_of(tmp_path)
    assert on is not None
    root = PurePosixPath(on.root) / tmp_path.resolve().relative_to(on.point)
    line = f"30 1 {on.device} {root}/tenant-a /run/sharepod ro - ext4 /dev/x rw"
    assert there.named(line.encode()) == {"tenant-a"}
    assert there.named(b"nonsense") == frozenset()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pod_of_a_cgroup_is_known_in_every_layout(layout: str) -> None:
    assert pod_of_cgroup(LAYOUTS[layout].encode()) == UID


@given(st.binary(max_size=200))
def test_no_text_breaks_the_search_for_a_pod(text: bytes) -> None:
    assert pod_of_cgroup(text) is None
