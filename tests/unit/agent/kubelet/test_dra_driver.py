"""The DRA driver as the kubelet calls it: over its sockets, found in the plugin registry. The files are real."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from sharepod.agent.kubelet.dra import prepared_claims as claims_module
from sharepod.agent.kubelet.dra import prepared_self_tests as self_test_module
from sharepod.agent.kubelet.dra.claim_driver import ClaimDriver
from sharepod.agent.kubelet.dra.entitlement import ClaimIdentity
from sharepod.agent.kubelet.dra.prepared_claims import PreparedClaims
from sharepod.agent.kubelet.dra.prepared_self_tests import PreparedSelfTests
from sharepod.agent.kubelet.registration import DRA_PLUGIN, KubeletRegistration
from sharepod.agent.kubelet.wire import dra_pb2 as dra
from sharepod.agent.kubelet.wire import registration_pb2 as registration
from sharepod.api.gpunode import ClaimReference, Tenant, TenantState
from unit.agent.kubelet.ledger import LedgerOfTest

NODE = "node-1"
GPU = "GPU-11111111-1111-1111-1111-11111111111A"
UID = "0c9d5e1e-7c41-4a7f-9a53-3d1e8f4f0a11"
OTHER = "0c9d5e1e-7c41-4a7f-9a53-3d1e8f4f0a12"


class ClaimBench:
    """Driver under test, the files that it writes, and the kubelet that calls it, played by the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cdi = root / "cdi"
        self.now = 100.0
        self.ledger = LedgerOfTest()
        self.troubles: dict[str, str] = {}
        self.gpu_devices = {GPU: f"nvidia.com/gpu={GPU}"}
        self.claims = self.start()
        self.self_test = self.start_self_test()
        self.driver = ClaimDriver(
            node=NODE,
            claims=self.claims,
            ledger=self.ledger,
            directory=lambda tenant_id: None if tenant_id in self.troubles else root / "tenants" / tenant_id,
            trouble=lambda tenant_id: self.troubles[tenant_id],
            gpu_devices=lambda uuids: {uuid: self.gpu_devices[uuid] for uuid in uuids if uuid in self.gpu_devices},
            self_test=self.self_test,
            patience_s=0.2,
        )
        self.kubelet = KubeletRegistration(root / "kubelet", self.driver.services(), DRA_PLUGIN)
        self._channels: list[Any] = []

    def start(self) -> PreparedClaims:
        """Return the claims that a newly started agent knows."""
        claims = PreparedClaims(cdi_dir=self.cdi, tenants_dir=self.root / "tenants", state_dir=self.root)
        claims.recover()
        return claims

    def start_self_test(self) -> PreparedSelfTests:
        """Return the claims of the self-test that a newly started agent knows."""
        found = PreparedSelfTests(
            cdi_dir=self.cdi,
            state_dir=self.root,
            namespace="sharepod-system",
            gpu_devices=lambda: sorted(self.gpu_devices.values()),
            clock=lambda: self.now,
        )
        found.recover()
        return found

    async def call(self, socket: Path, method: str, request: Any, response: Any) -> Any:
        channel = grpc.aio.insecure_channel(f"unix:{socket}")
        self._channels.append(channel)
        call = channel.unary_unary(
            method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return await call(request, timeout=10)

    async def prepare(self, *claims: dra.Claim) -> dict[str, dra.NodePrepareResourceResponse]:
        answer = await self.call(
            self.root / "kubelet/plugins/gpu.sharepod.dev/dra.sock",
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            dra.NodePrepareResourcesRequest(claims=claims or [claim()]),
            dra.NodePrepareResourcesResponse,
        )
        return dict(answer.claims)

    async def unprepare(self, *claims: dra.Claim) -> dict[str, dra.NodeUnprepareResourceResponse]:
        answer = await self.call(
            self.root / "kubelet/plugins/gpu.sharepod.dev/dra.sock",
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            dra.NodeUnprepareResourcesRequest(claims=claims or [claim()]),
            dra.NodeUnprepareResourcesResponse,
        )
        return dict(answer.claims)

    def file(self, uid: str = UID) -> Path:
        return self.cdi / f"sharepod-{uid}.json"

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        await self.kubelet.stop()
        await self.claims.close()


def claim(uid: str = UID, name: str = "gpu", namespace: str = "team") -> dra.Claim:
    return dra.Claim(namespace=namespace, name=name, uid=uid)


def row(uid: str = UID, **changes: Any) -> Tenant:
    fields: dict[str, Any] = {
        "id": uid,
        "namespace": "team",
        "claim": ClaimReference(name="gpu", uid=uid),
        "gpus": (GPU,),
        "request_milli": 400,
        "limit_milli": 1000,
        "memory": 1 << 30,
    }
    return Tenant(**(fields | changes))


@pytest.fixture
async def bench() -> AsyncIterator[ClaimBench]:
    # a short folder, because the path of a socket has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="shp-") as root:
        bench = ClaimBench(Path(root))
        await bench.kubelet.start()
        yield bench
        await bench.close()


async def test_the_kubelet_finds_a_dra_plugin(bench: ClaimBench) -> None:
    socket = bench.root / "kubelet/plugins_registry/gpu.sharepod.dev-dra-reg.sock"
    plugin = await bench.call(
        socket, "/pluginregistration.Registration/GetInfo", registration.InfoRequest(), registration.PluginInfo
    )
    assert (plugin.type, plugin.name, list(plugin.supported_versions)) == (
        "DRAPlugin",
        "gpu.sharepod.dev",
        ["v1.DRAPlugin"],
    )
    assert plugin.endpoint.endswith("/plugins/gpu.sharepod.dev/dra.sock")


async def test_a_claim_with_a_row_gets_the_tenants_directory_and_the_gpus_own_device(bench: ClaimBench) -> None:
    bench.ledger.set(row())
    answer = await bench.prepare()
    (device,) = answer[UID].devices
    assert (device.pool_name, device.device_name) == (NODE, GPU.lower())
    assert list(device.request_names) == []
    assert list(device.cdi_device_ids) == [f"sharepod.dev/tenant={UID}", f"nvidia.com/gpu={GPU}"]
    specification = json.loads(bench.file().read_text())
    assert (specification["kind"], specification["devices"][0]["name"]) == ("sharepod.dev/tenant", UID)
    mounts = {
        each["containerPath"]: (each["hostPath"], each["options"])
        for each in specification["devices"][0]["containerEdits"]["mounts"]
    }
    directory = str(bench.root / "tenants" / UID)
    assert mounts == {
        "/run/sharepod": (directory, ["rbind", "ro", "nosuid", "nodev"]),
        "/etc/ld.so.preload": (f"{directory}/ld.so.preload", ["rbind", "ro", "nosuid", "nodev"]),
    }
    assert bench.claims.prepared(UID) == ("team/gpu",)
    assert await bench.prepare() == answer


async def test_a_sharepods_claim_is_the_sharepods_tenant(bench: ClaimBench) -> None:
    bench.ledger.set(row(id="sharepod-uid", pod_name="train"))
    assert not (await bench.prepare())[UID].error
    assert bench.claims.prepared("sharepod-uid") == ("team/gpu",)
    assert str(bench.root / "tenants/sharepod-uid") in bench.file().read_text()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((), "no share of a GPU is reserved on node node-1 for claim team/gpu"),
        ((row(OTHER),), "no share of a GPU is reserved"),
        ((row(state=TenantState.RELEASING),), "is being released"),
        ((row(namespace="elsewhere"),), "delete the Pod"),
        ((row(claim=ClaimReference(name="another", uid=UID)),), "delete the Pod"),
        ((row(claim=None),), "no share of a GPU is reserved"),
    ],
)
async def test_a_claim_without_a_row_gets_a_message_and_no_devices(
    bench: ClaimBench, rows: tuple[Tenant, ...], words: str
) -> None:
    bench.ledger.set(*rows)
    answer = await bench.prepare()
    assert words in answer[UID].error
    assert not bench.file().exists()
    assert bench.claims.tenants() == frozenset()


