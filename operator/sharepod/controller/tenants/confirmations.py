"""Confirmations: live reads of objects that seem to be missing, before the operator acts on their absence.

Guarantees:
- A row that is not Releasing is removed only right after a GET which shows that its tenant has no Pod on that node, nor
  a Pod that could be bound there.
- A deleted Node replaces the agent's report only after a GET has confirmed the deletion.
- If a SharePod ends because an object is missing, that end is written only when a GET does not find the object either.
- Every object that a GET returns is recorded in the cluster state.
"""

from __future__ import annotations

from sharepod.api.gpunode import TenantState
from sharepod.controller.apiserver.client import GPUNODES, NODES, Client
from sharepod.controller.decisions.ends import Absence
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.controller.decisions.steps import Ending, RemovalReason, RemoveRow
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.kube import NotFoundError

from .pods import PodControl


class Confirmations:
    """Confirms steps by live reads. Every method may raise an `ApiError`. Before a method returns False, it has
    recorded the object that contradicts the step.

    Arguments of the methods: `name` and `namespace` of the SharePod, which its Pod shares.
    """

    def __init__(self, state: ClusterState, client: Client, pod_control: PodControl) -> None:
        self._state = state
        self._client = client
        self._pod_control = pod_control

    async def may_remove(
        self, snapshot: TenantSnapshot, tenant: str, name: str, namespace: str, step: RemoveRow
    ) -> bool:
        """Return True if live reads confirm the reason for the removal of a row."""
        if step.reason is RemovalReason.NODE_GONE:
            return await self._node_is_gone(step.node)
        releasing = any(reserved.node == step.node and reserved.releasing for reserved in snapshot.reserved)
        if releasing or step.reason is RemovalReason.FORCED:
            return True
        return await self._pod_control.not_on(step.node, name, namespace, tenant)

    async def _node_is_gone(self, name: str) -> bool:
        try:
            await self._client.get(NODES, name)
        except NotFoundError:
            return True
        self._state.node_is_there(name)
        return False

    async def ended(self, snapshot: TenantSnapshot, tenant: str, name: str, namespace: str, finish: Ending) -> bool:
        """Return True if live reads confirm the absence that caused an end, or no absence caused it."""
        if finish.absence is Absence.ROW and snapshot.pod is not None:
            place = snapshot.pod.node or snapshot.pod.pin or ""
            await self._read_gpunode(place)
            gpunode = self._state.gpunodes.named(place)
            row = gpunode.rows.get(tenant) if gpunode is not None else None
            return not self._state.ledgers.unreadable_row(tenant) and (
                row is None or row.state is TenantState.RELEASING
            )
        if finish.absence is Absence.POD:
            absent = await self._pod_control.absent(name, namespace, tenant)
            return absent and self._state.pod_of(tenant) is None
        return True

    async def _read_gpunode(self, name: str) -> None:
        known = self._state.gpunodes.named(name)
        try:
            self._state.put_gpunode(await self._client.get(GPUNODES, name))
        except NotFoundError:
            if known is not None:
                self._state.drop_gpunode(known.uid)
