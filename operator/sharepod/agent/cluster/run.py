"""The agent in a cluster: connects the ledger watch, the kubelet's calls, the status report and the Lease.

Guarantees:
- The kubelet can unpublish volumes and unprepare claims from the start on, whether or not the API server answers.
- Volumes are published, and claims prepared, only once the ledger is known.
- While the API server is away, running tenants continue; each loop retries by itself.
- Tenants of the ledger on disk are served even if the GPUs cannot be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog

from sharepod.agent.agent import agent_version
from sharepod.agent.apart.distant_agent import AnyAgent
from sharepod.agent.kubelet.attachments import Attachments
from sharepod.agent.kubelet.claim_self_test import ClaimSelfTest
from sharepod.agent.kubelet.csi.driver import Driver
from sharepod.agent.kubelet.csi.volumes import Volumes
from sharepod.agent.kubelet.dra.cdi_watch import CdiWatch
from sharepod.agent.kubelet.dra.claim_driver import ClaimDriver
from sharepod.agent.kubelet.dra.generation import CdiGenerator
from sharepod.agent.kubelet.dra.gpu_devices import GpuDevices
from sharepod.agent.kubelet.dra.prepared_claims import PreparedClaims
from sharepod.agent.kubelet.dra.prepared_self_tests import PreparedSelfTests
from sharepod.agent.kubelet.hook_integrity import HookIntegrity
from sharepod.agent.kubelet.nvidia_dra import nvidia_dra_socket
from sharepod.agent.kubelet.plugin_pods import HELD_INTERVAL_S, INTERVAL_S, PluginPods
from sharepod.agent.kubelet.pod_processes import PodResidue
from sharepod.agent.kubelet.registration import (
    DRA_PLUGIN,
    SCHEDULER_PLUGIN,
    KubeletRegistration,
    pods_dir,
    warn_of_propagation,
)
from sharepod.agent.kubelet.self_test import SelfTest
from sharepod.agent.kubelet.tenant_mounts import TenantMounts
from sharepod.agent.settings import EnvInjection
from sharepod.api.consumption import TAKEN_IN_ANNOTATION
from sharepod.api.gpunode import (
    CONDITION_AGENT_READY,
    CONDITION_CDI_DEVICES,
    CONDITION_CLAIMS_ATTACH,
    CONDITION_ENV_INJECTION,
    CONDITION_HOOK_LOADS,
    CONDITION_OWN_NODE,
    CONDITION_SLICES_PUBLISHED,
    ENV_INJECTION_ACCEPTED,
    Gpu,
    Health,
    Pool,
    Tenant,
)
from sharepod.kube import Connection, Json
from sharepod.tasks import Supervisor

from .ledger_watch import LedgerWatch
from .liveness import LivenessLease
from .own_node_check import OwnNodeCheck
from .slice_publisher import SlicePublisher
from .status_report import CdiReason, Readiness, ReadyReason, StatusReport

_TWICE = (
    "NVIDIA's own DRA driver serves this node ({}), so its GPUs would be assigned twice: keep that driver off the "
    "node, or take the node from SharePod"
)

_OFFERED = (
    "NVIDIA's device plugin offers GPUs of this node to pods, so they would be assigned twice: keep it off the "
    "node, or take the node from SharePod"
)

log = structlog.get_logger(__name__)


async def run(agent: AnyAgent) -> None:
    """Run the started `agent` for this node, until cancelled.

    Raises:
        NoApiServerError: no address of the API server is configured.
        SocketError: the kubelet cannot be served.
        InventoryError: there is neither a ledger on disk nor an inventory at the start.
        OSError: the state directory or the mounts cannot be read.
        TaskEndedError: one of the loops has failed.
    """
    settings = agent.settings
    node = settings.node_name
    tenants_dir = settings.state_dir / "tenants"
    volumes = Volumes(pods_dir=pods_dir(settings.kubelet_root), tenants_dir=tenants_dir, state_dir=settings.state_dir)
    volumes.recover()
    claims = PreparedClaims(cdi_dir=settings.cdi_dirs[-1], tenants_dir=tenants_dir, state_dir=settings.state_dir)
    claims.recover()
    cdi = cdi_watch(agent)
    self_test_claims = PreparedSelfTests(
        cdi_dir=settings.cdi_dirs[-1],
        state_dir=settings.state_dir,
        namespace=settings.namespace,
        gpu_devices=cdi.all_devices,
    )
    self_test_claims.recover()
    pod_residue, hook_integrity = process_watches(agent, Attachments(volumes, claims), tenants_dir)

    async def apply(rows: Sequence[Tenant]) -> None:
        await agent.tenants.apply(rows)
        ids = {row.id for row in rows}
        await volumes.forget_all_but(ids)
        await claims.forget_all_but(ids)
        hook_integrity.forget_all_but(ids)

    checkpoint = settings.state_dir / "ledger.json"
    api = await Connection.open(settings.kubeconfig, f"sharepod-agent/{agent_version()}")
    try:
        ledger = LedgerWatch(
            api,
            node=node,
            apply=apply,
            checkpoint=checkpoint,
            on_change=agent.changed.set,
            on_ledger=agent.held_gpus.know_ledger,
        )
        plugin_pods = await _first_word(agent)
        await agent.take_stock(needed=not checkpoint.exists())
        await ledger.restore()
        driver = Driver(
            node=node,
            version=agent_version(),
            volumes=volumes,
            ledger=ledger,
            directory=agent.tenants.directory,
            trouble=agent.tenants.unservable,
        )
        await cdi.look()
        claim_driver = ClaimDriver(
            node=node,
            claims=claims,
            ledger=ledger,
            directory=agent.tenants.directory,
            trouble=agent.tenants.unservable,
            gpu_devices=cdi.devices,
            self_test=self_test_claims,
        )
        kubelet = KubeletRegistration(settings.kubelet_root, driver.services(), changed=agent.changed.set)
        dra = KubeletRegistration(settings.kubelet_root, claim_driver.services(), DRA_PLUGIN, changed=agent.changed.set)
        dra_of_scheduler = KubeletRegistration(
            settings.kubelet_root, claim_driver.services(), SCHEDULER_PLUGIN, changed=agent.changed.set
        )
        lease = LivenessLease(api, namespace=settings.namespace, node=node, owner_uid=lambda: ledger.uid)
        self_test = SelfTest(
            settings.state_dir,
            accept_injection=settings.env_injection is EnvInjection.ACCEPT,
            changed=agent.changed.set,
        )
        claim_self_test = ClaimSelfTest(
            settings.state_dir, prepared_for_s=self_test_claims.prepared_for_s, changed=agent.changed.set
        )
        own_node = OwnNodeCheck(api, namespace=settings.namespace, changed=agent.changed.set)

        def conditions() -> Mapping[str, Readiness]:
            return {
                CONDITION_AGENT_READY: readiness(agent, ledger, kubelet),
                CONDITION_CDI_DEVICES: cdi_readiness(cdi, dra),
                CONDITION_CLAIMS_ATTACH: Readiness(*claim_self_test.claims_attach),
                CONDITION_OWN_NODE: own_node.verdict,
                CONDITION_HOOK_LOADS: Readiness(*self_test.hook_loads),
                CONDITION_ENV_INJECTION: Readiness(*self_test.env_injection),
            }

        slices = SlicePublisher(
            api,
            node=node,
            ledger=ledger,
            gpus=lambda: attachable(agent, cdi, ledger.cordoned),
            settling=lambda: not agent.facts().gpus_known or kubelet.settling or dra_of_scheduler.settling,
            unfit=lambda: unfit(conditions(), dra_of_scheduler.problem, plugin_offers=plugin_pods.offers),
            changed=agent.changed.set,
        )
        report = StatusReport(
            api,
            node=node,
            ledger=ledger,
            facts=agent.facts,
            readiness=lambda: {
                **conditions(),
                **({CONDITION_SLICES_PUBLISHED: verdict} if (verdict := slices.verdict) is not None else {}),
            },
            consumption=lambda: agent.consumption,
            woken=agent.changed,
        )
        agent.taken_in = lambda: taken_in(ledger.object)
        warn_of_propagation(settings.kubelet_root)
        await kubelet.start()
        try:
            await dra.start()
            await dra_of_scheduler.start()
            async with Supervisor() as supervisor:
                for name, loop in {
                    "ledger-follow": ledger.follow(),
                    "ledger-enforce": ledger.enforce(),
                    "report": report.run(),
                    "lease": lease.run(),
                    "own-node": own_node.run(),
                    "self-test": self_test.run(),
                    "self-test-claims": claim_self_test.run(),
                    "kubelet": kubelet.run(),
                    "kubelet-dra": dra.run(),
                    "kubelet-dra-scheduler": dra_of_scheduler.run(),
                    "slices": slices.run(),
                    "slices-follow": slices.follow(),
                    "cdi": cdi.run(),
                    "residue": pod_residue.run(),
                    "plugin-pods": plugin_pods.run(agent.know_plugin_pods, partial(_interval_s, agent)),
                }.items():
                    supervisor.start(name, loop)
                await supervisor.wait()
        finally:
            await asyncio.gather(dra_of_scheduler.stop(), dra.stop(), kubelet.stop())
            await claims.close()
            if not agent.successor_waits():
                await report.say_stopped()
    finally:
        await api.close()


def taken_in(gpunode: Json | None) -> frozenset[str]:
    """Return the names of closed consumption series that the operator has added to its totals, from the GPUNode's
    annotation."""
    annotations = (gpunode or {}).get("metadata", {}).get("annotations") or {}
    return frozenset(str(annotations.get(TAKEN_IN_ANNOTATION) or "").split(","))


async def _first_word(agent: AnyAgent) -> PluginPods:
    """Ask the kubelet for the GPUs of each pod. This is done before any tenant is served, because a GPU of the device
    plugin may be closed to tenants."""
    plugin_pods = PluginPods(agent.settings.kubelet_root)
    await plugin_pods.ask()
    agent.know_plugin_pods(plugin_pods.given, plugin_pods.problem, plugin_pods.offered)
    return plugin_pods


def _interval_s(agent: AnyAgent) -> float:
    """Return the seconds between two requests to the kubelet for the GPUs of each pod."""
    return HELD_INTERVAL_S if agent.held_gpus.pool is Pool.DEVICE_PLUGIN else INTERVAL_S


def process_watches(agent: AnyAgent, attachments: Attachments, tenants_dir: Path) -> tuple[PodResidue, HookIntegrity]:
    """Return the watches of tenants' processes in /proc, and register them with the agent. Raise `OSError`."""
    tenant_mounts = TenantMounts.of(tenants_dir)
    pod_residue, hook_integrity = PodResidue(attachments, tenant_mounts), HookIntegrity(tenants_dir, tenant_mounts)
    agent.residue = pod_residue.residue
    agent.owner_of = pod_residue.owner_of
    agent.replaced = hook_integrity.replaced
    return pod_residue, hook_integrity


