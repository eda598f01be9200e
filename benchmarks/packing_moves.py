"""Moving in a replay: a pod without room gets it by restarting one other pod elsewhere.

A part of the placed pods with GPUs, drawn at random, may be moved. For each arriving pod at most one pod moves. Among
the pods whose move makes room, it is the smallest, and among equals the youngest (`placement/preemption/moves.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from packing_policies import SharePod
from packing_trace import TraceNode, TracePod
from sharepod.api.units import TenantId
from sharepod.placement.preemption.moves import Movable, MovePlan, plan_move
from sharepod.placement.state.types import Assignment, PlacementRequest


class Moving(SharePod):
    """Policy: the engine, which moves at most one pod to make room for a pod without room. `part`: part of the pods
    that may be moved, 0 to 1. `moves`: number of moves so far."""

    def __init__(self, nodes: Sequence[TraceNode], pods: Sequence[TracePod], *, part: float = 1.0) -> None:
        super().__init__(nodes, pods)
        self.moves = 0
        self._chance = random.Random(7)
        self._part = part
        self._movable: dict[TenantId, Movable] = {}

    def find(self, request: PlacementRequest) -> Assignment | None:
        answer = self.engine.find(request)
        if answer is None:
            plan = plan_move(self.cluster, request, self._movable, self.engine.find)
            answer = self._carry_out(plan, request) if plan is not None else None
        if answer is not None and self._chance.random() < self._part:
            self._movable[request.tenant] = Movable(request=request, started=self._number)
        return answer

    def leave(self, placed: tuple[str, str]) -> None:
        tenant = TenantId(placed[1])
        self._movable.pop(tenant, None)
        moved = [node for node, _ in self.cluster.reservations_of(tenant)]
        super().leave((moved[0] if moved else placed[0], placed[1]))

    def _carry_out(self, plan: MovePlan, request: PlacementRequest) -> Assignment:
        """Carry out a move. Return the place that it frees for the arriving pod."""
        self.moves += 1
        self.cluster.release(plan.node, plan.tenant)
        node = self.cluster.node(plan.node)
        assert node is not None
        gpus = tuple(gpu.state.uuid for gpu in node.gpus if gpu.state.uuid in plan.gpus)
        memory = min(request.gpu.memory_on(node.gpus_by_uuid[uuid].state.memory) for uuid in gpus)
        mover = self._movable[plan.tenant]
        self._movable[plan.tenant] = replace(mover, started=self._number)
        self.cluster.reserve(plan.to.node, plan.to.reservation(mover.request))
        self.engine.packing.settle()
        return Assignment(node=plan.node, gpus=gpus, memory=memory)
