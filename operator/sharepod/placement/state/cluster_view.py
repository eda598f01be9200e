"""Read-only view of a cluster for placement: nodes, rows, and which nodes have changed since a request was refused.

Guarantees:
- The view changes nothing; only `cluster.py` does.
- Returned values do not change with the cluster, except `NodeAccount`s, which are live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sharepod.api.units import GpuUuid, TenantId

from .accounts import NodeAccount, Row
from .exclusions import ExcludedGpus
from .types import LabelKey, Overcommit, PlacementError, Reservation
from .whole_gpu_pods import WholeGpuPods

GroupPlace = tuple[str, frozenset[GpuUuid]]
"""Place of an affinity group: a node, and the GPUs there that its members share."""


@dataclass(frozen=True, slots=True)
class HeadReservation:
    """Reservation of free GPUs of one node for a waiting tenant: at the head of the queue, or for which others are
    preempted.

    No other tenant of the same or a lower priority is placed on these GPUs. Exception: tenants of the same priority in
    the namespace `open_to`. Tenants that are already there stay.
    """

    tenant: TenantId
    node: str
    gpus: frozenset[GpuUuid]
    priority: int = 0
    open_to: str | None = None


class ClusterView:
    """Read-only view of all nodes by name, including nodes of which only the ledger or pods are known.

    `interactive_per_gpu`: most tenants of latency Interactive that a GPU takes. `max_excluded_gpus`: see
    `ExcludedGpus`.
    """

    def __init__(self, *, interactive_per_gpu: int = 1, max_excluded_gpus: int | None = None) -> None:
        self._interactive_per_gpu = interactive_per_gpu
        self.excluded = ExcludedGpus(max_excluded_gpus)
        self._nodes: dict[str, NodeAccount] = {}
        self._subscribers: list[Callable[[str], None]] = []
        self._on_released: list[Callable[[TenantId, Row], None]] = []
        self._nodes_of: dict[TenantId, dict[str, None]] = {}
        self._node_of_pod: dict[str, str] = {}
        self._groups: dict[LabelKey, Counter[GroupPlace]] = {}
        self._replicas: dict[str, Counter[str]] = {}
        self._plugin_nodes: set[str] = set()
        """Names of nodes whose GPUs NVIDIA's device plugin owns."""
        self.whole_gpu_pods = WholeGpuPods()
        """Pods that wait for whole GPUs of NVIDIA's device plugin."""
        self._grown: dict[str, int] = {}
        self._regrouped: dict[LabelKey, int] = {}
        self._excluding_fewer: dict[str, int] = {}
        self._excluding: dict[LabelKey, Counter[str]] = {}
        self.room_version = 0
        """Number of changes so far that may have made room. A refusal notes it, to find later changes."""
        self.excluding_fewer_at = 0
        """The `room_version` at which a namespace last began to exclude others from fewer GPUs."""
        self.head_reservation: HeadReservation | None = None
        self._kept: dict[TenantId, HeadReservation] = {}

    def kept(self) -> tuple[HeadReservation, ...]:
        """Return all reservations of free GPUs: the head-of-queue reservation, and reservations for tenants for which
        others are preempted."""
        head = () if self.head_reservation is None else (self.head_reservation,)
        return (*head, *self._kept.values())

    @property
    def accounts(self) -> Mapping[str, NodeAccount]:
        """Accounts of all nodes by name, including unknown nodes (`state` None). The mapping is live."""
        return self._nodes

    def nodes(self) -> Iterator[NodeAccount]:
        """Yield the known nodes, in no order."""
        return (node for node in self._nodes.values() if node.state is not None)

    def plugin_nodes(self) -> list[NodeAccount]:
        """Return the known nodes whose GPUs NVIDIA's device plugin owns."""
        return self.known(sorted(self._plugin_nodes))

    def node(self, name: str) -> NodeAccount | None:
        """Return the account of a known node; None for an unknown one."""
        node = self._nodes.get(name)
        return node if node is not None and node.state is not None else None

    def known(self, names: Iterable[str]) -> list[NodeAccount]:
        """Return the accounts of the known nodes among these."""
        return [node for node in map(self.node, names) if node is not None]

    def reservations(self, node: str) -> tuple[Reservation, ...]:
        """Return the rows of a node as last decided, ordered by tenant."""
        account = self._nodes.get(node)
        rows = account.rows if account else {}
        return tuple(rows[tenant].wanted for tenant in sorted(rows))

    def written(self, node: str, tenant: TenantId) -> Reservation | None:
        """Return a tenant's row in the ledger of a node; None if it has none."""
        account = self._nodes.get(node)
        row = account.rows.get(tenant) if account is not None else None
        return row.written if row is not None else None

    def reservations_of(self, tenant: TenantId) -> tuple[tuple[str, Reservation], ...]:
        """Return the reservations of a tenant with their nodes.

        More than one means that two operators decided; all but one must be released.
        """
        return tuple((name, self._nodes[name].rows[tenant].wanted) for name in sorted(self._nodes_of.get(tenant, ())))

    def only_row(self, tenant: TenantId) -> tuple[NodeAccount, Row]:
        """Return the one row of a tenant with its node. Raises `PlacementError` if there is none or more than one."""
        names = list(self._nodes_of.get(tenant, ()))
        if len(names) != 1:
            where = self._where(tenant) if names else "no node"
            raise PlacementError(f"tenant {tenant} has a reservation on {where}: there is not one share to change")
        return self._row(names[0], tenant)

    def pending(self, node: str) -> tuple[Reservation, ...]:
        """Return the rows of a node whose latest decision its ledger does not contain yet, ordered by tenant."""
        account = self._nodes.get(node)
        rows = account.rows if account else {}
        return tuple(rows[tenant].wanted for tenant in sorted(tenant for tenant, row in rows.items() if row.pending))

    def groups(self, key: LabelKey) -> tuple[GroupPlace, ...]:
        """Return the places of the members of an affinity group. There is more than one place only if a loaded ledger
        contains such a split group.

        An ended SharePod stays a member until the ledger has its row as releasing. Otherwise an operator that crashes
        between two writes would leave a split group to its successor.
        """
        return tuple(sorted(self._groups.get(key, ()), key=lambda group: (group[0], sorted(group[1]))))

    def replicas_on(self, owner: str) -> Mapping[str, int]:
        """Return the number of this owner's tenants that are not releasing, by node name. The mapping is live."""
        return self._replicas.get(owner, {})

    def overcommits(self, node: str | None = None) -> tuple[Overcommit, ...]:
        """Return the over-committed GPUs of one node. None: of all nodes."""
        names = sorted(self._nodes) if node is None else [node]
        accounts = (gpu for name in names if name in self._nodes for gpu in self._nodes[name].gpus)
        return tuple(fault for fault in (gpu.overcommit() for gpu in accounts) if fault is not None)

    def grown_since(self, version: int) -> tuple[str, ...]:
        """Return the nodes that may have got room after this `room_version`, the latest first."""
        return tuple(_later(self._grown, version))

    def regrouped_since(self, key: LabelKey, version: int) -> bool:
        """Return whether this affinity group has begun, ended or moved after this `room_version`."""
        return self._regrouped.get(key, 0) > version

    def excludes_fewer_since(self, namespace: str, version: int) -> bool:
        """Return whether the namespace has begun to exclude others from fewer GPUs after this `room_version`."""
        return self._excluding_fewer.get(namespace, 0) > version

    def nodes_excluding(self, key: LabelKey) -> tuple[str, ...]:
        """Return the nodes with tenants of an exclusion label, in the order of their names."""
        return tuple(sorted(self._excluding.get(key, ())))

    def _row(self, node: str, tenant: TenantId) -> tuple[NodeAccount, Row]:
        account = self._nodes.get(node)
        if account is None or tenant not in account.rows:
            raise PlacementError(f"tenant {tenant} has no reservation on {node}")
        return account, account.rows[tenant]

    def _where(self, tenant: TenantId) -> str:
        return " and ".join(sorted(self._nodes_of[tenant]))


def _later(marks: dict[str, int], version: int) -> Iterator[str]:
    """Yield the keys whose mark is later than this version, the latest first. `marks`: version by key, in ascending
    order."""
    for name in reversed(marks):
        if marks[name] <= version:
            return
        yield name
