"""Promises of a tenant's next step that hold in every situation."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod.api.gpunode import TenantState
from sharepod.api.objects import TAKEN_BACK
from sharepod.controller.decisions.lifecycle import decide
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.controller.decisions.steps import (
    BeginRelease,
    CreatePod,
    EndRun,
    Finish,
    Forget,
    LetPodGo,
    OpenGate,
    Place,
    RemovalReason,
    RemoveRow,
    TakeBackPod,
    Unreserve,
)
from unit.controller.decisions.lifecycle_steps import ENDED, EVICTION, REFUSED
from unit.controller.objects import pod, reserved, sharepod

_PODS = st.none() | st.builds(
    pod,
    pin=st.sampled_from(["node-a", "node-b"]),
    node=st.sampled_from([None, "node-a", "node-b"]),
    gated=st.booleans(),
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
    deleting=st.booleans(),
    conditions=st.sampled_from([[], [REFUSED], [EVICTION]]),
)
_HELD = st.lists(
    st.builds(
        reserved,
        st.sampled_from(["node-a", "node-b", "node-c"]),
        written=st.booleans(),
        releasing=st.booleans(),
        drained=st.booleans(),
        override=st.sampled_from([None, RemovalReason.NODE_GONE]),
        forced=st.booleans(),
        ending=st.booleans(),
        pod_uid=st.sampled_from([None, "pod-1", "pod-0"]),
    ),
    max_size=3,
    unique_by=lambda item: item.node,
)
_SHAREPODS = st.none() | st.builds(
    lambda phase, uid, valid, deleting, policy, last: sharepod(
        status={
            "phase": phase,
            # one write fills lastEnd and empties podUID, so they never name the same Pod
            **({"podUID": uid} if uid and uid != last else {}),
            **({"lastEnd": {**ENDED, "podUID": last}} if last else {}),
        },
        spec={"restartPolicy": policy} | ({} if valid else {"gpu": {"request": 1.4}}),
        metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleting else {},
    ),
    st.sampled_from(["Pending", "Placed", "Running", "Succeeded", "Failed"]),
    st.sampled_from([None, "pod-1"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["Always", "OnFailure", "Never"]),
    st.sampled_from([None, "pod-0", "pod-1"]),
)
_VIEWS = st.builds(
    lambda own, its_pod, reservations, unbound, now, refused_until: TenantSnapshot(
        sharepod=own,
        pod=its_pod,
        reserved=tuple(reservations),
        unbound_since=unbound,
        now=now,
        refused_until=refused_until,
    ),
    _SHAREPODS,
    _PODS,
    _HELD,
    st.none() | st.floats(0, 100),
    st.floats(0, 200),
    st.floats(0, 200),
)


@settings(max_examples=500, deadline=None)
@given(_VIEWS)
def test_a_pod_that_was_taken_back_is_let_go_once_nothing_says_that_it_ran(view: TenantSnapshot) -> None:
    snapshot = replace(view, pod=pod(deleting=True, finalizers=[TAKEN_BACK]))
    found, own = decide(snapshot), snapshot.sharepod
    if isinstance(found, LetPodGo) and own is not None and not (own.deleting or own.ended or snapshot.between_runs):
        assert own.status.pod_uid != found.pod.uid
        assert all(item.releasing for item in snapshot.reserved)


@settings(max_examples=500, deadline=None)
@given(_VIEWS)
def test_no_share_is_asked_for_or_given_that_was_refused_a_moment_ago(snapshot: TenantSnapshot) -> None:
    assert not isinstance(decide(snapshot), Place | OpenGate) or snapshot.now >= snapshot.refused_until


@settings(max_examples=2000, deadline=None)
@given(_VIEWS)
def test_promises_that_hold_in_every_situation(snapshot: TenantSnapshot) -> None:
    found = decide(snapshot)
    own, its_pod = snapshot.sharepod, snapshot.pod
    rows = {item.node: item for item in snapshot.reserved}
    alive = own is not None and not own.deleting and not own.ended
    if isinstance(found, CreatePod):
        assert alive
        assert own is not None
        last = own.status.last_end.pod_uid if own.status.last_end is not None else None
        assert own.status.pod_uid in (None, last), "one run at a time"
        assert its_pod is None
        assert not snapshot.reserved, "a row may have a Pod on record"
    if isinstance(found, Place):
        assert alive
        assert its_pod is not None, "no Pod waits with a share"
        assert its_pod.waits_for_share
        assert not its_pod.deleting
        assert not snapshot.reserved
    if isinstance(found, OpenGate):
        assert alive
        assert found.pod is its_pod
        assert its_pod is not None
        assert its_pod.waits_for_share
        assert rows[found.node].written == found.row
        assert found.row.pod_uid == its_pod.uid
        assert found.row.state is TenantState.RESERVED
        assert not rows[found.node].wanted.releasing
    if isinstance(found, TakeBackPod):
        assert found.pod.node is None
    if isinstance(found, BeginRelease):
        row_of = rows[found.node].written
        last = own.status.last_end.pod_uid if own is not None and own.status.last_end is not None else None
        assert not alive or snapshot.between_runs or (row_of is not None and row_of.pod_uid == last)
        assert its_pod is None or its_pod.ended or (its_pod.uid != last is not None)
    if isinstance(found, Unreserve):
        assert rows[found.node].written is None
    if isinstance(found, RemoveRow):
        item = rows[found.node]
        confirmed = item.releasing and (item.drained or item.override is not None)
        elsewhere = its_pod is not None and (its_pod.node or its_pod.pin) != found.node
        gated = its_pod is not None and its_pod.waits_for_share and not its_pod.deleting
        on_record = {item.written.pod_uid for item in snapshot.reserved if item.written and not item.releasing}
        on_record.add(own.status.pod_uid if own is not None else None)
        no_pod = its_pod is None and on_record <= {None}
        never_bound = alive and (gated or no_pod or (its_pod is not None and its_pod.taken_back))
        assert confirmed or item.forced or elsewhere or never_bound
        if its_pod is not None and its_pod.node == found.node and not its_pod.ended:
            assert item.forced
            assert its_pod.deleting
    if isinstance(found, Finish | EndRun):
        assert alive
    if isinstance(found, EndRun):
        assert own is not None
        assert own.restart_policy != "Never", "no work runs twice"
        assert own.status.last_end is None or found.pod_uid != own.status.last_end.pod_uid, "each end is counted once"
    if isinstance(found, Forget):
        assert not snapshot.reserved
        assert its_pod is None
