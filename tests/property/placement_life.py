"""The cluster around placement, as a state machine that hypothesis drives. Between any two writes of the operator other
writes succeed, fail or are read late, pods and holders (Pods that obtain GPUs of the device plugin) come and go, nodes
and the operator restart.

The machine simulates the cluster's other parts. It writes any decided row into its own ledger, in any order, and
returns stale reads of the ledger. After every step it checks the ledger's promises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from property.placement_requests import resources
from property.placement_rules import Pod, Rules
from sharepod.api.gpunode import Mode
from sharepod.api.units import TenantId
from sharepod.placement.holders import DEVICE_PLUGIN_RESOURCE
from sharepod.placement.state.types import GpuState, NodeState, PlacementRequest, Reservation, Resources
from unit.placement.world import ClusterWithEngine


@dataclass
class Ledger:
    """GPUNode in the API server, with its earlier versions."""

    generation: int = 1
    rows: dict[TenantId, Reservation] = field(default_factory=dict)
    past: list[tuple[int, tuple[Reservation, ...]]] = field(default_factory=list)

    def write(self) -> None:
        self.past.append((self.generation, tuple(self.rows.values())))
        self.generation += 1


def over_committed(rows: Sequence[Reservation], gpu: GpuState) -> bool:
    here = [row for row in rows if gpu.uuid in row.gpus]
    return (
        sum(row.request_milli for row in here) > 1000
        or sum(row.memory for row in here) > gpu.memory
        or (len(here) > 1 and any(row.mode is Mode.EXCLUSIVE for row in here))
    )


class Life(RuleBasedStateMachine):
    """State machine of a small cluster: all events except decisions. A subclass calls `build` in its first step."""

    def build(
        self, states: Iterable[NodeState], came: list[PlacementRequest], *, max_excluded: int | None = None
    ) -> None:
        self.came = came
        self.max_excluded = max_excluded
        self.states = {state.name: state for state in states}
        self.ledgers = {name: Ledger() for name in self.states}
        self.most: dict[TenantId, tuple[int, int]] = {}
        self.reported: dict[TenantId, Reservation] = {}  # written rows, as the operator last read them
        self.unanswered: list[tuple[str, Reservation, int]] = []
        self.left: set[TenantId] = set()  # tenants whose ledger row is known to be releasing
        self.pods: dict[str, Pod] = {}
        self.holders: dict[str, tuple[str, TenantId]] = {}
        self.refused: list[tuple[PlacementRequest, int]] = []
        self.serial = 0
        self.cluster = self.new_operator()
        for state in self.states.values():
            self.cluster.upsert_node(state)

    def new_operator(self) -> ClusterWithEngine:
        """Return a new operator's cluster. In runs with `came`, its engine has learned the demand from these
        requests."""
        cluster = ClusterWithEngine(max_excluded_gpus=self.max_excluded)
        for request in self.came * 8:
            cluster.engine.packing.arrived(request)
        if self.came:
            cluster.engine.packing.renew()
        return cluster

    def oracle(self) -> Rules:
        return Rules(
            states=self.states,
            rows=self.rows_everywhere(),
            most=self.most,
            left=self.left,
            head_reservation=self.cluster.head_reservation,
            pods=list(self.pods.values()),
            holders=list(self.holders.values()),
            max_excluded=self.max_excluded,
            uncounted=[where for holder, where in self.holders.items() if holder not in self.pods],
        )

    def rows(self, node: str) -> tuple[Reservation, ...]:
        return self.cluster.reservations(node)

    def rows_everywhere(self) -> dict[str, tuple[Reservation, ...]]:
        return {name: self.rows(name) for name in self.states}

    def only_row(self, tenant: TenantId) -> Reservation:
        ((_, row),) = self.cluster.reservations_of(tenant)
        return row

    def decided(self, row: Reservation, *, reported: Reservation | None = None) -> None:
        """Update `most`: the largest request and memory that the ledger may contain for the row's tenant, as far as the
        operator knows. `reported`: the row that the operator has read; it replaces older maxima."""
        before = (reported.request_milli, reported.memory) if reported else self.most.get(row.tenant, (0, 0))
        self.most[row.tenant] = (max(before[0], row.request_milli), max(before[1], row.memory))

    def learn(self, rows: Iterable[Reservation]) -> None:
        self.left.update(row.tenant for row in rows if row.releasing)

    # Writes

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        rows = [(name, row) for name in self.states for row in self.rows(name) if not row.releasing]
        if rows:
            name, row = data.draw(st.sampled_from(rows))
            assert self.cluster.set_releasing(name, row.tenant).releasing

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Begin a write of any decided row. Its answer arrives later. Each node has at most one unanswered write."""
        name = data.draw(st.sampled_from(sorted(self.states)))
        if self.written(name):
            return
        pending = self.cluster.pending(name)
        if not pending:
            self.nothing_in_flight(name)
            return
        ledger = self.ledgers[name]
        ledger.write()
        for row in data.draw(st.lists(st.sampled_from(pending), min_size=1, unique_by=lambda row: row.tenant)):
            ledger.rows[row.tenant] = row
            self.unanswered.append((name, row, ledger.generation))

    def written(self, name: str) -> bool:
        """Return whether this node has an unanswered write."""
        return any(name == node for node, _, _ in self.unanswered)

    def nothing_in_flight(self, name: str) -> None:
        before = self.rows(name)
        self.cluster.nothing_in_flight(name)
        assert self.rows(name) == before
        for row in before:
            self.decided(row, reported=row)

    @rule()
    def answer(self) -> None:
        for name, row, generation in self.unanswered:
            before = self.rows(name)
            self.cluster.read_back(name, row, generation)
            assert self.rows(name) == before, "later decisions stay"
            self.reported[row.tenant] = row
            # Writes of decisions made after this row may be unanswered. So all these decisions count until the row that
            # was read equals the present decision.
            present = self.only_row(row.tenant)
            self.decided(present, reported=row if present == row else None)
            self.learn([row])
        self.unanswered.clear()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        if not self.written(name):
            for row in self.cluster.pending(name)[:1]:
                self.revert(name, row.tenant)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        ledger = self.ledgers[name]
        drained = [tenant for tenant, row in ledger.rows.items() if row.releasing]
        if drained and not self.written(name):
            tenant = data.draw(st.sampled_from(drained))
            ledger.write()
            del ledger.rows[tenant]
            self.cluster.release(name, tenant, ledger.generation)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """End some tenants of a node. They are drained at once, or their rows were never written."""
        name = data.draw(st.sampled_from(sorted(self.states)))
        rows = self.rows(name)
        if not rows or self.written(name):
            return
        ledger = self.ledgers[name]
        for row in data.draw(st.lists(st.sampled_from(rows), min_size=1, unique_by=lambda row: row.tenant)):
            if row.tenant in ledger.rows:
                ledger.write()
                del ledger.rows[row.tenant]
            self.cluster.release(name, row.tenant, ledger.generation)

    @rule(data=st.data())
    def stale_event(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        if self.ledgers[name].past:
            generation, rows = data.draw(st.sampled_from(self.ledgers[name].past))
            before = self.rows(name)
            self.cluster.load(name, rows, generation)
            assert self.rows(name) == before

    @rule(data=st.data())
    def event(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        ledger = self.ledgers[name]
        before = self.rows(name)
        self.cluster.load(name, list(ledger.rows.values()), ledger.generation)
        assert self.rows(name) == before, "there is no other writer, so a read brings nothing new"
        self.learn(ledger.rows.values())
        pending = self.cluster.pending(name)
        for row in before:
            written = ledger.rows.get(row.tenant)
            if written is not None and written != self.reported.get(row.tenant):
                self.reported[row.tenant] = written
                self.decided(row, reported=None if row in pending else row)

    def revert(self, name: str, tenant: TenantId) -> None:
        self.cluster.revert(name, tenant)
        if tenant in self.ledgers[name].rows:
            row = self.only_row(tenant)
            assert row == self.ledgers[name].rows[tenant]
            self.decided(row, reported=row)

    # Nodes, and other Pods on them

    @rule(data=st.data())
    def node_goes_and_comes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        self.cluster.remove_node(name)
        self.cluster.upsert_node(self.states[name])

    @rule(data=st.data(), ours=st.booleans(), takes=resources)
    def pod_comes(self, data: st.DataObject, ours: bool, takes: Resources) -> None:
        """Add a pod: the pod of a reservation, or another pod."""
        name = data.draw(st.sampled_from(sorted(self.states)))
        has = {pod.tenant for pod in self.pods.values()}
        without = [row for row in self.rows(name) if row.tenant not in has]
        self.serial += 1
        if not ours:
            self.put_pod(f"other-{self.serial}", Pod(name, takes))
        elif without:
            row = data.draw(st.sampled_from(without))
            self.put_pod(f"ours-{self.serial}", Pod(name, row.needs, row.tenant))

    @rule(data=st.data())
    def pod_goes(self, data: st.DataObject) -> None:
        deleted = data.draw(st.lists(st.sampled_from(sorted(self.pods)), max_size=3, unique=True)) if self.pods else []
        for uid in deleted:
            if not uid.startswith("holder"):
                del self.pods[uid]
                self.cluster.remove_pod(uid)

    def put_pod(self, uid: str, pod: Pod) -> None:
        self.pods[uid] = pod
        self.cluster.set_pod_usage(pod.node, uid, pod.resources, tenant=pod.tenant)

    @rule(data=st.data())
    def holder_comes(self, data: st.DataObject) -> None:
        """Report the Pod of a holder before the kubelet has assigned a GPU to it."""
        coming = sorted(set(self.holders) - set(self.pods))
        if coming:
            holder = data.draw(st.sampled_from(coming))
            self.put_pod(holder, Pod(self.holders[holder][0], Resources(extended={DEVICE_PLUGIN_RESOURCE: 1})))

    @rule(data=st.data(), given_up=st.booleans())
    def holder_is_answered(self, data: st.DataObject, given_up: bool) -> None:
        """Assign any free GPU to a holder, or cancel the holder."""
        if not self.holders:
            return
        holder = data.draw(st.sampled_from(sorted(self.holders)))
        name, _ = self.holders.pop(holder)
        state = self.states[name]
        others = [gpu.uuid for gpu in state.gpus if not gpu.held and not gpu.taken]
        self.cluster.end_holder(name, holder)
        if given_up and self.pods.pop(holder, None) is not None:
            self.cluster.remove_pod(holder)
        if others and not given_up:
            uuid = data.draw(st.sampled_from(others))
            gpus = tuple(replace(gpu, held=gpu.held or gpu.uuid == uuid) for gpu in state.gpus)
            self.states[name] = replace(state, gpus=gpus)
            self.put_pod(holder, Pod(name, Resources(extended={DEVICE_PLUGIN_RESOURCE: 1})))
            self.cluster.upsert_node(self.states[name])

    # Restarts and crashes of the operator

    @rule()
    def restart(self) -> None:
        """Restart the operator: it reads the cluster again, and its unwritten decisions are lost."""
        self.answer()
        for name in self.states:
            for row in self.cluster.pending(name):
                self.revert(name, row.tenant)
        before = self.rows_everywhere()
        self.start_over()
        assert self.rows_everywhere() == before

    @rule()
    def crash(self) -> None:
        """Let the operator crash between two writes. Its successor knows only the written state, acknowledged
        or not."""
        self.unanswered.clear()
        self.start_over()
        for name, ledger in self.ledgers.items():
            assert {row.tenant: row for row in self.rows(name)} == ledger.rows

    def start_over(self) -> None:
        self.cluster = self.new_operator()
        self.refused = []
        self.holders = {}
        for uid, pod in self.pods.items():
            self.cluster.set_pod_usage(pod.node, uid, pod.resources, tenant=pod.tenant)
        for name, ledger in self.ledgers.items():
            self.learn(ledger.rows.values())
            assert self.cluster.load(name, list(ledger.rows.values()), ledger.generation) == ()
            self.cluster.upsert_node(self.states[name])
        rows = [row for ledger in self.ledgers.values() for row in ledger.rows.values()]
        self.reported = {row.tenant: row for row in rows}
        self.most = {row.tenant: (row.request_milli, row.memory) for row in rows}

    # Invariants

    @invariant()
    def no_gpu_is_over_committed_neither_as_decided_nor_as_written(self) -> None:
        for name, state in self.states.items():
            for gpu in state.gpus:
                assert not over_committed(self.rows(name), gpu)
                assert not over_committed(list(self.ledgers[name].rows.values()), gpu)
        assert self.cluster.overcommits() == ()

    @invariant()
    def each_excluded_gpu_is_counted_for_its_namespace(self) -> None:
        if self.max_excluded is not None:
            excluded = self.oracle().excluded()
            for namespace in ("one", "two"):
                assert self.cluster.excluded.of(namespace) == excluded.count(namespace)

    @invariant()
    def what_is_written_is_never_forgotten(self) -> None:
        for name, ledger in self.ledgers.items():
            assert ledger.rows.keys() <= {row.tenant for row in self.rows(name)}
