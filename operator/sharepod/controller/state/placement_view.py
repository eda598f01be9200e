"""Placement's view of a node, from its Node, its GPUNode and the liveness of its agent. Pure."""

from __future__ import annotations

from collections.abc import Collection

from sharepod.api.bounds import clipped
from sharepod.api.gpunode import (
    CONDITION_AGENT_READY,
    CONDITION_CDI_DEVICES,
    CONDITION_CLAIMS_ATTACH,
    CONDITION_ENV_INJECTION,
    CONDITION_HOOK_LOADS,
    ENV_INJECTION_ACCEPTED,
    Gpu,
    Health,
    Pool,
)
from sharepod.api.units import Bytes, GpuUuid
from sharepod.placement.state.types import GpuState, NodeState

from .facts.node_facts import GpuNodeFacts, NodeFacts

_CORDONED = "an admin has cordoned it"
"""Reason why a cordoned GPU takes no new tenants, as text for users."""
_REASON_LIMIT = 256
"""Largest number of characters of the agent's reason for a GPU that the explanation of a refusal quotes."""


def node_state(
    node: NodeFacts, gpunode: GpuNodeFacts | None, *, agent_alive: bool, held: Collection[str] = ()
) -> NodeState:
    """Return placement's view of a node.

    Args:
        node: The Node.
        gpunode: Its GPUNode; None before it has one.
        agent_alive: True if its agent renews its Lease.
        held: UUIDs of the GPUs that Held holders have by the ledger. A GPU counts as held only if the agent reports the
            same.
    """
    plugin = node.pool == Pool.DEVICE_PLUGIN
    return NodeState(
        name=node.name,
        labels=node.labels,
        taints=node.taints,
        unavailable=_unavailable(node, gpunode, agent_alive=agent_alive),
        allocatable=node.allocatable,
        pods=node.pods,
        gpus=tuple(
            _gpu_state(
                gpu,
                held=gpu.uuid in held and gpu.held is True if plugin else gpu.held is not False,
                cordoned=gpunode is not None and gpu.is_cordoned(gpunode.cordoned),
            )
            for gpu in (gpunode.status.gpus if gpunode else ())
        ),
        device_plugin=plugin,
        by_scheduler=Pool.SCHEDULER in (node.pool, gpunode.spec.pool if gpunode else None),
        no_claims=_no_claims(gpunode) if gpunode else None,
    )


def placement_facts(gpunode: GpuNodeFacts) -> tuple[object, ...]:
    """Return the parts of a GPUNode on which placement's decisions depend, for comparison."""
    spec, status = gpunode.spec, gpunode.status
    unfit = agent_unready(gpunode) or _fails_self_test(gpunode)
    return status.gpus, gpunode.cordoned, gpunode.error, spec.pool, spec.holders, unfit, _no_claims(gpunode)


def _unavailable(node: NodeFacts, gpunode: GpuNodeFacts | None, *, agent_alive: bool) -> str | None:
    """Return the reason why a node takes no tenants, as text that follows the node's name. None if it takes tenants."""
    if node.error is not None:
        return node.error
    if node.pool not in tuple(Pool):
        return f'has the label sharepod.dev/pool "{node.pool}", which is none of {", ".join(Pool)}'
    if gpunode is None:
        return "has no GPUNode yet"
    if gpunode.error is not None:
        return gpunode.error
    if gpunode.spec.pool != node.pool:
        return f"leaves pool {gpunode.spec.pool} once its tenants have ended and that pool's allocations are released"
    if node.double_booked:
        return f"advertises {', '.join(node.plugin_resources)}: NVIDIA's device plugin gives its GPUs to other pods"
    if not node.ready:
        return "is not ready"
    if not agent_alive:
        return "has no agent that renews its Lease"
    if (unready := agent_unready(gpunode)) is not None:
        return f"has an agent that is not ready: {unready}"
    return _fails_self_test(gpunode)


def agent_unready(gpunode: GpuNodeFacts) -> str | None:
    """Return the agent's reason why it cannot serve new tenants. None if it can."""
    for condition in gpunode.status.conditions:
        if condition.type == CONDITION_AGENT_READY and condition.status == "False":
            return condition.message or condition.reason
    return None


def _fails_self_test(gpunode: GpuNodeFacts) -> str | None:
    """Return why shares would not be enforced on a node, from its agent's self-test. None if they would be."""
    for condition in gpunode.status.conditions:
        if condition.type == CONDITION_HOOK_LOADS and condition.status == "False":
            return f"does not load the hook in containers: see condition {CONDITION_HOOK_LOADS} of its GPUNode"
        if (
            condition.type == CONDITION_ENV_INJECTION
            and condition.status == "True"
            and condition.reason != ENV_INJECTION_ACCEPTED
        ):
            return (
                "gives GPUs to every container with NVIDIA_VISIBLE_DEVICES: see condition "
                f"{CONDITION_ENV_INJECTION} of its GPUNode"
            )
    return None


def _no_claims(gpunode: GpuNodeFacts) -> str | None:
    """Return the reason why GPUs cannot be attached by claims on a node. None if they can."""
    conditions = {item.type: item for item in gpunode.status.conditions}
    devices, shown = conditions.get(CONDITION_CDI_DEVICES), conditions.get(CONDITION_CLAIMS_ATTACH)
    if devices is None:
        return "has an agent that does not attach GPUs by claims; upgrade it"
    if devices.status != "True":
        return f"cannot attach GPUs by claims: {devices.message or devices.reason}"
    if shown is not None and shown.status == "False":
        return f"does not attach the devices of claims: see condition {CONDITION_CLAIMS_ATTACH} of its GPUNode"
    return None


def _gpu_state(gpu: Gpu, *, held: bool, cordoned: bool) -> GpuState:
    able = gpu.health is Health.HEALTHY and gpu.shareable
    reason = _CORDONED if cordoned else ""
    if not able:
        reason = clipped(gpu.reason, _REASON_LIMIT) or (
            "it is unhealthy" if gpu.health is not Health.HEALTHY else "its agent does not share it"
        )
    return GpuState(
        uuid=GpuUuid(gpu.uuid),
        index=gpu.index,
        model=gpu.model,
        memory=Bytes(gpu.memory),
        available=able and not cordoned,
        reason=reason,
        held=held,
        taken=gpu.taken is True or gpu.offered is False,
        numa_node=gpu.numa_node,
        links=tuple((GpuUuid(link.uuid), link.kind) for link in gpu.links),
    )
