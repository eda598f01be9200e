"""The CSI driver as the kubelet calls it: over its sockets, found in the plugin registry. These tests make no
mounts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from sharepod.agent.kubelet import mounts
from sharepod.agent.kubelet import registration as kubelet_module
from sharepod.agent.kubelet.csi.driver import Driver
from sharepod.agent.kubelet.csi.volumes import Volumes
from sharepod.agent.kubelet.registration import KubeletRegistration, propagation_problem
from sharepod.agent.kubelet.wire import csi_pb2 as csi
from sharepod.agent.kubelet.wire import registration_pb2 as registration
from sharepod.agent.kubelet.wire.rpc import SocketError, UnixServer, service
from sharepod.api.gpunode import Tenant, TenantState
from unit.agent.kubelet.ledger import LedgerOfTest
from unit.agent.small_disk import small_disk

NODE = "node-1"


class Bench:
    """Driver under test, and the kubelet that calls it, played by the test."""

    def __init__(self, root: Path, *, state_dir: Path | None = None) -> None:
        self.root = root
        self.pods_dir = root / "kubelet" / "pods"
        self.tenants_dir = root / "tenants"
        self.pods_dir.mkdir(parents=True)
        self.volumes = Volumes(pods_dir=self.pods_dir, tenants_dir=self.tenants_dir, state_dir=state_dir or root)
        self.ledger = LedgerOfTest()
        self.troubles: dict[str, str] = {}
        self.changes = 0
        self.driver = Driver(
            node=NODE,
            version="1.2.3",
            volumes=self.volumes,
            ledger=self.ledger,
            directory=lambda tenant_id: None if tenant_id in self.troubles else self.tenants_dir / tenant_id,
            trouble=lambda tenant_id: self.troubles[tenant_id],
            reservation_wait_s=0.2,
        )
        self.kubelet = KubeletRegistration(root / "kubelet", self.driver.services(), changed=self._count)
        self._channels: list[Any] = []

    def _count(self) -> None:
        self.changes += 1

    def target(self, uid: str = "pod-uid") -> Path:
        return self.pods_dir / uid / "volumes" / "kubernetes.io~csi" / "sharepod-gpu" / "mount"

    async def call(self, socket: Path, method: str, request: Any, response: Any) -> Any:
        channel = grpc.aio.insecure_channel(f"unix:{socket}")
        self._channels.append(channel)
        call = channel.unary_unary(
            method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return await call(request, timeout=10)

    async def publish(
        self, *, name: str = "train", uid: str = "pod-uid", attributes: Mapping[str, str] | None = None
    ) -> None:
        context = {
            **(attributes or {}),
            "csi.storage.k8s.io/ephemeral": "true",
            "csi.storage.k8s.io/pod.namespace": "team",
            "csi.storage.k8s.io/pod.name": name,
            "csi.storage.k8s.io/pod.uid": uid,
        }
        request = csi.NodePublishVolumeRequest(
            volume_id="csi-1", target_path=str(self.target(uid)), volume_context=context
        )
        await self.call(self.socket, "/csi.v1.Node/NodePublishVolume", request, csi.NodePublishVolumeResponse)

    async def unpublish(self, target: Path | None = None) -> None:
        request = csi.NodeUnpublishVolumeRequest(volume_id="csi-1", target_path=str(target or self.target()))
        await self.call(self.socket, "/csi.v1.Node/NodeUnpublishVolume", request, csi.NodeUnpublishVolumeResponse)

    @property
    def socket(self) -> Path:
        return self.root / "kubelet/plugins/gpu.sharepod.dev/csi.sock"

    @property
    def registry_socket(self) -> Path:
        return self.root / "kubelet/plugins_registry/gpu.sharepod.dev-reg.sock"

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        await self.kubelet.stop()


def row(**changes: Any) -> Tenant:
    fields: dict[str, Any] = {
        "id": "tenant-a",
        "namespace": "team",
        "pod_name": "train",
        "pod_uid": "pod-uid",
        "gpus": ("GPU-0",),
        "request_milli": 400,
        "limit_milli": 1000,
        "memory": 1 << 30,
    }
    return Tenant(**{**fields, **changes})


@pytest.fixture
def no_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(source: Path, target: Path, staging: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(mounts, "bind_readonly", bind)


@pytest.fixture
async def bench(no_mounts: None) -> AsyncIterator[Bench]:
    # a short folder, because the path of a socket has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="shp-") as short:
        bench = Bench(Path(short))
        await bench.kubelet.start()
        try:
            yield bench
        finally:
            await bench.close()


async def refused(call: Awaitable[None], code: Any, *parts: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is code, error.value.details()
    for words in parts:
        assert words in error.value.details()


async def test_the_kubelet_finds_the_driver_in_its_registry(bench: Bench) -> None:
    info = await bench.call(
        bench.registry_socket,
        "/pluginregistration.Registration/GetInfo",
        registration.InfoRequest(),
        registration.PluginInfo,
    )
    assert (info.type, info.name, info.endpoint) == ("CSIPlugin", "gpu.sharepod.dev", str(bench.socket))
    assert list(info.supported_versions) == ["1.0.0"]
    for method, request, response in (
        (
            "Identity/GetPluginInfo",
            csi.GetPluginInfoRequest(),
            csi.GetPluginInfoResponse(name="gpu.sharepod.dev", vendor_version="1.2.3"),
        ),
        ("Identity/GetPluginCapabilities", csi.GetPluginCapabilitiesRequest(), csi.GetPluginCapabilitiesResponse()),
        ("Node/NodeGetCapabilities", csi.NodeGetCapabilitiesRequest(), csi.NodeGetCapabilitiesResponse()),
        ("Node/NodeGetInfo", csi.NodeGetInfoRequest(), csi.NodeGetInfoResponse(node_id=NODE)),
    ):
        assert await bench.call(bench.socket, f"/csi.v1.{method}", request, type(response)) == response
    probe = await bench.call(bench.socket, "/csi.v1.Identity/Probe", csi.ProbeRequest(), csi.ProbeResponse)
    assert probe.ready.value is True


async def test_the_sockets_are_roots_alone_and_go_with_the_driver(bench: Bench) -> None:
    for socket in (bench.socket, bench.registry_socket):
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    await bench.kubelet.stop()
    assert not bench.socket.exists()
    assert not bench.registry_socket.exists()


async def test_the_kubelets_answer_to_a_registration_is_kept(bench: Bench) -> None:
    async def notify(**status: Any) -> None:
        await bench.call(
            bench.registry_socket,
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            registration.RegistrationStatus(**status),
            registration.RegistrationStatusResponse,
        )

    assert bench.kubelet.settling
    assert "has not registered" in (bench.kubelet.problem or "")
    await notify(plugin_registered=False, error="node too new")
    assert bench.kubelet.problem == "the kubelet refused the driver for CSI volumes: node too new"
    await notify(plugin_registered=True)
    assert bench.kubelet.problem is None
    assert not bench.kubelet.settling
    assert bench.changes == 2


async def test_a_removed_socket_is_created_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet_module, "CHECK_INTERVAL_S", 0.01)
    watching = asyncio.create_task(bench.kubelet.run())
    try:
        bench.registry_socket.unlink()
        async with asyncio.timeout(10):
            while not bench.registry_socket.exists():  # noqa: ASYNC110 - no event to await
                await asyncio.sleep(0.01)
        await bench.call(
            bench.registry_socket,
            "/pluginregistration.Registration/GetInfo",
            registration.InfoRequest(),
            registration.PluginInfo,
        )
    finally:
        watching.cancel()


async def test_a_reserved_pod_gets_its_tenants_directory(bench: Bench) -> None:
    bench.ledger.set(row())
    for _ in range(2):
        await bench.publish(attributes={"tenant": "tenant-b", "csi.storage.k8s.io/serviceAccount.name": "default"})
    assert bench.volumes.published("tenant-a") == (bench.target(),)
    assert bench.volumes.pods("tenant-a") == {"pod-uid"}
    for _ in range(2):
        await bench.unpublish()
    assert bench.volumes.published("tenant-a") == ()
    assert not bench.target().exists()


async def test_a_row_that_comes_a_moment_later_is_waited_for(bench: Bench) -> None:
    bench.ledger.absent = "the agent has not read its ledger yet"
    publishing = asyncio.create_task(bench.publish())
    await asyncio.sleep(0.02)
    bench.ledger.set()
    await asyncio.sleep(0.02)
    bench.ledger.set(row())
    await publishing
    assert bench.volumes.published("tenant-a") == (bench.target(),)


@pytest.mark.promise("operator-row-before-use")
async def test_a_pod_without_reservation_is_refused_within_the_bound_with_advice(bench: Bench) -> None:
    begun = asyncio.get_running_loop().time()
    await refused(
        bench.publish(), grpc.StatusCode.FAILED_PRECONDITION, "no share of a GPU is reserved", "create a SharePod"
    )
    assert asyncio.get_running_loop().time() - begun < 5
    bench.ledger.absent = "GPUNode node-1 does not exist"
    await refused(bench.publish(), grpc.StatusCode.FAILED_PRECONDITION, "GPUNode node-1 does not exist")


async def test_a_tenant_that_cannot_be_served_is_refused_with_the_reason(bench: Bench) -> None:
    bench.ledger.set(row())
    bench.troubles["tenant-a"] = "gpus: 'GPU-0' is not the UUID of a GPU"
    await refused(bench.publish(), grpc.StatusCode.FAILED_PRECONDITION, "is not the UUID of a GPU", "node-1")


async def test_a_caller_without_entitlement_is_refused(bench: Bench) -> None:
    bench.ledger.set(row(pod_uid="another"))
    await refused(bench.publish(), grpc.StatusCode.FAILED_PRECONDITION, "for the pod with UID another", "tries again")
    bench.ledger.set(row(state=TenantState.RELEASING))
    await refused(bench.publish(), grpc.StatusCode.PERMISSION_DENIED, "is being released")
    assert bench.volumes.tenants() == frozenset()


async def test_a_target_of_another_pod_is_refused(bench: Bench) -> None:
    bench.ledger.set(row())
    request = csi.NodePublishVolumeRequest(
        volume_id="csi-1",
        target_path=str(bench.target("victim")),
        volume_context={
            "csi.storage.k8s.io/ephemeral": "true",
            "csi.storage.k8s.io/pod.namespace": "team",
            "csi.storage.k8s.io/pod.name": "train",
            "csi.storage.k8s.io/pod.uid": "pod-uid",
        },
    )
    call = bench.call(bench.socket, "/csi.v1.Node/NodePublishVolume", request, csi.NodePublishVolumeResponse)
    await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "is not one of pod team/train")


@pytest.mark.parametrize("target", ["", "relative/path", "/var/../etc"])
async def test_a_path_that_is_none_is_refused(bench: Bench, target: str) -> None:
    request = csi.NodeUnpublishVolumeRequest(volume_id="csi-1", target_path=target)
    call = bench.call(bench.socket, "/csi.v1.Node/NodeUnpublishVolume", request, csi.NodeUnpublishVolumeResponse)
    await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "absolute path")
    no_id = csi.NodeUnpublishVolumeRequest(target_path=str(bench.target()))
    call = bench.call(bench.socket, "/csi.v1.Node/NodeUnpublishVolume", no_id, csi.NodeUnpublishVolumeResponse)
    await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "volume_id")


async def test_a_volume_outside_the_kubelets_root_is_refused_with_advice(bench: Bench) -> None:
    await refused(bench.unpublish(Path("/var/lib/elsewhere/mount")), grpc.StatusCode.INTERNAL, "kubelet_root")


async def test_unpublishing_needs_no_ledger(bench: Bench) -> None:
    bench.ledger.set(row())
    await bench.publish()
    bench.ledger.set()
    bench.ledger.absent = "GPUNode node-1 does not exist"
    await refused(bench.publish(), grpc.StatusCode.FAILED_PRECONDITION, "does not exist", "tries again")
    await bench.unpublish()
    assert bench.volumes.published("tenant-a") == ()


async def test_an_internal_error_is_answered_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    bench.ledger.set(row())
    monkeypatch.setattr(mounts, "bind_readonly", fail)
    await refused(bench.publish(), grpc.StatusCode.INTERNAL, "No space left on device", str(bench.target()))

    def defect(tenant_id: str) -> Path:
        raise KeyError("defect")

    monkeypatch.setattr(bench.driver, "_directory", defect)
    await refused(bench.publish(), grpc.StatusCode.INTERNAL, "NodePublishVolume", "see its log")


@pytest.mark.promise("node-full-disk")
@pytest.mark.parametrize("how", ["full", "read-only"])
async def test_volumes_can_be_unpublished_whatever_the_state_directory_takes(
    no_mounts: None, tmp_path: Path, how: str
) -> None:
    with small_disk(tmp_path / "state") as disk, tempfile.TemporaryDirectory(prefix="shp-") as short:
        bench = Bench(Path(short), state_dir=disk.path)
        await bench.kubelet.start()
        try:
            bench.ledger.set(row(pod_name="train-1", pod_uid="pod-1"))
            await bench.publish(name="train-1", uid="pod-1")
            with contextlib.ExitStack() as stack:
                if how == "full":
                    disk.fill()
                else:
                    stack.enter_context(disk.read_only())
                await bench.unpublish(bench.target("pod-1"))
                assert not bench.target("pod-1").exists()
                assert bench.volumes.published("tenant-a") == ()
                bench.ledger.set(row(pod_name="train-2", pod_uid="pod-2"))
                with pytest.raises(grpc.aio.AioRpcError, match=r"No space left|Read-only file system"):
                    await bench.publish(name="train-2", uid="pod-2")
                again = Volumes(pods_dir=bench.pods_dir, tenants_dir=bench.tenants_dir, state_dir=disk.path)
                again.recover()
                await again.unpublish(bench.target("pod-2"))
        finally:
            await bench.close()


@pytest.mark.promise("node-full-disk")
async def test_a_kubelet_folder_on_a_read_only_disk_is_a_problem_until_it_is_writable_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet_module, "CHECK_INTERVAL_S", 0.02)
    with tempfile.TemporaryDirectory(prefix="shp-") as short, small_disk(Path(short) / "k") as disk:
        (disk.path / "plugins_registry").mkdir()
        changed = asyncio.Event()
        kubelet = KubeletRegistration(disk.path, (), changed=changed.set)
        with disk.read_only():
            await kubelet.start()
            assert "Read-only file system" in (kubelet.problem or "")
            assert not kubelet.settling
        running = asyncio.create_task(kubelet.run())
        try:
            await asyncio.wait_for(changed.wait(), 20)
            assert kubelet.settling
            assert "has not registered" in (kubelet.problem or "")
            assert kubelet_module.plugin_socket(disk.path, kubelet_module.CSI_PLUGIN).is_socket()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await kubelet.stop()


async def test_a_socket_left_by_a_killed_agent_is_replaced(bench: Bench, tmp_path: Path) -> None:
    left = tmp_path / "left.sock"
    left.touch()
    server = UnixServer(left)
    await server.start()
    await server.stop(0)
    assert not left.exists()


@pytest.fixture
def short() -> Iterator[Path]:
    """Return a folder with a short path, because the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="k") as folder:
        yield Path(folder)


