"""Weights of request classes by the scarcity of room for them. Free GPU time on a node with little free CPU counts only
as far as the CPU serves requests."""

from __future__ import annotations

import numpy as np
import pytest
from reference.usable_capacity import Definition
from sharepod.api.units import Bytes
from sharepod.placement.binpack.demand import DemandClass, MemoryShare, memory_milli
from sharepod.placement.binpack.usable_capacity import SEVERAL_WEIGHT, UsableCapacity


def _class(count: int, milli: int, cpu: int, models: tuple[str, ...] = ()) -> DemandClass:
    return DemandClass(count, milli, MemoryShare.IN_PROPORTION, cpu, models)


def _weights(shares: dict[DemandClass, float], copies: dict[DemandClass, float], idle: float) -> dict[str, list[float]]:
    """Return, by GPU model, the weight of each demand class in the order of `shares`. "" stands for models that are
    first seen later."""
    usable = UsableCapacity(shares, models=["a", "b"], sizes=[Bytes(1 << 30)])
    for _ in usable.weigh_by_scarcity(np.array([copies[known] for known in shares]), idle):
        pass
    return dict(zip(("a", "b", ""), usable.weights.tolist(), strict=True))


SMALL, EIGHT, EIGHT_WITH_CPU = _class(1, 500, 4_000), _class(8, 1000, 64_000), _class(8, 1000, 96_000)


def test_room_for_several_gpus_counts_by_how_much_of_it_is_spoken_for() -> None:
    shares = {SMALL: 0.9, EIGHT: 0.1}
    plenty, half, none = (
        _weights(shares, {SMALL: 2_000.0, EIGHT: copies}, 1_000_000.0)[""][1] for copies in (1_000.0, 140.0, 0.0)
    )
    assert 100 * plenty < 10 * half < 5 * none == pytest.approx(5 * SEVERAL_WEIGHT)


def test_room_is_spoken_for_by_all_that_need_as_much_or_more() -> None:
    shares = {SMALL: 0.9, EIGHT: 0.05, EIGHT_WITH_CPU: 0.05}
    weights = _weights(shares, {SMALL: 2_000.0, EIGHT: 140.0, EIGHT_WITH_CPU: 140.0}, 1_000_000.0)[""]
    assert weights[1] == pytest.approx(2 * weights[2]), "its room is also taken by those with more CPU"


def test_room_of_a_model_is_kept_for_those_that_ask_for_it_once_they_need_all_of_it() -> None:
    picky, easy = _class(1, 1000, 4_000, ("a",)), _class(1, 1000, 4_000)
    shares = {picky: 0.3, easy: 0.7}
    short = _weights(shares, {picky: 10.0, easy: 100.0}, 100_000.0)
    plenty = _weights(shares, {picky: 90.0, easy: 100.0}, 100_000.0)
    assert short["a"][0] > 5.0 > 2.0 > plenty["a"][0]
    assert max(short["b"][0], plenty["b"][0]) < 1.0, "on other models nothing is kept for them"


def test_small_requests_of_several_gpus_weigh_as_any_other() -> None:
    tiny = _class(2, 100, 1_000)
    shares = {SMALL: 0.5, tiny: 0.5}
    usable = UsableCapacity(shares, models=[], sizes=[Bytes(1 << 30)])
    assert usable.by_copies[1] / 200 == pytest.approx(usable.by_copies[0] / 500)


@pytest.mark.parametrize("at_once", [1, 40, 10**6])
def test_many_classes_are_weighed_in_slices(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    classes = [_class(count, 1000, cpu, models) for count in (1, 8) for cpu in range(9) for models in (("a",), ("b",))]
    shares = dict.fromkeys(classes, 1 / len(classes))
    whole, sliced = (UsableCapacity(shares, models=["a", "b"], sizes=[Bytes(1 << 30)]) for _ in range(2))
    copies = np.arange(len(classes), dtype=np.float64)
    list(whole.weigh_by_scarcity(copies, 50_000.0))
    monkeypatch.setattr("sharepod.placement.binpack.usable_capacity._WEIGHED_AT_ONCE", at_once)
    slices = len(list(sliced.weigh_by_scarcity(copies, 50_000.0)))
    assert slices == {1: len(classes), 40: 18 + 18, 10**6: 2}[at_once]
    assert sliced.weights == pytest.approx(whole.weights)


def test_memory_of_a_shape_by_the_size_of_the_gpu() -> None:
    memories: list[Bytes | MemoryShare] = [
        MemoryShare.ALL,
        MemoryShare.IN_PROPORTION,
        *map(Bytes, (0, 1, 3 << 30, (80 << 30) - 1, 81 << 30, 10**30)),
    ]
    shapes = [DemandClass(1, milli, memory, 0) for milli in (1, 333, 1000) for memory in memories]
    sizes = [Bytes(0), Bytes(1 << 30), Bytes(80 << 30), Bytes(10**15)]
    usable = UsableCapacity(dict.fromkeys(shapes, 0.1), models=[], sizes=sizes)
    expected = [[max(memory_milli(shape.memory, shape.milli, size), 1) for shape in shapes] for size in sizes]
    assert usable.takes.tolist() == expected


def test_holes_beside_little_cpu_are_worth_what_the_cpu_serves() -> None:
    usable = UsableCapacity({_class(1, 500, 2_000): 0.5, _class(1, 500, 8_000): 0.5}, models=[], sizes=[Bytes(1 << 30)])
    holes = np.full(4, 8000.0)
    served = Definition(usable).served(holes, np.array([200_000.0, 12_000.0, 0.0, -1_000.0]))
    assert served[0] == 8000.0
    assert 4000.0 < served[1] < 8000.0, "enough for small requests, too little for large ones"
    assert served[2] == served[3] == pytest.approx(0.0, abs=0.01)
