"""Cases of `test_csi_volumes.py`, each run in a process and a mount namespace of its own:
`python csi_mount_cases.py CASE DIRECTORY`.
"""

# ruff: noqa: ASYNC220, ASYNC221 - nothing else runs in a case's process

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from unittest import mock

import pytest
from sharepod.agent.kubelet import mounts
from sharepod.agent.kubelet.csi.volumes import TargetError, VolumeBusyError, VolumeError, Volumes

CASES: dict[str, Callable[[Path], Coroutine[None, None, None]]] = {}


def case(function: Callable[[Path], Coroutine[None, None, None]]) -> Callable[[Path], Coroutine[None, None, None]]:
    CASES[function.__name__] = function
    return function


class Node:
    """Folder of a kubelet's pods, and state directory of an agent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pods = root / "kubelet" / "pods"
        self.state = root / "state"
        self.tenants = self.state / "tenants"
        self.pods.mkdir(parents=True)
        self.tenants.mkdir(parents=True)

    def tenant(self, tenant_id: str = "tenant-a") -> Path:
        directory = self.tenants / tenant_id
        directory.mkdir()
        (directory / "limits").write_text(tenant_id)
        return directory

    def target(self, pod: str = "pod-1", name: str = "sharepod-gpu") -> Path:
        parent = self.pods / pod / "volumes" / "kubernetes.io~csi" / name
        parent.mkdir(parents=True, exist_ok=True)  # the kubelet creates the parent folder, the driver the target
        return parent / "mount"

    def volumes(self) -> Volumes:
        volumes = Volumes(pods_dir=self.pods, tenants_dir=self.tenants, state_dir=self.state)
        volumes.recover()
        return volumes


def refuses_writes(directory: Path) -> bool:
    try:
        (directory / "new").write_text("")
    except OSError as error:
        return error.errno == errno.EROFS
    return False


@case
async def a_published_volume_shows_the_tenants_directory_read_only(root: Path) -> None:
    node = Node(root)
    source, target, volumes = node.tenant(), node.target(), node.volumes()
    await volumes.publish(target=target, tenant_id="tenant-a", source=source)
    assert (target / "limits").read_text() == "tenant-a"
    (source / "limits.new").write_text("changed")
    (source / "limits.new").rename(source / "limits")
    assert (target / "limits").read_text() == "changed"
    assert refuses_writes(target)
    assert not refuses_writes(source)
    assert volumes.published("tenant-a") == (target,)
    assert volumes.pods("tenant-a") == {"pod-1"}
    assert [mount.point for mount in mounts.mounts() if node.state in mount.point.parents] == []
    on_top = mounts.mounted_at(target)
    assert on_top is not None
    assert on_top.options >= {"ro", "nosuid", "nodev"}


@case
async def publishing_and_unpublishing_again_changes_nothing(root: Path) -> None:
    node = Node(root)
    source, target, volumes = node.tenant(), node.target(), node.volumes()
    for _ in range(3):
        await volumes.publish(target=target, tenant_id="tenant-a", source=source)
    assert [mount.point for mount in mounts.mounts()].count(target) == 1
    for _ in range(3):
        await volumes.unpublish(target)
        assert not target.exists()
    assert volumes.published("tenant-a") == ()
    assert (source / "limits").exists()


@case
async def what_an_interrupted_publish_left_is_put_right(root: Path) -> None:
    node = Node(root)
    source, target = node.tenant(), node.target()
    target.mkdir()
    # An agent was killed twice between the bind mount and its remount as read-only: once at the target, once in the
    # staging directory.
    staging = node.state / "staging" / "7"
    staging.mkdir(parents=True)
    for where in (target, target, staging):
        subprocess.run(["mount", "--bind", source, where], check=True)
    volumes = node.volumes()
    assert volumes.published("tenant-a") == (target,)
    assert not staging.exists()
    await volumes.publish(target=target, tenant_id="tenant-a", source=source)
    assert refuses_writes(target)
    assert [mount.point for mount in mounts.mounts()].count(target) == 1


@case
async def a_published_volume_that_is_asked_for_again_on_a_full_disk_stays(root: Path) -> None:
    node = Node(root)
    source, target, volumes = node.tenant(), node.target(), node.volumes()
    await volumes.publish(target=target, tenant_id="tenant-a", source=source)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("sharepod.agent.state.files.replace", side_effect=full):
        await volumes.publish(target=target, tenant_id="tenant-a", source=source)
        assert (target / "limits").read_text() == "tenant-a"
        assert volumes.published("tenant-a") == (target,)
        with pytest.raises(VolumeError, match="No space left"):
            await volumes.publish(target=node.target("pod-2"), tenant_id="tenant-a", source=source)
    assert volumes.published("tenant-a") == (target,)
    assert not node.target("pod-2").exists()


@case
async def a_volume_reaches_other_mount_namespaces_read_only(root: Path) -> None:
    node = Node(root)
    source, target = node.tenant(), node.target()
    subprocess.run(["mount", "--bind", node.pods, node.pods], check=True)
    subprocess.run(["mount", "--make-shared", node.pods], check=True)
    # `host` sees the mounts made here, as a host sees the mounts of a container with Bidirectional propagation.
    command = ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", "echo ready; read line"]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert host.stdin is not None
    assert host.stdout is not None
    try:
        assert host.stdout.readline() == b"ready\n"
        volumes = node.volumes()
        await volumes.publish(target=target, tenant_id="tenant-a", source=source)
        seen = Path(f"/proc/{host.pid}/root") / str(target).lstrip("/")
        assert (seen / "limits").read_text() == "tenant-a"
        assert refuses_writes(seen)
        await volumes.unpublish(target)
        assert not seen.exists()
    finally:
        host.stdin.close()
        host.wait(timeout=10)


@case
async def a_restarted_agent_knows_what_is_published(root: Path) -> None:
    node = Node(root)
    first = node.volumes()
    for tenant_id, pod in (("tenant-a", "pod-1"), ("tenant-b", "pod-2"), ("tenant-c", "pod-3")):
        await first.publish(target=node.target(pod), tenant_id=tenant_id, source=node.tenant(tenant_id))
    await first.unpublish(node.target("pod-2"))
    second = node.volumes()
    assert second.published("tenant-a") == (node.target("pod-1"),)
    assert second.published("tenant-b") == ()
    assert second.pods("tenant-b") == {"pod-2"}
    (node.state / "volumes.json").write_text("{ torn")
    third = node.volumes()
    assert third.published("tenant-a") == (node.target("pod-1"),)
    assert third.pods("tenant-c") == {"pod-3"}
    assert third.pods("tenant-b") == frozenset()


@case
async def a_volume_that_is_mounted_no_more_is_not_published(root: Path) -> None:
    node = Node(root)
    target = node.target()
    await node.volumes().publish(target=target, tenant_id="tenant-a", source=node.tenant())
    subprocess.run(["umount", target], check=True)  # as after a reboot
    volumes = node.volumes()
    assert volumes.published("tenant-a") == ()
    assert volumes.pods("tenant-a") == {"pod-1"}


@case
async def a_volume_is_unpublished_though_its_tenants_directory_is_gone(root: Path) -> None:
    node = Node(root)
    source, target = node.tenant(), node.target()
    await node.volumes().publish(target=target, tenant_id="tenant-a", source=source)
    (source / "limits").unlink()
    source.rmdir()
    (node.state / "volumes.json").unlink()
    volumes = node.volumes()
    assert volumes.published("tenant-a") == (target,)
    await volumes.unpublish(target)
    assert volumes.published("tenant-a") == ()
    assert not target.exists()


@case
async def a_volume_counts_as_published_before_it_is_mounted(root: Path) -> None:
    node = Node(root)
    source, target, volumes = node.tenant(), node.target(), node.volumes()
    seen: list[object] = []

    def look(*_: object) -> None:
        seen.append((volumes.published("tenant-a"), "tenant-a" in (node.state / "volumes.json").read_text()))
        raise OSError(errno.EIO, "disk on fire")

    with mock.patch.object(mounts, "bind_readonly", look), pytest.raises(VolumeError, match="disk on fire"):
        await volumes.publish(target=target, tenant_id="tenant-a", source=source)
    assert seen == [((target,), True)]
    assert volumes.published("tenant-a") == ()
    await volumes.publish(target=target, tenant_id="tenant-a", source=source)
    assert volumes.published("tenant-a") == (target,)


@case
async def a_second_operation_on_a_target_waits_for_the_first(root: Path) -> None:
    node = Node(root)
    source, target, volumes = node.tenant(), node.target(), node.volumes()
    first = asyncio.create_task(volumes.publish(target=target, tenant_id="tenant-a", source=source))
    await asyncio.sleep(0)
    for second in (volumes.unpublish(target), volumes.publish(target=target, tenant_id="tenant-a", source=source)):
        with pytest.raises(VolumeBusyError):
            await second
    first.cancel()  # the kubelet has given up; the mount must still complete, and no other call may begin before
    await asyncio.gather(first, return_exceptions=True)
    for _ in range(1000):
        try:
            await volumes.unpublish(target)
            break
        except VolumeBusyError:
            await asyncio.sleep(0.01)
    assert mounts.mounted_at(target) is None
    assert volumes.published("tenant-a") == ()


@case
async def a_pod_is_remembered_until_its_tenant_is_forgotten(root: Path) -> None:
    node = Node(root)
    source, target, volumes = node.tenant(), node.target(), node.volumes()
    await volumes.publish(target=target, tenant_id="tenant-a", source=source)
    await volumes.forget_all_but(set())
    assert volumes.published("tenant-a") == (target,)
    await volumes.unpublish(target)
    await volumes.forget_all_but({"tenant-a"})
    assert volumes.pods("tenant-a") == {"pod-1"}
    await volumes.forget_all_but(set())
    assert volumes.pods("tenant-a") == frozenset()
    assert node.volumes().tenants() == frozenset()


@case
async def nothing_outside_the_kubelets_pods_is_touched(root: Path) -> None:
    node = Node(root)
    source, volumes = node.tenant(), node.volumes()
    precious = root / "precious"
    precious.mkdir()
    for target in (
        precious,
        node.pods,
        node.pods / "pod-1",
        node.pods / "pod-1" / "volumes" / "kubernetes.io~secret" / "x" / "mount",
        node.pods / "pod-1" / "volumes" / "kubernetes.io~csi" / "x" / "mount" / "deeper",
    ):
        for operation in (
            volumes.publish(target=target, tenant_id="tenant-a", source=source),
            volumes.unpublish(target),
        ):
            with pytest.raises(TargetError, match="kubelet_root"):
                await operation
    assert precious.is_dir()


@case
async def a_kubelet_root_that_is_a_symbolic_link_changes_nothing(root: Path) -> None:
    (root / "data").mkdir()
    (root / "kubelet").symlink_to(root / "data")
    node = Node(root)
    source, target, volumes = node.tenant(), node.target(), node.volumes()
    for _ in range(2):
        await volumes.publish(target=target, tenant_id="tenant-a", source=source)
    assert refuses_writes(target)
    (node.state / "volumes.json").unlink()
    volumes = node.volumes()
    assert volumes.published("tenant-a") == (target,)
    await volumes.unpublish(target)
    assert not target.exists()
    assert volumes.published("tenant-a") == ()


@case
async def a_running_user_of_the_mount_does_not_hold_up_unpublishing(root: Path) -> None:
    node = Node(root)
    source, target, volumes = node.tenant(), node.target(), node.volumes()
    await volumes.publish(target=target, tenant_id="tenant-a", source=source)
    descriptor = os.open(target / "limits", os.O_RDONLY)
    try:
        await volumes.unpublish(target)
        assert not target.exists()
        assert os.read(descriptor, 100) == b"tenant-a"
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    asyncio.run(CASES[sys.argv[1]](Path(sys.argv[2])))
