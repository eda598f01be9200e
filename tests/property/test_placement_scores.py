"""The scores that C makes are those of the definition: usable capacity after less usable capacity before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from property.test_placement_packing import histories
from sharepod.api.units import WHOLE_GPU
from sharepod.placement.binpack.columns import Columns
from sharepod.placement.binpack.queries import Ask
from sharepod.placement.binpack.scores import HOLE_WEIGHT, NO_PLACE, ROUND_TO
from sharepod.placement.binpack.usable_capacity import UsableCapacity, memory_share
from sharepod.placement.state.types import PlacementRequest
from unit.placement.world import ClusterWithEngine


def _raw(columns: Columns, usable: UsableCapacity, ask: Ask, slot: int, cells: list[int]) -> float:
    """What usable capacity gains, and what holes are worth with it, when the request goes to these cells of a node."""
    row = slice(slot, slot + 1)
    size = columns.size[row].copy()
    size[size >= usable.sizes] = 0
    before = usable.cells(columns.time[row], columns.memory[row], size).sum(axis=1)
    time, memory = columns.time[row].copy(), columns.memory[row].copy()
    for cell in cells:
        of_size = columns.sizes[columns.size[slot, cell]]
        takes = WHOLE_GPU if ask.whole else memory_share(-1 if ask.memory is None else ask.memory, ask.milli, of_size)
        time[0, cell] = max(time[0, cell] - ask.milli, 0)
        memory[0, cell] = max(memory[0, cell] - takes, 0)
    after = usable.cells(time, memory, size).sum(axis=1)
    model = columns.node_model[row].clip(max=usable.models)
    cpu = columns.cpu[row]
    gained = usable.value(after, cpu - ask.needs.resources.cpu_milli, model) - usable.value(before, cpu, model)
    return float(gained[0] + HOLE_WEIGHT * (after[0, -1] - before[0, -1]))


def check_scores(cluster: ClusterWithEngine, request: PlacementRequest) -> None:
    packing, ask = cluster.engine.packing, Ask.of(request)
    if packing.usable is None or ask.milli == 0:
        return
    columns = packing.columns
    packing.forget()
    scored = packing.scored(request)
    for slot in range(len(columns.names)):
        passing = packing.passing(scored, slot)
        if not passing:
            assert scored.score[slot] == NO_PLACE
            continue
        if ask.count == 1:
            raw = {int(columns.like[slot, cell]): _raw(columns, packing.usable, ask, slot, [cell]) for cell in passing}
            assert raw[int(scored.cell[slot])] >= max(raw.values()) - 0.5
            best = max(raw.values())
        else:
            tightest = sorted(passing, key=lambda cell: (int(columns.time[slot, cell]), cell))[: ask.count]
            best = _raw(columns, packing.usable, ask, slot, tightest)
        assert abs(int(scored.score[slot]) - best / ROUND_TO) <= 0.55


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
