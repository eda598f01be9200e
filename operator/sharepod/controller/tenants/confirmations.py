"""What is asked of the API server itself before something is concluded from an absence.

Guarantees: a row that is not being released is removed only when a GET has just said that no Pod of its tenant is, or
can be, on that node; that a Node is gone overrides an agent's word only while a GET still says so; an end that follows
from something missing is written only when a GET misses it too. Whatever a GET brings goes into the model.
"""

from __future__ import annotations

from sharepod.api.gpunode import TenantState
from sharepod.controller.apiserver.client import GPUNODES, NODES, Client
from sharepod.controller.decisions import lifecycle
from sharepod.controller.decisions.lifecycle import Finish, Remove, TenantSnapshot
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.kube import NotFoundError

from .pods import PodControl


class Confirmations:
    """Asks. Every method may raise an `ApiError`."""

    def __init__(self, state: ClusterState, client: Client, pod_control: PodControl) -> None:
        self._state = state
        self._client = client
        self._pod_control = pod_control

    async def may_remove(self, snapshot: TenantSnapshot, tenant: str, name: str, namespace: str, step: Remove) -> bool:
        """Whether the reason for which a row is to go holds."""
        if step.why == lifecycle.NODE_GONE:
            return await self._node_is_gone(step.node)
        releasing = any(reserved.node == step.node and reserved.releasing for reserved in snapshot.reserved)
        if releasing or step.why == lifecycle.FORCED:
            return True
        return await self._pod_control.not_on(step.node, name, namespace, tenant)

    async def _node_is_gone(self, name: str) -> bool:
        try:
            await self._client.get(NODES, name)
        except NotFoundError:
            return True
        self._state.node_is_there(name)
        return False

    async def ended(self, snapshot: TenantSnapshot, tenant: str, name: str, namespace: str, finish: Finish) -> bool:
        """Whether an end that follows from something's absence is one."""
        if finish.reason == lifecycle.RESERVATION_LOST and snapshot.pod is not None:
            place = snapshot.pod.node or snapshot.pod.pin or ""
            await self.read_gpunode(place)
            gpunode = self._state.gpunodes.named(place)
            row = gpunode.rows.get(tenant) if gpunode is not None else None
            return not self._state.unreadable_row(tenant) and (row is None or row.state is TenantState.RELEASING)
        if snapshot.pod is not None:
            return True
        gone = await self._pod_control.absent(name, namespace, tenant)
        return gone and self._state.pod_of(tenant) is None

    async def read_gpunode(self, name: str) -> None:
        """Takes in a GPUNode as it is now."""
        known = self._state.gpunodes.named(name)
        try:
            self._state.put_gpunode(await self._client.get(GPUNODES, name))
        except NotFoundError:
            if known is not None:
                self._state.drop_gpunode(known.uid)
