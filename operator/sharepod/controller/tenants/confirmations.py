"""What is asked of the API server itself before something is concluded from an absence.

Guarantees: a row that is not being released is removed only when a GET has just said that no Pod of its tenant is, or
can be, on that node; that a Node is gone overrides an agent's word only while a GET still says so; an end that follows
from something missing is written only when a GET misses it too. Whatever a GET brings goes into the model.
"""

from __future__ import annotations

from sharepod.api.gpunode import TenantState
from sharepod.controller.apiserver.client import GPUNODES, NODES, Client
from sharepod.controller.decisions import lifecycle
from sharepod.controller.decisions.lifecycle import Finish, Remove, View
from sharepod.controller.state.cluster_state import Model
from sharepod.kube import NotFoundError

from .pods import Binder


class Proofs:
    """Asks. Every method may raise an `ApiError`."""

    def __init__(self, model: Model, client: Client, binder: Binder) -> None:
        self._model = model
        self._client = client
        self._binder = binder

    async def may_remove(self, view: View, tenant: str, name: str, namespace: str, step: Remove) -> bool:
        """Whether the reason for which a row is to go holds."""
        if step.why == lifecycle.NODE_GONE:
            return await self._node_is_gone(step.node)
        releasing = any(held.node == step.node and held.releasing for held in view.held)
        if releasing or step.why == lifecycle.FORCED:
            return True
        return await self._binder.not_on(step.node, name, namespace, tenant)

    async def _node_is_gone(self, name: str) -> bool:
        try:
            await self._client.get(NODES, name)
        except NotFoundError:
            return True
        self._model.node_is_there(name)
        return False

    async def ended(self, view: View, tenant: str, name: str, namespace: str, finish: Finish) -> bool:
        """Whether an end that follows from something's absence is one."""
        if finish.reason == lifecycle.RESERVATION_LOST and view.pod is not None:
            place = view.pod.node or view.pod.pin or ""
            await self.read_gpunode(place)
            gpunode = self._model.gpunodes.named(place)
            row = gpunode.rows.get(tenant) if gpunode is not None else None
            return not self._model.unclear(tenant) and (row is None or row.state is TenantState.RELEASING)
        if view.pod is not None:
            return True
        gone = await self._binder.absent(name, namespace, tenant)
        return gone and self._model.pod_of(tenant) is None

    async def read_gpunode(self, name: str) -> None:
        """Takes in a GPUNode as it is now."""
        known = self._model.gpunodes.named(name)
        try:
            self._model.put_gpunode(await self._client.get(GPUNODES, name))
        except NotFoundError:
            if known is not None:
                self._model.drop_gpunode(known.uid)