def _sockets(root: Path) -> dict[Path, int]:
    """Return the inodes of all sockets in the folder, including sockets under the temporary name that they have before
    a rename.
    """
    return {path: path.stat().st_ino for path in root.rglob("*.sock*")}


@pytest.mark.promise("install-no-gap")
async def test_an_agent_that_stops_late_leaves_the_sockets_of_the_next_one(short: Path) -> None:
    """If the old agent removed the new agent's sockets, the kubelet would unregister the plugin, and mount no volume
    for seconds.
    """
    old, new = KubeletRegistration(short, ()), KubeletRegistration(short, ())
    await old.start()
    await new.start()
    made = _sockets(short)
    assert len(made) == 2
    await old.stop()
    assert _sockets(short) == made
    async with grpc.aio.insecure_channel(f"unix:{next(path for path in made if 'reg' in path.name)}") as channel:
        got = await channel.unary_unary("/pluginregistration.Registration/GetInfo")(b"", timeout=10)
    assert registration.PluginInfo.FromString(got).name == kubelet_module.CSI_PLUGIN.name
    await new.stop()
    assert _sockets(short) == {}


async def test_a_socket_that_cannot_be_created_is_reported_with_path_and_cause(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SocketError, match="kubelet_root"):
        await UnixServer(tmp_path / "file" / "csi.sock").start()
    with pytest.raises(SocketError, match="longer than 107 bytes"):
        await UnixServer(tmp_path / ("x" * 120) / "csi.sock").start()