async def test_a_row_that_comes_late_is_waited_for(bench: ClaimBench) -> None:
    bench.ledger.absent = "the agent has not read its ledger yet"
    waiting = asyncio.create_task(bench.prepare())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    bench.ledger.absent = None
    bench.ledger.set(row(state=TenantState.RELEASING))
    await asyncio.sleep(0.02)
    bench.ledger.set(row())
    assert not (await waiting)[UID].error


async def test_a_refusal_costs_its_own_claim_only(bench: ClaimBench) -> None:
    bench.ledger.set(row())
    answer = await bench.prepare(claim(), claim(OTHER, "stray"), claim("../../etc/passwd", "hostile"))
    assert not answer[UID].error
    assert "for claim team/stray" in answer[OTHER].error
    assert "names claim team/hostile with the UID" in answer["../../etc/passwd"].error
    assert [path.name for path in bench.cdi.iterdir()] == [bench.file().name]


async def test_a_gpu_without_a_device_and_a_tenant_that_cannot_be_served_are_reported(bench: ClaimBench) -> None:
    bench.ledger.set(row())
    bench.gpu_devices = {}
    assert "nvidia-ctk cdi generate" in (await bench.prepare())[UID].error
    bench.gpu_devices = {GPU: "nvidia.com/gpu=0"}
    bench.troubles[UID] = "gpus: the same GPU is listed twice"
    assert "the same GPU is listed twice" in (await bench.prepare())[UID].error
    assert not bench.file().exists()


