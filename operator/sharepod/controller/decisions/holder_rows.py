"""Rows of plugin holders in the ledger of a node. A plugin holder is a Pod of the operator that takes a GPU from
NVIDIA's device plugin, so that SharePod can share it. Pure: from rows, Pods and the agent's report to the new rows.

Guarantees:
- HR1 seen-held: a holder becomes Held only after the agent has reported the GPU of its Pod. A Releasing holder never
  becomes Held again.
- HR2 one-way: a holder becomes Releasing when its Pod ends, when another Pod has its GPU, or when its Pod has another
  GPU or none. Its row stays until the end of its Pod is confirmed and no tenant has a row on its GPU.
- HR3 none-given-back-in-use: a request to return a holder's GPU is ignored while a tenant has that GPU, by a row or by
  a decision that is not written yet.
- Every existing Pod of a holder gets a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from sharepod.api.gpunode import Gpu, HolderState, PluginHolder
from sharepod.api.objects import MAX_GPUS
from sharepod.controller.state.holders_seen import HolderPod


def holder_rows(
    rows: Sequence[PluginHolder],
    pods: Iterable[HolderPod],
    gpus: Iterable[Gpu],
    *,
    in_use: Collection[str],
    giving_back: Collection[str],
    ended: Collection[str],
    without: Collection[str] = (),
) -> tuple[PluginHolder, ...]:
    """Return the rows of a node's holders.

    Args:
        rows: The rows as stored in the API server.
        pods: The existing Pods of the node's holders.
        gpus: The GPUs in the agent's report.
        in_use: UUIDs of the GPUs that tenants have, by the ledger or by a decision.
        giving_back: Ids of the holders whose GPUs go back to the device plugin.
        ended: Ids of the holders whose Pods' end is confirmed.
        without: Ids of the holders whose GPU the agent has not reported for too long.
    """
    there = {pod.uid: pod for pod in pods}
    shown = {gpu.holder: gpu.uuid for gpu in gpus if gpu.held and gpu.holder is not None}
    elsewhere = {gpu.uuid for gpu in gpus if gpu.taken}
    held = {row.uuid for row in rows if row.state is HolderState.HELD}
    result: list[PluginHolder] = []
    for row in rows:
        pod = there.get(row.id)
        lost = row.id in ended or row.id in without or (pod is not None and pod.deleting)
        if row.id in ended and row.uuid not in in_use:
            continue
        uuid = shown.get(row.id)
        given_back = row.id in giving_back and row.uuid not in in_use
        moved = row.state is HolderState.HELD and (row.uuid in elsewhere or (uuid is not None and uuid != row.uuid))
        if lost or given_back or moved:
            row = row.model_copy(update={"state": HolderState.RELEASING})
        elif row.state is HolderState.PENDING and pod is not None and uuid is not None and uuid not in held:
            row = row.model_copy(update={"state": HolderState.HELD, "uuid": uuid})
            held.add(uuid)
        result.append(row)
    known = {row.id for row in rows}
    for pod in there.values():
        if pod.uid not in known and not pod.deleting and len(result) < MAX_GPUS:
            result.append(PluginHolder(id=pod.uid, pod_name=pod.name, state=HolderState.PENDING))
    return tuple(result)
