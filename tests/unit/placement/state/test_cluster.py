"""The accounts: rows that are decided, written, read and reverted. No share is assigned twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sharepod.api.gpunode import Mode, Tenant
from sharepod.api.units import Bytes, Milli, TenantId
from sharepod.placement import resizing
from sharepod.placement.engine import queue_key
from sharepod.placement.state.types import Assignment, Outlook, PlacementError, Refusal, Reservation, Resources
from unit.placement.world import GI, ClusterWithEngine, ask, cluster_of, gpu, node, put, refused, row

T = TenantId("t")
A0, A1 = "GPU-node-a-0", "GPU-node-a-1"


def resized(cluster: ClusterWithEngine, tenant: str = "t", **share: Any) -> Reservation:
    answer = resize(cluster, tenant, **share)
    assert isinstance(answer, Reservation), answer.message
    return answer


def resize(
    cluster: ClusterWithEngine, tenant: str = "t", *, request: int, limit: int = 1000, memory: int | None = 4 * GI
) -> Reservation | Refusal:
    return resizing.resize(
        cluster,
        TenantId(tenant),
        request_milli=Milli(request),
        limit_milli=Milli(limit),
        memory=None if memory is None else Bytes(memory),
    )


def free(cluster: ClusterWithEngine, name: str = "node-a") -> list[tuple[int, int]]:
    account = cluster.node(name)
    assert account is not None
    return [(gpu.free_milli, gpu.free_memory) for gpu in account.gpus]


def test_a_decision_counts_before_anything_is_written() -> None:
    cluster = cluster_of(node())
    put(cluster, ask("first", 600))
    refused(cluster, ask("second", 500))


@pytest.mark.promise("operator-no-over-commit")
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (row("u", 501), "has 0.5 of its time free, 0.501 is asked"),
        (row("u", 0, memory=76 * GI + 1), "has 76Gi of memory free"),
        (row("u", gpus=["GPU-none"]), "has no GPU GPU-none"),
        (row("u", gpus=[A0, A0]), "distinct"),
        (row("u", gpus=[]), "one or more"),
        (dataclasses.replace(row("u"), mode=Mode.EXCLUSIVE), "shares with none"),
        (row("t", 1), "tenant t has a reservation on node-a"),
    ],
)
def test_a_reservation_that_would_over_commit_is_an_error_and_changes_nothing(
    wrong: Reservation, expected: str
) -> None:
    cluster = cluster_of(node())
    cluster.reserve("node-a", row("t", 500))
    before = free(cluster)
    with pytest.raises(PlacementError, match=expected):
        cluster.reserve("node-a", wrong)
    assert free(cluster) == before
    assert [reservation.tenant for reservation in cluster.reservations("node-a")] == ["t"]


def test_nothing_is_reserved_on_an_unknown_node() -> None:
    with pytest.raises(PlacementError, match="node-x is not known"):
        cluster_of(node()).reserve("node-x", row())


def test_a_releasing_tenant_keeps_its_share_until_it_is_released() -> None:
    cluster = cluster_of(node())
    cluster.reserve("node-a", row("t", 800))
    written = cluster.set_releasing("node-a", T)
    assert written.releasing
    assert written.row().state == "Releasing"
    cluster.read_back("node-a", written, 2)
    refused(cluster, ask("u", 300))
    cluster.release("node-a", T)
    put(cluster, ask("u", 1000))


def test_releasing_what_is_not_there_changes_nothing() -> None:
    cluster = cluster_of(node())
    cluster.release("node-a", T)
    cluster.release("node-x", T)
    with pytest.raises(PlacementError, match="no reservation"):
        cluster.set_releasing("node-a", T)


def test_a_raise_is_taken_at_once_and_a_lowering_given_away_only_when_written() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 500)], 1)
    raised = resized(cluster, request=700)
    assert free(cluster) == [(300, 76 * GI)]
    cluster.read_back("node-a", raised, 2)
    lowered = resized(cluster, request=200, memory=1 * GI)
    assert free(cluster) == [(300, 76 * GI)]
    cluster.read_back("node-a", lowered, 3)
    assert free(cluster) == [(800, 79 * GI)]


def test_confirming_what_was_written_keeps_what_was_decided_meanwhile() -> None:
    cluster = cluster_of(node())
    cluster.reserve("node-a", row("t", 500))
    ending = cluster.set_releasing("node-a", T)
    cluster.read_back("node-a", row("t", 500), 2)
    assert cluster.pending("node-a") == (ending,)


def test_a_late_confirmation_does_not_undo_a_newer_reading() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 500)], 1)
    raised = resized(cluster, request=700)
    cluster.load("node-a", [row("t", 600)], 3)
    cluster.read_back("node-a", raised, 2)
    cluster.revert("node-a", T)
    assert cluster.reservations("node-a") == (row("t", 600),)


def test_what_is_lowered_and_not_written_yet_can_be_raised_again() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 500)], 1)
    resized(cluster, request=200)
    resized(cluster, request=1000)


def test_a_raise_that_may_be_written_already_counts_until_the_lowering_after_it_is() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 200)], 1)
    raised = resized(cluster, request=800)
    lowered = resized(cluster, request=300)
    refused(cluster, ask("u", 300))
    cluster.load("node-a", [row("t", 200)], 1)
    refused(cluster, ask("u", 300))
    cluster.read_back("node-a", raised, 2)
    refused(cluster, ask("u", 300))
    cluster.read_back("node-a", lowered, 3)
    put(cluster, ask("u", 700))


def test_a_failed_write_takes_a_decision_back_to_what_is_written() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 500)], 1)
    resized(cluster, request=900)
    cluster.revert("node-a", T)
    assert cluster.reservations("node-a") == (row("t", 500),)
    cluster.reserve("node-a", row("new", 500))
    cluster.revert("node-a", TenantId("new"))
    assert cluster.reservations_of(TenantId("new")) == ()
    assert free(cluster) == [(500, 76 * GI)]


def test_a_decision_survives_reading_a_ledger_that_does_not_have_it_yet() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 300)], 1)
    cluster.reserve("node-a", row("new", 300))
    wanted = resized(cluster, request=600)
    cluster.load("node-a", [row("t", 300), row("other", 100)], 2)
    assert free(cluster) == [(0, 68 * GI)]
    assert cluster.pending("node-a") == (row("new", 300), wanted)


def test_the_ledger_as_read_confirms_what_it_has() -> None:
    cluster = cluster_of(node())
    cluster.reserve("node-a", row("t", 300))
    cluster.load("node-a", [row("t", 300)], 1)
    assert cluster.pending("node-a") == ()
    cluster.load("node-a", [], 2)
    assert cluster.reservations("node-a") == ()


def test_a_stale_reading_of_the_ledger_is_ignored() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [], 4)
    cluster.reserve("node-a", row("t", 900))
    cluster.read_back("node-a", row("t", 900), 5)
    cluster.load("node-a", [], 4)
    refused(cluster, ask("u", 200))


def test_a_stale_reading_does_not_bring_back_what_was_released() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 900)], 4)
    cluster.release("node-a", T, generation=5)
    cluster.load("node-a", [row("t", 900)], 4)
    put(cluster, ask("u", 1000))


def test_a_ledger_made_anew_counts_its_generations_anew() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 900)], 40, uid="old")
    cluster.load("node-a", [row("u", 100)], 1, uid="new")
    assert cluster.reservations("node-a") == (row("u", 100),)


def test_a_dropped_ledger_frees_everything() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 900)], 7)
    cluster.reserve("node-a", row("u", 100))
    cluster.drop_ledger("node-a")
    assert free(cluster) == [(1000, 80 * GI)]
    cluster.load("node-a", [row("t", 900)], 1)
    assert free(cluster) == [(100, 76 * GI)]


def test_reading_the_same_ledger_twice_is_reading_it_once() -> None:
    cluster = cluster_of(node())
    rows = [row("t", 300), row("u", 200)]
    for _ in range(2):
        assert cluster.load("node-a", rows, 1) == ()
    assert free(cluster) == [(500, 72 * GI)]


def test_an_over_committed_ledger_is_kept_reported_and_not_added_to() -> None:
    cluster = cluster_of(node(gpus=2))
    (fault,) = cluster.load("node-a", [row("t", 700), row("u", 700), row("v", 100, gpus=[A1])], 1)
    assert fault.gpu == A0
    assert fault.text == ("node-a GPU 0 is over-committed: requests add up to 1.4; tenants: team/t, team/u")
    assert len(cluster.reservations("node-a")) == 3
    assert put(cluster, ask("w", 100)).gpus == (A1,)
    refused(cluster, ask("idle", 0, memory=GI, uuids=[A0]))
    assert cluster.overcommits() == (fault,)
    resized(cluster, request=650, memory=5 * GI)


def test_on_over_committed_memory_a_share_may_change_for_less_of_it_and_more_time() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 100, memory=50 * GI), row("u", 100, memory=50 * GI)], 1)
    resized(cluster, request=200, memory=40 * GI)


def test_an_exclusive_row_beside_another_is_reported() -> None:
    cluster = cluster_of(node())
    whole = dataclasses.replace(row("t", 1000, memory=80 * GI), mode=Mode.EXCLUSIVE)
    (fault,) = cluster.load("node-a", [whole, row("u", 0)], 1)
    assert "an Exclusive tenant shares it with 1 more" in fault.text


def test_two_reservations_of_one_tenant_are_both_kept_and_told() -> None:
    cluster = cluster_of(node("node-a"), node("node-b"))
    cluster.load("node-a", [row("t", 300)], 1)
    cluster.load("node-b", [row("t", 300, gpus=["GPU-node-b-0"])], 1)
    assert [name for name, _ in cluster.reservations_of(T)] == ["node-a", "node-b"]
    with pytest.raises(PlacementError, match="node-a and node-b"):
        resize(cluster, request=400)


def test_rows_wait_for_their_node_and_its_gpus() -> None:
    cluster = ClusterWithEngine()
    cluster.load("node-a", [row("t", 700)], 1)
    cluster.upsert_node(node("node-a", 0))
    cluster.upsert_node(node("node-a", 1))
    assert free(cluster) == [(300, 76 * GI)]


def test_a_node_deleted_and_registered_again_keeps_its_ledger() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 700)], 3)
    cluster.remove_node("node-a")
    cluster.upsert_node(node())
    assert free(cluster) == [(300, 76 * GI)]


def test_owner_and_needs_are_remembered_where_the_ledger_does_not_have_them() -> None:
    cluster = cluster_of(node())
    reservation = dataclasses.replace(row("t", 100), owner="rs", needs=Resources(64_000))
    cluster.reserve("node-a", reservation)
    cluster.load("node-a", [row("t", 100)], 1)
    account = cluster.node("node-a")
    assert account is not None
    assert account.replicas_of("rs") == 1
    assert account.taken().free.cpu_milli == 0
    cluster.set_releasing("node-a", T)
    assert account.replicas_of("rs") == 0
    assert account.taken().free.cpu_milli == 64_000, "its pod is deleted"


def test_a_row_of_the_ledger_and_a_reservation_say_the_same() -> None:
    tenant = Tenant(id="t", namespace="team", pod_name="p", gpus=(A0, A1), request_milli=400, limit_milli=700, memory=5)
    assert Reservation.of_row(tenant).row() == tenant


# Changing a share


def test_a_raise_beyond_what_is_free_is_refused_with_what_would_fit_and_changes_nothing() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 400), row("u", 500)], 1)
    refusal = resize(cluster, request=600)
    assert isinstance(refusal, Refusal)
    assert refusal.message == (
        "keeps request 0.4, limit 1, memory 4Gi: node-a GPU 0 has 0.1 of its time free and the raise takes 0.2 more. "
        "spec.gpu.request 0.5 would fit now."
    )
    assert cluster.reservations("node-a") == (row("t", 400), row("u", 500))
    resized(cluster, request=500)


def test_a_raise_of_memory_beyond_the_gpu_never_fits() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 400), row("u", 500)], 1)
    refusal = resize(cluster, request=400, memory=77 * GI)
    assert isinstance(refusal, Refusal)
    assert refusal.outlook is Outlook.WAITING
    assert "spec.gpu.memory 76Gi would fit now." in refusal.message
    refusal = resize(cluster, request=400, memory=81 * GI)
    assert isinstance(refusal, Refusal)
    assert refusal.outlook is Outlook.NEVER


def test_the_tightest_of_several_gpus_bounds_a_raise() -> None:
    cluster = cluster_of(node(gpus=2))
    cluster.load("node-a", [row("t", 400, gpus=[A0, A1]), row("u", 500, gpus=[A1])], 1)
    refusal = resize(cluster, request=600)
    assert isinstance(refusal, Refusal)
    assert "node-a GPU 1 has 0.1" in refusal.message


def test_without_memory_a_resized_share_has_its_part_of_the_gpu() -> None:
    cluster = cluster_of(node(gpus=[gpu("node-a", 0, memory=40 * GI)]))
    cluster.load("node-a", [row("t", 400)], 1)
    assert resized(cluster, request=500, memory=None).memory == 20 * GI


def test_a_raise_waits_for_gpus_that_are_not_seen_and_a_lowering_does_not() -> None:
    cluster = ClusterWithEngine()
    cluster.load("node-a", [row("t", 400)], 1)
    refusal = resize(cluster, request=500)
    assert isinstance(refusal, Refusal)
    assert "cannot be seen" in refusal.message
    resized(cluster, request=300)


def test_an_ending_tenant_gets_no_other_share() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 400)], 1)
    cluster.set_releasing("node-a", T)
    assert isinstance(resize(cluster, request=300), Refusal)


@pytest.mark.parametrize(("request_milli", "limit"), [(500, 400), (0, 0), (-1, 10), (1001, 1001)])
def test_what_is_no_share_is_an_error(request_milli: int, limit: int) -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 400)], 1)
    with pytest.raises(PlacementError, match="no share"):
        resize(cluster, request=request_milli, limit=limit)


@pytest.mark.promise("placement-order")
def test_the_queue_goes_by_priority_then_age_then_name() -> None:
    def waiting(name: str, priority: int, created: str) -> tuple[int, int, str, str, str]:
        return queue_key(dataclasses.replace(ask(name), priority=priority, created=created))

    old, new = "2030-01-01T00:00:00Z", "2030-01-01T00:00:01Z"
    order = [waiting("z", 5, new), waiting("y", 0, old), waiting("a", 0, new), waiting("b", 0, new)]
    assert sorted({*order}) == order


def test_the_same_question_has_the_same_answer() -> None:
    cluster = cluster_of(node("node-a", 2), node("node-b", 2))
    put(cluster, ask("first", 300))
    answers = {cluster.engine.place(ask("second", 300)) for _ in range(3)}
    assert len(answers) == 1
    assert isinstance(answers.pop(), Assignment)


@pytest.mark.promise("memory-in-use")
def test_memory_is_not_lowered_below_what_is_in_use_so_that_nobody_is_promised_it() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 500)], 1)
    before = free(cluster)

    def lower(in_use: int) -> Reservation | Refusal:
        return resizing.resize(
            cluster, T, request_milli=Milli(200), limit_milli=Milli(1000), memory=Bytes(1 * GI), in_use=in_use
        )

    refusal = lower(3 * GI)
    assert isinstance(refusal, Refusal)
    assert refusal.outlook == "MemoryInUse"
    assert "it uses 3Gi of memory, more than the 1Gi asked for" in refusal.message
    assert free(cluster) == before
    assert isinstance(lower(1 * GI), Reservation)


def test_a_lowering_stays_decided_when_the_raise_before_it_is_read_back() -> None:
    cluster = cluster_of(node())
    cluster.load("node-a", [row("t", 300)], 1)
    raised = resized(cluster, request=800)
    lowered = resized(cluster, request=300)
    cluster.load("node-a", [raised], 2)
    assert cluster.pending("node-a") == (lowered,)
    cluster.load("node-a", [lowered], 3)
    assert cluster.pending("node-a") == ()
    put(cluster, ask("u", 700, memory=GI))