def test_a_service_must_handle_just_its_methods() -> None:
    async def handler(request: Any) -> Any:
        return request

    with pytest.raises(ValueError, match="GetPluginCapabilities"):
        service(csi.DESCRIPTOR, "Identity", {"Probe": handler})


def test_missing_propagation_is_noticed_only_where_it_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on(shared: bool, *, container: bool) -> str | None:
        mount = mounts.Mount(root="/", point=Path("/"), options=frozenset({"rw"}), shared=shared)
        monkeypatch.setattr(mounts, "mounts", lambda: (mount,))
        real: Callable[[Path], Path] = Path.readlink
        answers = {"/proc/self/ns/mnt": "mnt:[1]", "/proc/1/ns/mnt": "mnt:[2]" if container else "mnt:[1]"}
        monkeypatch.setattr(
            Path, "readlink", lambda path: Path(answers[str(path)]) if str(path) in answers else real(path)
        )
        try:
            return propagation_problem(tmp_path)
        finally:
            monkeypatch.undo()

    assert on(True, container=True) is None
    assert on(False, container=False) is None
    assert "Bidirectional" in (on(False, container=True) or "")


def test_sockets_fit_the_usual_kubelet_roots() -> None:
    for root in ("/var/lib/kubelet", "/var/snap/microk8s/common/var/lib/kubelet", "/var/lib/k0s/kubelet"):
        assert len(os.fsencode(kubelet_module.plugin_socket(Path(root), kubelet_module.CSI_PLUGIN))) <= 107