async def test_a_row_that_turns_releasing_finds_the_claim_prepared_or_refused(bench: ClaimBench) -> None:
    bench.ledger.set(row())
    seen = []

    def entitled() -> str:
        seen.append(bench.claims.prepared(UID))
        return UID

    operation = asyncio.create_task(
        bench.claims.prepare(ClaimIdentity(namespace="team", name="gpu", uid=UID), entitled)
    )
    while not seen:  # noqa: ASYNC110 - no event to await
        await asyncio.sleep(0)
    assert bench.claims.prepared(UID) == ("team/gpu",), "at the first moment at which others can read it"
    await operation


async def test_unpreparing_an_unprepared_claim_succeeds(bench: ClaimBench) -> None:
    assert (await bench.unprepare(claim(), claim("../x")))[UID].error == ""
    bench.ledger.set(row())
    await bench.prepare()
    bench.ledger.set()
    assert (await bench.unprepare())[UID].error == ""
    assert not bench.file().exists()
    assert bench.claims.prepared(UID) == ()
    assert bench.claims.tenants() == {UID}, "until it is forgotten: its processes may still run"
    await bench.claims.forget_all_but(())
    assert bench.claims.tenants() == frozenset()


async def test_a_claim_that_cannot_be_released_is_reported_and_stays(bench: ClaimBench) -> None:
    bench.ledger.set(row())
    await bench.prepare()
    bench.file().unlink()
    bench.file().mkdir()
    assert "cannot unprepare the claim" in (await bench.unprepare())[UID].error
    assert bench.claims.prepared(UID) == ("team/gpu",)


async def test_an_unwritable_cdi_directory_costs_the_claim_a_clear_error(bench: ClaimBench) -> None:
    bench.cdi.write_text("a file")
    bench.ledger.set(row())
    assert f"cannot write the CDI device of claim team/gpu in {bench.cdi}" in (await bench.prepare())[UID].error


@pytest.mark.promise("node-claim-restarts")
async def test_the_next_agent_knows_what_is_prepared_and_writes_lost_devices_again(bench: ClaimBench) -> None:
    bench.ledger.set(row(), row(OTHER, claim=ClaimReference(name="other", uid=OTHER)))
    await bench.prepare(claim(), claim(OTHER, "other"))
    bench.claims.learn(UID, "pod-1")
    await bench.claims.close()
    content = bench.file().read_text()
    bench.file().unlink()
    following = bench.start()
    assert following.prepared(UID) == ("team/gpu",)
    assert following.pods(UID) == {"pod-1"}
    assert bench.file().read_text() == content
    assert following.prepared(OTHER) == ("team/other",)


