"""The scores that C computes equal their definition: usable capacity before the request is placed, less usable capacity
after.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from property.test_placement_packing import histories
from reference.usable_capacity import Definition
from sharepod.api.units import WHOLE_GPU
from sharepod.placement.binpack.columns import Columns
from sharepod.placement.binpack.demand import memory_milli
from sharepod.placement.binpack.request_classes import RequestClass, request_key
from sharepod.placement.binpack.scores import HOLE_WEIGHT, NO_PLACE, ROUND_TO
from sharepod.placement.state.types import PlacementRequest
from unit.placement.world import ClusterWithEngine

RANKS_BY_IDLE = 64
"""RANKS_BY_IDLE of native/filters.h."""


def _raw(columns: Columns, definition: Definition, wanted: RequestClass, node: int, gpus: list[int]) -> float:
    """Return the change of usable capacity if the request goes to these GPUs of a node, including the change of the
    values of holes (free parts as places for future requests).
    """
    row = slice(node, node + 1)
    size = columns.size[row].copy()
    size[size >= definition.usable.sizes] = 0
    before = definition.gpus(columns.time[row], columns.memory[row], size, columns.worth[row]).sum(axis=1)
    time, memory, worth = columns.time[row].copy(), columns.memory[row].copy(), columns.worth[row].copy()
    shares = columns.combinations.shares
    label_before = label_after = 0.0
    for gpu in gpus:
        takes = memory_milli(wanted.memory, wanted.milli, columns.sizes[columns.size[node, gpu]])
        time[0, gpu] = max(time[0, gpu] - wanted.milli, 0)
        memory[0, gpu] = max(memory[0, gpu] - takes, 0)
        if wanted.exclusion is not None and columns.tenants[node, gpu]:
            others = 1.0 - float(worth[0, gpu])
            free = int(columns.time[node, gpu]), int(columns.memory[node, gpu])
            label_before += _of_label(definition, *free) * others
            label_after += _of_label(definition, int(time[0, gpu]), int(memory[0, gpu])) * others
        if not columns.tenants[node, gpu]:
            worth[0, gpu] = shares.open_to(wanted.exclusion)
        labels = () if wanted.anti_affinity is None else (wanted.anti_affinity,)
        last = wanted.interactive and columns.interactive_room[node, gpu] == 1
        worth[0, gpu] *= shares.not_kept_off(labels, interactive=last)
    after = definition.gpus(time, memory, size, worth).sum(axis=1)
    model = columns.node_model[row].clip(max=definition.usable.models)
    cpu = columns.cpu[row]
    left = cpu - wanted.needs.resources.cpu_milli
    gained = definition.value(after, left, model) - definition.value(before, cpu, model)
    holes = definition.served(after[:, -1], left) - definition.served(before[:, -1], cpu)
    idle = float(definition.usable.hole_by_time[WHOLE_GPU]) * columns.width
    most = np.array([max(idle, label_before)])
    to_label = definition.served(most - label_before + label_after, left) - definition.served(most, left)
    return float(gained[0] + HOLE_WEIGHT * (holes[0] + to_label[0]))


def _of_label(definition: Definition, time: int, memory: int) -> float:
    """Return the value of a GPU's free time and memory for tenants with the GPU's exclusion label."""
    return float(definition.usable.hole_by_time[WHOLE_GPU]) * (min(time, memory) / WHOLE_GPU) ** 2


def check_scores(cluster: ClusterWithEngine, request: PlacementRequest) -> None:
    packing, wanted = cluster.engine.packing, RequestClass.of(request)
    if packing.usable is None or wanted.milli == 0:
        return
    columns, definition = packing.columns, Definition(packing.usable)
    packing._scores.clear()
    scores = packing.scores(request_key(request), request)
    for node in range(len(columns.names)):
        passing = packing.passing(scores, node)
        if not passing:
            assert scores.score[node] == NO_PLACE
            continue
        if wanted.count == 1:
            raw = {int(columns.signature[node, gpu]): _raw(columns, definition, wanted, node, [gpu]) for gpu in passing}
            assert raw[int(scores.gpu[node])] >= max(raw.values()) - 0.5
            best = max(raw.values())
        else:
            signature = columns.signature[node].tolist()
            tightest = sorted(passing, key=lambda gpu: (int(columns.time[node, gpu]), signature[gpu], gpu))
            tightest = tightest[: wanted.count]
            best = _raw(columns, definition, wanted, node, tightest)
        idle = sum(not gpu.tenants for gpu in cluster.accounts[columns.names[node]].gpus)
        steps, rank = divmod(-int(scores.score[node]), RANKS_BY_IDLE)
        assert abs(-steps - best / ROUND_TO) <= 0.55
        assert rank == (min(idle, RANKS_BY_IDLE - 1) if definition.usable.tenants_leave else 0)


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_scores_made_in_c_are_those_of_the_definition(
    history: tuple[ClusterWithEngine, list[PlacementRequest]], data: st.DataObject
) -> None:
    cluster, asked = history
    for _ in range(70):
        cluster.engine.packing.arrived(data.draw(st.sampled_from(asked)))
    cluster.engine.packing.renew()
    for request in asked:
        check_scores(cluster, request)
        answer = cluster.engine.find(request)
        if answer is not None:
            cluster.engine.reserve(request, answer)