def readiness(agent: AnyAgent, ledger: LedgerWatch, kubelet: KubeletRegistration) -> Readiness:
    """Return the condition AgentReady: whether a pod that is placed here now would run, with the reason if not."""
    unhealthy = agent.unhealthy()
    if unhealthy is not None:
        return Readiness(ReadyReason.INVENTORY_UNAVAILABLE, unhealthy)
    if ledger.problem is not None:
        return Readiness(ReadyReason.LEDGER_UNREADABLE, ledger.problem)
    if kubelet.settling:
        return Readiness(ReadyReason.STARTING, "the kubelet has not registered the driver yet")
    if kubelet.problem is not None:
        return Readiness(ReadyReason.VOLUMES_UNAVAILABLE, kubelet.problem)
    if agent.held_gpus.pool is Pool.DEVICE_PLUGIN and agent.held_gpus.problem is not None:
        return Readiness(ReadyReason.DEVICE_PLUGIN_UNUSABLE, agent.held_gpus.problem)
    rival = nvidia_dra_socket(agent.settings.kubelet_root)
    if rival is not None:
        return Readiness(ReadyReason.DRA_DRIVER_PRESENT, _TWICE.format(rival))
    return Readiness(ReadyReason.SERVING)


def attachable(agent: AnyAgent, cdi: CdiWatch, cordoned: Collection[str]) -> tuple[Gpu, ...]:
    """Return the GPUs of this node that take new tenants by claims. `cordoned`: UUIDs and indexes of GPUs that do
    not."""
    able = [gpu for gpu in agent.gpus() if gpu.shareable and gpu.health is Health.HEALTHY]
    gpus = [gpu for gpu in able if not gpu.is_cordoned(cordoned)]
    attached = cdi.devices([gpu.uuid for gpu in gpus])
    return tuple(gpu for gpu in gpus if gpu.uuid in attached)


