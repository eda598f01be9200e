"""What placement promises whatever happens: decisions, writes that succeed, fail or are read back late, restarts of
nodes and of the operator, between any two writes.

The machine plays the cluster's other parts: it writes any decided row into a ledger of its own, in any order, and has
stale readings of it come back. The rules of placement are written down here a second time, over plain rows, and
compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sharepod.api.gpunode import Mode, SchedulingLabels
from sharepod.api.sharepod import GpuRequest, PlacementPolicy
from sharepod.api.units import Bytes, GpuUuid, Milli, TenantId, parse_fraction, parse_quantity
from sharepod.placement.cluster import Cluster
from sharepod.placement.engine import find, group_to_keep, place, serves
from sharepod.placement.model import (
    Assignment,
    GpuState,
    NodeState,
    Outlook,
    PodNeeds,
    Refusal,
    Request,
    Reservation,
    Resources,
    Taint,
    Toleration,
    label_key,
)

UNIT = 1 << 20
CPU = 1_000

labels = st.sampled_from([None] * 8 + ["x", "y"])
shares = st.sampled_from([0, 1, 100, 200, 300, 333, 500, 700, 1000])
sizes = st.sampled_from([None, 1 * UNIT, 3 * UNIT, 20 * UNIT, 45 * UNIT, 100 * UNIT])


@st.composite
def gpu_requests(draw: st.DrawFn) -> GpuRequest:
    mode = draw(st.sampled_from([Mode.SHARED] * 9 + [Mode.EXCLUSIVE]))
    request = 1000 if mode is Mode.EXCLUSIVE else draw(shares)
    memory = None if mode is Mode.EXCLUSIVE else draw(sizes)
    if request == 0 and memory is None:
        memory = UNIT
    return GpuRequest(
        request=Milli(request),
        limit=Milli(1000),
        memory=None if memory is None else Bytes(memory),
        count=draw(st.sampled_from([1, 1, 1, 2, 3])),
        mode=mode,
        labels=SchedulingLabels(affinity=draw(labels), anti_affinity=draw(labels), exclusion=draw(labels)),
        placement=draw(st.sampled_from(PlacementPolicy)),
        models=draw(st.sampled_from([()] * 8 + [("big",), ("none",)])),
        uuids=draw(st.sampled_from([()] * 12 + [("GPU-n0-0", "GPU-n0-1", "GPU-n1-0"), ("GPU-n2-3",)])),
    )


def pods() -> st.SearchStrategy[PodNeeds]:
    return st.builds(
        PodNeeds,
        resources=st.builds(Resources, st.sampled_from([0, 0, 0, CPU, 3 * CPU])),
        node_selector=st.sampled_from([{}, {}, {}, {}, {"zone": "a"}]),
        tolerations=st.sampled_from([(), (Toleration("gpu", "Exists"),)]),
    )


def requests() -> st.SearchStrategy[Request]:
    return st.builds(
        Request,
        tenant=st.just(TenantId("")),
        name=st.just(""),
        namespace=st.sampled_from(["one", "one", "two"]),
        gpu=gpu_requests(),
        owner=st.sampled_from([None, "a", "b"]),
        pod=pods(),
    )


@st.composite
def node_states(draw: st.DrawFn, name: str) -> NodeState:
    kinds = draw(
        st.lists(
            st.sampled_from([("big", 100), ("big", 50), ("small", 50)]),
            min_size=draw(st.sampled_from([0, 2, 3, 4])),
            max_size=4,
        )
    )
    return NodeState(
        name=name,
        labels={"zone": draw(st.sampled_from(["a", "a", "b"]))},
        taints=draw(st.sampled_from([()] * 4 + [(Taint("gpu"),)])),
        allocatable=Resources(draw(st.sampled_from([2 * CPU, 20 * CPU, 20 * CPU]))),
        unavailable=draw(st.sampled_from([None] * 7 + ["is not ready"])),
        gpus=tuple(
            GpuState(
                uuid=GpuUuid(f"GPU-{name}-{index}"),
                index=index,
                model=kind,
                memory=Bytes(size * UNIT),
                available=draw(st.sampled_from([True] * 9 + [False])),
                reason="it is unhealthy",
            )
            for index, (kind, size) in enumerate(kinds)
        ),
    )


@dataclass
class Ledger:
    """A GPUNode as the API server has it, and how it looked before."""

    generation: int = 1
    rows: dict[TenantId, Reservation] = field(default_factory=dict)
    past: list[tuple[int, tuple[Reservation, ...]]] = field(default_factory=list)

    def write(self) -> None:
        self.past.append((self.generation, tuple(self.rows.values())))
        self.generation += 1


def over_committed(rows: Sequence[Reservation], gpu: GpuState) -> bool:
    here = [row for row in rows if gpu.uuid in row.gpus]
    return (
        sum(row.request for row in here) > 1000
        or sum(row.memory for row in here) > gpu.memory
        or (len(here) > 1 and any(row.mode is Mode.EXCLUSIVE for row in here))
    )


class Placement(RuleBasedStateMachine):
    """One run: a small cluster, then anything in any order."""

    asked = runs = 0

    @initialize(
        data=st.data(),
        count=st.sampled_from([3, 2, 1]),
        wave=st.lists(requests(), min_size=4, max_size=10),
        learned=st.booleans(),
    )
    def start(self, data: st.DataObject, count: int, wave: list[Request], learned: bool) -> None:
        Placement.runs += 1
        self.came = wave if learned else []
        self.cluster = self.new_operator()
        self.states: dict[str, NodeState] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.most: dict[TenantId, tuple[int, int]] = {}
        self.unanswered: list[tuple[str, Reservation, int]] = []
        self.left: set[TenantId] = set()  # of which the operator knows that the ledger has them as releasing
        self.serial = 0
        self.refused: list[tuple[Request, int]] = []
        for number in range(count):
            state = data.draw(node_states(f"n{number}"))
            self.states[state.name] = state
            self.ledgers[state.name] = Ledger()
            self.cluster.upsert_node(state)
        self.ask_all(wave)

    def new_operator(self) -> Cluster:
        """One that has seen such requests come, where this run has it so, and places by what it has learned."""
        cluster = Cluster()
        for request in self.came * 8:
            cluster.packing.arrived(request)
        if self.came:
            cluster.packing.renew()
        return cluster

    # What the rules of placement are, once more, over plain rows

    def rows(self, node: str) -> tuple[Reservation, ...]:
        return self.cluster.reservations(node)

    def decided(self, row: Reservation, *, told: Reservation | None = None) -> None:
        """Keeps count of the most that the ledger may say of a row, as far as the operator has been told."""
        before = (told.request, told.memory) if told else self.most.get(row.tenant, (0, 0))
        self.most[row.tenant] = (max(before[0], row.request), max(before[1], row.memory))

    def held(self, node: str, gpu: GpuUuid) -> tuple[int, int]:
        rows = [self.most[row.tenant] for row in self.rows(node) if gpu in row.gpus]
        return sum(time for time, _ in rows), sum(memory for _, memory in rows)

    def takes(self, node: NodeState, gpu: GpuState, request: Request) -> bool:
        asked, namespace = request.gpu, request.namespace
        here = [row for row in self.rows(node.name) if gpu.uuid in row.gpus]

        def named(row: Reservation, label: str | None) -> tuple[str, str] | None:
            return None if label is None else (row.namespace, label)

        kept = self.cluster.kept
        if kept is not None and kept.tenant != request.tenant and (kept.node, gpu.uuid) in self.kept_gpus():
            return False
        if not gpu.available or (asked.models and gpu.model not in asked.models):
            return False
        if asked.uuids and gpu.uuid not in asked.uuids:
            return False
        if asked.mode is Mode.EXCLUSIVE:
            return not here
        exclusion = None if asked.labels.exclusion is None else (namespace, asked.labels.exclusion)
        if any(row.mode is Mode.EXCLUSIVE or named(row, row.labels.exclusion) != exclusion for row in here):
            return False
        apart = asked.labels.anti_affinity
        if apart is not None and any(named(row, row.labels.anti_affinity) == (namespace, apart) for row in here):
            return False
        time, memory = self.held(node.name, gpu.uuid)
        size = asked.memory if asked.memory is not None else gpu.memory * asked.request // 1000
        return (asked.request == 0 or time + asked.request <= 1000) and memory + size <= gpu.memory

    def kept_gpus(self) -> set[tuple[str, GpuUuid]]:
        kept = self.cluster.kept
        return {(kept.node, uuid) for uuid in kept.gpus} if kept is not None else set()

    def group(self, request: Request) -> set[tuple[str, frozenset[GpuUuid]]]:
        label = request.gpu.labels.affinity
        return {
            (node, frozenset(row.gpus))
            for node in self.states
            for row in self.rows(node)
            if label is not None
            and row.tenant not in self.left
            and (row.namespace, row.labels.affinity) == (request.namespace, label)
        }

    def possible(self, request: Request) -> Iterator[tuple[str, frozenset[GpuUuid]]]:
        """Every node that takes the request with the GPUs of which any `count` do."""
        group = self.group(request)
        for node in self.states.values():
            cpu = sum(row.needs.cpu_milli for row in self.rows(node.name) if not row.releasing)
            if node.unavailable or cpu + request.pod.resources.cpu_milli > node.allocatable.cpu_milli:
                continue
            if not self.suits(node, request.pod):
                continue
            fits = frozenset(gpu.uuid for gpu in node.gpus if self.takes(node, gpu, request))
            if not group and len(fits) >= request.gpu.count:
                yield node.name, fits
            for name, gpus in group:
                if name == node.name and gpus <= fits and len(gpus) == request.gpu.count:
                    yield name, gpus

    @staticmethod
    def suits(node: NodeState, pod: PodNeeds) -> bool:
        selected = all(node.labels[key] == value for key, value in pod.node_selector.items())
        return selected and (not node.taints or bool(pod.tolerations))

    def possible_when_empty(self, request: Request) -> bool:
        asked = request.gpu
        for node in self.states.values():
            fits = [
                gpu
                for gpu in node.gpus
                if (not asked.models or gpu.model in asked.models)
                and (not asked.uuids or gpu.uuid in asked.uuids)
                and (asked.memory is None or asked.mode is Mode.EXCLUSIVE or asked.memory <= gpu.memory)
            ]
            large = request.pod.resources.cpu_milli <= node.allocatable.cpu_milli
            if large and self.suits(node, request.pod) and (len(fits) >= asked.count or not node.gpus):
                return True
        return False

    # What happens

    @rule(wave=st.lists(requests(), min_size=3, max_size=8))
    def ask(self, wave: list[Request]) -> None:
        self.ask_all(wave)

    def ask_all(self, wave: list[Request]) -> None:
        for request in wave:
            self.serial += 1
            self.ask_one(replace(request, tenant=TenantId(f"t{self.serial}"), name=f"p{self.serial}"))

    def ask_one(self, request: Request) -> None:
        Placement.asked += 1
        before = self.rows_everywhere()
        answer = place(self.cluster, request)
        assert answer == place(self.cluster, request)
        assert self.rows_everywhere() == before, "asking changes nothing"
        possible = dict(self.possible(request))
        if isinstance(answer, Assignment):
            assert answer == find(self.cluster, request)
            assert len(set(answer.gpus)) == request.gpu.count
            assert set(answer.gpus) <= possible[answer.node]
            self.cluster.reserve(answer.node, answer.reservation(request))
            self.decided(answer.reservation(request))
            if self.cluster.kept is not None and self.cluster.kept.tenant == request.tenant:
                self.cluster.keep(None)
        else:
            self.check_refusal(answer, request, possible)
            self.refused = [*self.refused[-5:], (request, self.cluster.now)]

    def check_refusal(self, refusal: Refusal, request: Request, possible: dict[str, frozenset[GpuUuid]]) -> None:
        assert not possible, refusal.message
        assert refusal.obstacles
        assert (refusal.outlook is Outlook.NEVER) == (not self.possible_when_empty(request)), refusal.message
        if advised := re.search(r"spec\.gpu\.request (\S+) would fit now", refusal.message):
            less = replace(request, gpu=replace(request.gpu, request=parse_fraction(advised[1])))
            assert list(self.possible(less)), refusal.message
        if advised := re.search(r"spec\.gpu\.memory (\S+) would fit now", refusal.message):
            less = replace(request, gpu=replace(request.gpu, memory=parse_quantity(advised[1])))
            assert list(self.possible(less)), refusal.message

    @rule()
    def look_who_could_be_served(self) -> None:
        """One that was refused is served by nodes that have grown since, or its group has changed, or not at all."""
        for request, moment in self.refused:
            key = label_key(request.namespace, request.gpu.labels.affinity)
            woken = serves(self.cluster, request, self.cluster.grown_since(moment))
            if find(self.cluster, request) is not None:
                assert woken or (key is not None and self.cluster.regrouped_since(key, moment))

    @rule(again=st.booleans())
    def ask_again(self, again: bool) -> None:
        for request, _ in self.refused[-1:]:
            self.refused.pop()
            if again and not self.cluster.reservations_of(request.tenant):
                self.ask_one(request)

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """GPUs are kept for one that was refused, or for nobody any more."""
        request = data.draw(st.sampled_from([None, *(request for request, _ in self.refused)]))
        if request is not None and self.cluster.reservations_of(request.tenant):
            return
        kept = group_to_keep(self.cluster, request) if request is not None else None
        assert kept is None or request is None or len(kept.gpus) == request.gpu.count
        self.cluster.keep(kept)

    @rule(data=st.data(), changes=st.lists(st.tuples(shares, sizes), min_size=2, max_size=6))
    def resize(self, data: st.DataObject, changes: list[tuple[int, int | None]]) -> None:
        for request, memory in changes:
            rows = [row for name in self.states for row in self.rows(name) if row.mode is Mode.SHARED]
            if rows and (request > 0 or memory is not None):
                self.resize_one(data.draw(st.sampled_from(rows)), request, memory)

    def resize_one(self, row: Reservation, request: int, memory: int | None) -> None:
        answer = self.cluster.resize(
            row.tenant, request=Milli(request), limit=Milli(1000), memory=None if memory is None else Bytes(memory)
        )
        assert self.only_row(row.tenant) == (row if isinstance(answer, Refusal) else answer)
        if isinstance(answer, Reservation):
            assert (answer.gpus, answer.request) == (row.gpus, request)
            self.decided(answer)
        elif not row.releasing:
            assert request > row.request or memory is None or memory > row.memory, "a lowering is never refused"

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        rows = [(name, row) for name in self.states for row in self.rows(name) if not row.releasing]
        if rows:
            name, row = data.draw(st.sampled_from(rows))
            assert self.cluster.set_releasing(name, row.tenant).releasing

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """One write per node is on its way: of any of the rows that are decided, answered later."""
        name = data.draw(st.sampled_from(sorted(self.states)))
        pending = self.cluster.pending(name)
        if not pending or any(name == written for written, _, _ in self.unanswered):
            return
        ledger = self.ledgers[name]
        ledger.write()
        for row in data.draw(st.lists(st.sampled_from(pending), min_size=1, unique_by=lambda row: row.tenant)):
            ledger.rows[row.tenant] = row
            self.unanswered.append((name, row, ledger.generation))

    @rule()
    def answer(self) -> None:
        for name, row, generation in self.unanswered:
            before = self.rows(name)
            self.cluster.confirm(name, row, generation)
            assert self.rows(name) == before, "what was decided meanwhile stays"
            self.decided(self.only_row(row.tenant), told=row)
            self.learn([row])
        self.unanswered.clear()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        if not any(name == written for written, _, _ in self.unanswered):
            for row in self.cluster.pending(name)[:1]:
                self.revert(name, row.tenant)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        ledger = self.ledgers[name]
        drained = [tenant for tenant, row in ledger.rows.items() if row.releasing]
        if drained and not any(name == written for written, _, _ in self.unanswered):
            tenant = data.draw(st.sampled_from(drained))
            ledger.write()
            del ledger.rows[tenant]
            self.cluster.release(name, tenant, ledger.generation)

    @rule(data=st.data())
    def node_goes_and_comes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        self.cluster.remove_node(name)
        self.cluster.upsert_node(self.states[name])

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
        self.read(data.draw(st.sampled_from(sorted(self.states))))

    @rule()
    def restart(self) -> None:
        """A new operator reads what there is and goes on from there; what was decided and not written is forgotten."""
        self.answer()
        for name in self.states:
            for row in self.cluster.pending(name):
                self.revert(name, row.tenant)
        before = self.rows_everywhere()
        self.start_over()
        assert self.rows_everywhere() == before

    @rule()
    def crash(self) -> None:
        """The operator dies between two writes. The next one knows what was written, told or not, and nothing else."""
        self.unanswered.clear()
        self.start_over()
        for name, ledger in self.ledgers.items():
            assert {row.tenant: row for row in self.rows(name)} == ledger.rows
        self.most = {row.tenant: (row.request, row.memory) for name in self.states for row in self.rows(name)}

    def learn(self, rows: Iterable[Reservation]) -> None:
        self.left.update(row.tenant for row in rows if row.releasing)

    def start_over(self) -> None:
        self.cluster = self.new_operator()
        self.refused = []
        for name, ledger in self.ledgers.items():
            self.learn(ledger.rows.values())
            assert self.cluster.load(name, list(ledger.rows.values()), ledger.generation) == ()
            self.cluster.upsert_node(self.states[name])

    def read(self, name: str) -> None:
        ledger = self.ledgers[name]
        before = self.rows(name)
        self.cluster.load(name, list(ledger.rows.values()), ledger.generation)
        assert self.rows(name) == before, "nobody else writes, so reading brings nothing new"
        self.learn(ledger.rows.values())
        pending = self.cluster.pending(name)
        for row in before:
            self.decided(row, told=None if row in pending else row)

    def revert(self, name: str, tenant: TenantId) -> None:
        self.cluster.revert(name, tenant)
        if tenant in self.ledgers[name].rows:
            row = self.only_row(tenant)
            assert row == self.ledgers[name].rows[tenant]
            self.decided(row, told=row)

    def only_row(self, tenant: TenantId) -> Reservation:
        ((_, row),) = self.cluster.reservations_of(tenant)
        return row

    # What always holds

    def rows_everywhere(self) -> dict[str, tuple[Reservation, ...]]:
        return {name: self.rows(name) for name in self.states}

    @invariant()
    def no_gpu_is_over_committed_neither_as_decided_nor_as_written(self) -> None:
        for name, state in self.states.items():
            for gpu in state.gpus:
                assert not over_committed(self.rows(name), gpu)
                assert not over_committed(list(self.ledgers[name].rows.values()), gpu)
        assert self.cluster.overcommits() == ()

    @invariant()
    def what_is_written_is_never_forgotten(self) -> None:
        for name, ledger in self.ledgers.items():
            assert ledger.rows.keys() <= {row.tenant for row in self.rows(name)}

    @invariant()
    def affinity_groups_stay_together(self) -> None:
        places: dict[tuple[str, str], set[tuple[str, frozenset[GpuUuid]]]] = {}
        for name in self.states:
            for row in self.rows(name):
                if row.labels.affinity is not None and row.tenant not in self.left:
                    key = (row.namespace, row.labels.affinity)
                    places.setdefault(key, set()).add((name, frozenset(row.gpus)))
        for key, groups in places.items():
            assert len(groups) == 1
            assert set(self.cluster.groups(key)) == groups

    @invariant()
    def labels_that_keep_apart_do(self) -> None:
        for name, state in self.states.items():
            for gpu in state.gpus:
                here = [row for row in self.rows(name) if gpu.uuid in row.gpus]
                apart = [(row.namespace, row.labels.anti_affinity) for row in here if row.labels.anti_affinity]
                assert len(apart) == len(set(apart))
                exclusions = {row.labels.exclusion and (row.namespace, row.labels.exclusion) for row in here}
                assert len(exclusions) <= 1


TestPlacement = Placement.TestCase
TestPlacement.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
