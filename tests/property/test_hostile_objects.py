"""No object that a user or another controller can write ends or delays the reading of objects.

Work is measured as executed lines of Python, not as time. Code that reads a list without a bound executes lines for
each entry.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property import hostile_objects as hostile
from sharepod.api.bounds import MAX_MESSAGE
from sharepod.api.objects import SHARE_GATE
from sharepod.api.pods.pod import PodSettings
from sharepod.api.units import Bytes, GpuUuid
from sharepod.controller.decisions.conditions import StatusInputs
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.controller.decisions.status import compose
from sharepod.controller.placing.loop import PlacementLoop
from sharepod.controller.state.agent_leases import AgentLeases
from sharepod.controller.state.cluster_state import ClusterState
from sharepod.controller.state.facts.pod_facts import pod_facts
from sharepod.controller.state.facts.sharepod_facts import unreadable_sharepod
from sharepod.controller.state.memos import TenantMemos
from sharepod.placement.state.types import Assignment, GpuState, NodeState, Resources

MOST_LINES = 120_000
"""Largest number of lines of Python that one object may cause: about ten for each value, for the largest number of
values that are read.
"""

Json = dict[str, Any]

_GATES = {"schedulingGates": [{"name": SHARE_GATE}]}
GATED = replace(pod_facts({"metadata": {"uid": "gated", "name": "gated"}, "spec": _GATES}), asks=None)
"""A Pod that waits for a share. Its own resource needs are unknown, so placement uses the needs of its SharePod."""


class Operator:
    """The reading part of an operator: its state, and the decisions that it makes from read objects."""

    def __init__(self) -> None:
        self.state = ClusterState(PodSettings(), AgentLeases(20.0, lambda: 0.0))
        gpu = GpuState(uuid=GpuUuid("GPU-0"), index=0, model="m", memory=Bytes(1 << 34))
        self.state.cluster.upsert_node(NodeState(name="good", allocatable=Resources(64_000, 1 << 40), gpus=(gpu,)))
        self.loop = PlacementLoop(
            self.state,
            TenantMemos(),
            may_act=lambda: True,
            on_decided=lambda _tenant, _node: None,
            on_answered=lambda _tenant: None,
            clock=lambda: 0.0,
            head_reservation_after=600.0,
        )

    def sharepod(self, raw: Json) -> None:
        """Read a SharePod, decide for it, and return the result."""
        self.state.put_sharepod(raw)
        self.decide(str(raw["metadata"]["uid"]))

    def decide(self, tenant: str) -> None:
        found = self.state.sharepods.get(tenant)
        assert found is not None
        assert (found.gpu is None) == (found.error is not None)
        if found.gpu is not None:
            self.loop.engine.place(self.loop.requests.of_sharepod(found, GATED))
        snapshot = TenantSnapshot(sharepod=found, pod=None, reserved=())
        inputs = StatusInputs(
            snapshot=snapshot, node=None, row=None, gpus=None, seen=None, refusal=None, resize_refusal=None,
            resizing=False, blocked=None, usage_due=True, now="2026-01-01T00:00:00Z",
        )  # fmt: skip
        for condition in compose(found, inputs)["conditions"]:
            assert len(condition["message"]) <= MAX_MESSAGE or found.ended
        json.dumps(found.raw)

    def pod(self, raw: Json) -> None:
        """Read a Pod twice: as a Pod of SharePod, and as another owner's Pod."""
        self.state.put_pod(raw)
        known = self.state.pods.get(str(raw["metadata"]["uid"]))
        assert known is not None
        assert max(len(known.message), len(known.waiting), len(known.unschedulable), len(known.reason)) <= MAX_MESSAGE
        self.state.other_pods.put(raw)
        self.good_is_placed()

    def node(self, raw: Json) -> None:
        """Read a Node, and return placement's view of it."""
        self.state.put_node(raw)
        self.good_is_placed()

    def gpunode(self, raw: Json) -> None:
        """Read a GPUNode together with a healthy Node."""
        self.state.put_node(hostile.well("node"))
        self.state.put_gpunode(raw)
        self.good_is_placed()

    def good_is_placed(self) -> None:
        """Check that a valid SharePod is placed on a valid node."""
        good = hostile.with_metadata(uid="good", name="good")
        self.state.put_sharepod(good)
        found = self.state.sharepods.get("good")
        assert found is not None
        answer = self.loop.engine.place(self.loop.requests.of_sharepod(found, GATED))
        assert isinstance(answer, Assignment)


@contextmanager
def counted(most: int = MOST_LINES) -> Iterator[None]:
    """Fail if more than `most` lines of the package are executed in the block."""
    lines = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        nonlocal lines
        if event == "call" and "sharepod" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        if lines > most:
            sys.settrace(before)
            raise AssertionError(f"more than {most} lines of Python for one object")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


CORPUS: dict[str, Callable[[], Iterator[tuple[str, Json]]]] = {
    "sharepod": hostile.sharepods,
    "pod": hostile.pods,
    "node": hostile.nodes,
    "gpunode": hostile.gpunodes,
}


@pytest.mark.promise("operator-one-object-one-owner")
@pytest.mark.parametrize("kind", CORPUS)
def test_no_object_of_the_corpus_ends_or_stalls_the_reading(kind: str) -> None:
    for name, raw in CORPUS[kind]():
        operator = Operator()
        try:
            with counted():
                getattr(operator, kind)(raw)
        except Exception as error:
            raise AssertionError(f"{kind}: {name}: {type(error).__name__}: {str(error)[:300]}") from error


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80) | st.sampled_from(hostile.NUMBERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=12,
)


_FREE = (("labels",), ("annotations",), ("ownerReferences",))
"""Metadata fields that a user can write."""


@st.composite
def spoiled(draw: st.DrawFn, kind: str) -> Json:
    """Draw an object of the kind with arbitrary JSON at one to three places."""
    raw = hostile.well(kind)
    for _ in range(draw(st.integers(1, 3))):
        places = [path for path in hostile.paths(raw) if path[0] != "metadata" or path[1:2] in _FREE]
        raw = hostile.replaced(raw, draw(st.sampled_from(places)), draw(ANY))
    return raw


@pytest.mark.promise("operator-one-object-one-owner")
@pytest.mark.parametrize("kind", CORPUS)
@settings(max_examples=300)
@given(data=st.data())
def test_no_json_at_any_place_of_an_object_ends_or_stalls_the_reading(kind: str, data: st.DataObject) -> None:
    raw = data.draw(spoiled(kind))
    with counted():
        getattr(Operator(), kind)(raw)


def test_a_sharepod_with_only_metadata_requests_nothing_and_reports_why() -> None:
    metadata = hostile.with_metadata(labels={"a": "b"}, managedFields=hostile.nested(9_000))["metadata"]
    facts = unreadable_sharepod(metadata, "is nested too deep")
    assert (facts.uid, facts.name, facts.namespace, facts.version) == (hostile.UID, "bad", "team", 7)
    assert facts.gpu is None
    assert not facts.readable
    assert str(facts.error) == "spec: cannot be read: the object is nested too deep"
    json.dumps(facts.raw)


def test_the_retained_size_of_a_sharepod_is_bounded() -> None:
    operator = Operator()
    for number, (name, raw) in enumerate(hostile.sharepods()):
        raw["metadata"]["resourceVersion"] = str(number + 1)
        operator.state.put_sharepod(raw)
        found = operator.state.sharepods.get(hostile.UID)
        assert found is not None
        assert len(json.dumps([found.raw, found.raw_status])) < 4_000_000, name
