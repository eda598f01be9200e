"""GPUs that tenants may use, on a node of pool `device-plugin`: the GPUs that SharePod's holders have taken from
NVIDIA's device plugin, as the kubelet reports.

Guarantees:
- HG1 held-first: in pool `device-plugin` a GPU is open to tenants only under two conditions. The kubelet's last answer
  assigns the GPU to a pod that the ledger lists as a holder, and that holder is not being released.
- HG2 names: a holder is identified by the agent's namespace and its Pod's name; the operator controls both.
- HG3 plugins-health: in pool `device-plugin` a GPU counts as unhealthy if NVIDIA's device plugin does not offer it and
  offers other GPUs.
- In pool `dedicated` every GPU is open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from sharepod.api.gpunode import Gpu, Health, HolderState, PluginHolder, Pool
from sharepod.api.objects import HOLDER_PREFIX

_NOT_OFFERED = (
    "NVIDIA's device plugin no longer offers it to pods, so the plugin considers it unhealthy; the "
    "plugin's log has the reason"
)


@dataclass(frozen=True)
class PluginPod:
    """Pod with a GPU from the device plugin."""

    namespace: str
    name: str


class HeldGpus:
    """Decides which GPUs are open to tenants.

    Args:
        namespace: Namespace of the holders' Pods.
        set_open: Called with the open GPUs when they have changed; None: all are open.
    """

    def __init__(self, namespace: str, set_open: Callable[[frozenset[str] | None], None]) -> None:
        self._namespace = namespace
        self._set_open = set_open
        self._open: frozenset[str] | None = None
        self._holders: Mapping[str, str] = {}
        """Ids of the holders that are not being released, by Pod name."""
        self._given: Mapping[str, PluginPod] | None = None
        self._offered: Collection[str] = ()
        """UUIDs of the GPUs that the plugin offers; empty: unknown."""
        self.pool = Pool.DEDICATED
        self.problem: str | None = None
        """Why no GPU of the device plugin can be shared, as text; None if they can."""

    def know_ledger(self, pool: Pool, holders: Sequence[PluginHolder]) -> None:
        """Store pool and holders of a ledger. Call this before its rows are applied."""
        self.pool = pool
        self._holders = {each.pod_name: each.id for each in holders if each.state is not HolderState.RELEASING}
        self._settle()

    def know_pods(
        self, given: Mapping[str, PluginPod] | None, problem: str | None, offered: Collection[str] = ()
    ) -> None:
        """Store which pod has each GPU that the device plugin has assigned.

        Args:
            given: the pod of each assigned GPU, by UUID. None if the kubelet does not report the assignments.
            problem: why the plugin's GPUs cannot be shared, as text; None if they can.
            offered: UUIDs of the GPUs in the plugin's list, allocated or free. If it is empty, the health of the
            plugin's GPUs is unknown.
        """
        self._given, self.problem, self._offered = given, problem, offered
        self._settle()

    def mark(self, gpu: Gpu) -> Gpu:
        """Return the GPU with the fields that show its state at the device plugin. In pool `dedicated` return it
        unchanged."""
        if self.pool is not Pool.DEVICE_PLUGIN:
            return gpu
        holder = self._holder_of(gpu.uuid)
        taken = self._given is not None and gpu.uuid in self._given and holder is None
        offered = not self._offered or gpu.uuid in self._offered
        marks: dict[str, object] = {"held": holder is not None, "holder": holder, "taken": taken, "offered": offered}
        if not offered and gpu.health is Health.HEALTHY:
            marks |= {"health": Health.UNHEALTHY, "reason": _NOT_OFFERED}
        return gpu.model_copy(update=marks)

    def native(self) -> Mapping[str, PluginPod]:
        """Return the pods that have a GPU from the device plugin and are not SharePod's holders, by the GPU's UUID."""
        given = (self._given or {}).items()
        ours = (self._namespace, HOLDER_PREFIX)
        return {uuid: pod for uuid, pod in given if (pod.namespace, pod.name[: len(HOLDER_PREFIX)]) != ours}

    def _holder_of(self, uuid: str) -> str | None:
        pod = (self._given or {}).get(uuid)
        if pod is None or pod.namespace != self._namespace:
            return None
        return self._holders.get(pod.name)

    def _settle(self) -> None:
        """Call `set_open` if the open GPUs have changed."""
        now: frozenset[str] | None = None
        if self.pool is Pool.DEVICE_PLUGIN:
            usable = () if self.problem is not None else self._given or ()
            now = frozenset(uuid for uuid in usable if self._holder_of(uuid) is not None)
        if now != self._open:
            self._open = now
            self._set_open(now)