def unfit(conditions: Mapping[str, Readiness], unregistered: str | None, *, plugin_offers: bool) -> str | None:
    """Return why this node takes no tenants by claims that kube-scheduler allocates; None if it takes them.

    Args:
        conditions: Readiness of the agent, by type of the condition.
        unregistered: Why the kubelet does not call the driver of those claims; None if it does.
        plugin_offers: True if NVIDIA's device plugin offers GPUs of the node.
    """
    if conditions[CONDITION_AGENT_READY].reason is not ReadyReason.SERVING:
        return f"the agent is not ready: {conditions[CONDITION_AGENT_READY].message}"
    if unregistered is not None:
        return f"{unregistered}; claims need Kubernetes 1.34 or newer on the node"
    if plugin_offers:
        return _OFFERED
    for kind in (CONDITION_HOOK_LOADS, CONDITION_CLAIMS_ATTACH):
        if conditions[kind].reason.status == "False":
            return f"see condition {kind}: {conditions[kind].message}"
    injects = conditions[CONDITION_ENV_INJECTION].reason
    if injects.status == "True" and injects.value != ENV_INJECTION_ACCEPTED:
        return f"see condition {CONDITION_ENV_INJECTION}: {conditions[CONDITION_ENV_INJECTION].message}"
    return None


def cdi_watch(agent: AnyAgent) -> CdiWatch:
    """Return the watch of this node's CDI devices. Simulated GPUs have no toolkit that could generate CDI devices."""
    folders, generate = agent.settings.cdi_dirs, agent.settings.cdi_generate and not agent.inventory.simulated
    generator = CdiGenerator(folders[-1]) if generate else None
    return CdiWatch(GpuDevices(folders), agent.gpus, generator, changed=agent.changed.set)


def cdi_readiness(cdi: CdiWatch, dra: KubeletRegistration) -> Readiness:
    """Return the condition CDIDevices: whether a claim that is allocated here now would be attached, with the reason if
    not."""
    if dra.settling:
        return Readiness(CdiReason.STARTING, "the kubelet has not registered the driver yet")
    if dra.problem is not None:
        return Readiness(CdiReason.NOT_REGISTERED, f"{dra.problem}; claims need Kubernetes 1.34 or newer on the node")
    if cdi.problem is not None:
        return Readiness(CdiReason.DEVICES_MISSING, cdi.problem)
    return Readiness(CdiReason.ATTACHABLE)
