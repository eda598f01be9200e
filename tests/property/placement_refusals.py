"""Check of refusals against the rules: outlook, counts, amounts and advice (PL3 true-refusals)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from property.placement_rules import LASTING_OF_GPU, LASTING_OF_NODE, Rules
from sharepod.api.dialects import effective
from sharepod.api.sharepod import GpuRequest
from sharepod.api.units import format_fraction
from sharepod.placement.state.types import Obstacle, Outlook, PlacementRequest, Refusal
from sharepod.placement.wording import LEAST_MEMORY, TIME_STEP, size_down

Item = tuple[str, set[str]]
"""Name of a node or GPU, and the rules that exclude it."""


def check_reasons(rules: Rules, refusal: Refusal, request: PlacementRequest) -> None:
    """Check that the refusal counts every node and GPU, each under a reason that really excludes it."""
    assert refusal.obstacles, refusal.message
    never = not rules.possible_when_empty(request)
    conflict = not never and rules.cannot_join(request)
    outlook = Outlook.NEVER if never else Outlook.CONFLICT if conflict else Outlook.WAITING
    assert refusal.outlook is outlook, refusal.message
    if conflict:
        assert [item.what for item in refusal.obstacles] == ["AffinityConflict"], refusal.message
    else:
        _check_counts(rules, refusal, request, never=never)
    _check_figures(rules, refusal)
    _check_brief(refusal)
    _check_advice(rules, refusal, request)


def _check_counts(rules: Rules, refusal: Refusal, request: PlacementRequest, *, never: bool) -> None:
    group = {} if never else dict(rules.group(request))
    nodes: list[Item] = []
    gpus: list[Item] = []
    short = 0
    for name, node in rules.states.items():
        if group and name not in group:
            continue
        against = rules.against_node(node, request)
        against = against & LASTING_OF_NODE if never else against
        nodes.append((name, against))
        if against:
            continue
        here = [gpu for gpu in node.gpus if not group or gpu.uuid in group[name]]
        found = [(gpu.uuid, rules.against_gpu(node, gpu, request)) for gpu in here]
        found = [(uuid, why & LASTING_OF_GPU if never else why) for uuid, why in found]
        gpus += found
        passing = sum(not why for _, why in found)
        short += not group and 0 < passing < request.gpu.count
    elsewhere = len(rules.states) - len(nodes)
    by_rule = [item for item in refusal.obstacles if item.what not in ("FewFreeGpus", "Affinity")]
    _check_each(refusal, [item for item in by_rule if item.unit == "node"], nodes)
    _check_each(refusal, [item for item in by_rule if item.unit == "GPU"], gpus)
    others = {item.what: item.count for item in refusal.obstacles if item not in by_rule}
    assert others.get("FewFreeGpus", 0) == short, refusal.message
    assert others.get("Affinity", 0) == elsewhere, refusal.message


def _check_each(refusal: Refusal, listed: Iterable[Obstacle], items: list[Item]) -> None:
    total = 0
    for obstacle in listed:
        total += obstacle.count
        assert obstacle.count <= sum(obstacle.what in why for _, why in items), refusal.message
    assert total == sum(bool(why) for _, why in items), refusal.message


def _check_figures(rules: Rules, refusal: Refusal) -> None:
    """Check that a refusal's amounts of free time and memory are right. They are rounded down."""
    for item in refusal.obstacles:
        if match := re.search(r"most free: (\S+) of (\S+) GPU (\d+);", item.text):
            node = rules.states[match[2]]
            time, memory = rules.free_of_gpu(node, next(gpu for gpu in node.gpus if gpu.index == int(match[3])))
            assert match[1] == (format_fraction(time) if item.what == "Time" else size_down(memory)), refusal.message


def _check_brief(refusal: Refusal) -> None:
    """Check that the Event's text is one short sentence with the advice, if there is any."""
    assert len(refusal.brief.split()) <= 25, refusal.brief
    assert refusal.fits_now in refusal.brief
    assert ". " not in refusal.brief


def _check_advice(rules: Rules, refusal: Refusal, request: PlacementRequest) -> None:
    """Check the request that the refusal advises: it is valid, has a place now, and has enough memory for a program."""
    if advised := re.search(r"spec\.gpu\.request (\S+) would fit now", refusal.message):
        less = replace(
            request,
            gpu=replace(request.gpu, request_milli=_accepted(request=float(advised[1]), memory="1Gi").request_milli),
        )
        assert rules.possible(less), refusal.message
        assert less.gpu.request_milli % TIME_STEP == 0
    if advised := re.search(r"spec\.gpu\.memory (\S+) would fit now", refusal.message):
        less = replace(request, gpu=replace(request.gpu, memory=_accepted(request=0.5, memory=advised[1]).memory))
        assert rules.possible(less), refusal.message
        assert less.gpu.memory is not None
        assert less.gpu.memory >= LEAST_MEMORY


def _accepted(**gpu: Any) -> GpuRequest:
    """Return the request of a SharePod with this block."""
    return effective({"spec": {"gpu": gpu}})