async def test_without_its_file_the_next_agent_goes_by_the_devices(bench: ClaimBench) -> None:
    bench.ledger.set(row())
    await bench.prepare()
    for damage in ("{", '{"version": 1, "boot": 5}', ""):
        (bench.root / "claims.json").write_text(damage)
        assert bench.start().prepared(UID) == (f"with UID {UID}",)


@pytest.mark.promise("node-claim-restarts")
async def test_after_a_reboot_nothing_is_prepared(bench: ClaimBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ledger.set(row())
    await bench.prepare()
    (bench.cdi / "sharepod-broken.json").write_text("[" * 100_000)
    (bench.cdi / "nvidia.json").write_text("{}")
    monkeypatch.setattr(claims_module, "boot_id", lambda: "the next boot")
    following = bench.start()
    assert following.tenants() == frozenset()
    assert [path.name for path in bench.cdi.iterdir()] == ["nvidia.json"]


async def test_a_call_that_was_given_up_ends_before_the_next_one(bench: ClaimBench) -> None:
    bench.ledger.set(row())
    identity = ClaimIdentity(namespace="team", name="gpu", uid=UID)
    for _ in range(20):
        given_up = asyncio.create_task(bench.claims.prepare(identity, lambda: UID))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_up.cancel()
        await bench.claims.unprepare(UID)
        await bench.claims.close()
        assert bench.file().exists() is bool(bench.claims.prepared(UID))


@pytest.mark.promise("node-claims-attach")
async def test_a_claim_of_the_self_test_needs_no_row_and_gets_the_hook_and_every_gpu(bench: ClaimBench) -> None:
    own = claim(UID, "sharepod-self-test-claim-x7k2p-gpus-abcde", "sharepod-system")
    assert bench.self_test.prepared_for_s() is None
    answer = await bench.prepare(own)
    (device,) = answer[UID].devices
    assert list(device.cdi_device_ids) == [f"sharepod.dev/self-test={UID}", f"nvidia.com/gpu={GPU}"]
    file = bench.cdi / f"sharepod.self-test-{UID}.json"
    (found,) = json.loads(file.read_text())["devices"]
    assert [(each["hostPath"], each["containerPath"]) for each in found["containerEdits"]["mounts"]] == [
        (str(bench.root / "self-test"), "/run/sharepod"),
        (str(bench.root / "self-test/ld.so.preload"), "/etc/ld.so.preload"),
    ]
    assert bench.claims.tenants() == frozenset()
    bench.now += 7
    assert await bench.prepare(own) == answer
    assert bench.self_test.prepared_for_s() == 7
    assert bench.start().tenants() == frozenset(), "the next agent takes it for no tenant"
    assert bench.start_self_test().prepared_for_s() == 0
    assert not (await bench.unprepare(own))[UID].error
    assert (file.exists(), bench.self_test.prepared_for_s()) == (False, None)
    assert bench.start_self_test().prepared_for_s() is None


@pytest.mark.promise("node-claims-attach")
@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        ("team", "sharepod-self-test-claim-x7k2p-gpus-abcde"),
        ("sharepod-system", "mine"),
        ("sharepod-system", "sharepod-self-test-claim"),
        ("sharepod-system2", "sharepod-self-test-claim-x"),
    ],
)
async def test_no_other_claim_is_one_of_the_self_test(bench: ClaimBench, namespace: str, name: str) -> None:
    answer = await bench.prepare(claim(UID, name, namespace))
    assert "no share of a GPU is reserved" in answer[UID].error
    assert not list(bench.cdi.glob("*self-test*"))


async def test_a_self_tests_claim_of_another_boot_is_removed_and_a_hostile_uid_touches_no_file(
    bench: ClaimBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = claim(UID, "sharepod-self-test-claim-x-gpus-y", "sharepod-system")
    await bench.prepare(own)
    hostile = claim("../../self-test", own.name, own.namespace)
    assert "with the UID" in (await bench.prepare(hostile))["../../self-test"].error
    assert not (await bench.unprepare(hostile))["../../self-test"].error
    monkeypatch.setattr(self_test_module, "boot_id", lambda: "the next boot")
    assert bench.start_self_test().prepared_for_s() is None
    assert not list(bench.cdi.iterdir())
