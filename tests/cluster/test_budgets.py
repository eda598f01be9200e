"""Budgets on a real API server: which users may write them, and the consequence of a spent budget."""

from __future__ import annotations

import pytest
import yaml
from cluster.operator_world import GPUNODES, World, condition_of, wait
from harness.api import ApiError, Object
from harness.installation import MANIFESTS

_EXAMPLE = MANIFESTS.parent / "examples" / "budgets"
MILLION_HOURS = {"gpuTime": "1000000h"}


def path(namespace: str, name: str | None = None) -> str:
    collection = f"/apis/sharepod.dev/v1alpha1/namespaces/{namespace}/gpubudgets"
    return collection if name is None else f"{collection}/{name}"


def budget(name: str, **spec: object) -> Object:
    return {"apiVersion": "sharepod.dev/v1alpha1", "kind": "GPUBudget", "metadata": {"name": name}, "spec": spec}


def consumed(world: World, node: str, namespace: str, seconds: int) -> None:
    """Make the agent of a node report that a namespace has used this many reserved GPU-seconds."""
    series = {
        "series": f"{node}-{namespace}",
        "namespace": namespace,
        "model": "Simulated-A100",
        "since": "2026-01-01T00:00:00.000Z",
        "reservedMilliseconds": seconds * 1000,
    }
    world.api.patch(f"{GPUNODES}/{node}/status", {"status": {"consumption": [series]}})


def condition(world: World, namespace: str, name: str, kind: str, reason: str) -> Object:
    """Wait until a condition of a budget has a reason; return it."""
    seen: Object = {}

    def holds() -> bool:
        nonlocal seen
        seen = condition_of(world.api.get(path(namespace, name)), kind)
        return bool(seen.get("reason") == reason)

    try:
        wait(holds, what=f"{kind} of {namespace}/{name} with reason {reason}")
    except AssertionError as error:
        log = world.operator.log_tail(40) if world.operator is not None else ""
        raise AssertionError(f"{error}; last seen: {seen}\n{log}") from None
    return seen


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "write gpuTime: 1000h, or gpuSeconds: 3600000"),
        ({"gpuTime": "1h", "gpuSeconds": 3600}, "exactly one of gpuTime and gpuSeconds is needed"),
        ({"gpuTime": "1000"}, "write 1000h or 0.5h"),
        ({"gpuTime": "0h"}, "hours of one GPU above 0"),
        ({"gpuSeconds": 0}, "should be greater than or equal to 1"),
        ({"gpuSeconds": 1, "period": "Year"}, 'supported values: "Day", "Week", "Month"'),
        ({"gpuSeconds": 1, "cap": 5}, "cap is for refill Continuous; remove it, or set refill: Continuous"),
        (
            {"gpuSeconds": 1, "whenSpent": "Queue", "borrowPriority": 5},
            "borrowPriority is for whenSpent Borrow; remove it, or set whenSpent: Borrow",
        ),
        ({"gpuSeconds": 1, "models": [{"model": "A", "weight": 0.0001}]}, "has more than 3 decimals; write at most 3"),
        ({"gpuSeconds": 1, "models": [{"model": "A", "weight": 1}, {"model": "A", "weight": 2}]}, "Duplicate value"),
        (
            {"gpuSeconds": 1, "namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
            "In and NotIn need values; Exists and DoesNotExist take none",
        ),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_with_what_to_write(world: World, spec: Object, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        world.api.create(path("default"), budget("wrong", **spec))
    assert message in refused.value.message


def test_what_the_reference_shows_is_taken_and_has_its_defaults(world: World) -> None:
    models = [{"model": "A", "weight": 2.5}, {"model": "B", "weight": 0.333}]
    body = budget("right", gpuSeconds=100, refill="Continuous", cap=50, borrowPriority=-7, models=models)
    made = world.api.create(path("default"), body)
    assert (made["spec"]["period"], made["spec"]["chargeBy"], made["spec"]["whenSpent"]) == (
        "Month",
        "Reserved",
        "Borrow",
    )
    world.api.delete(path("default", "right"))


@pytest.mark.promise("budgets-rights")
def test_who_administers_a_namespace_reads_its_budget_and_does_not_write_it(world: World) -> None:
    namespace = world.cluster.namespace("rights")
    world.api.create(path(namespace), budget("team", **MILLION_HOURS))
    account = "boss"
    world.api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": account}})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    world.api.create(
        f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
        {"metadata": {"name": account}, "roleRef": role, "subjects": [subject]},
    )
    boss = world.cluster.api_for(world.cluster.service_account_token(namespace, account))
    wait(lambda: _may_read(boss, namespace), what="the role admin to have its rights")
    for attempt in (
        lambda: boss.patch(path(namespace, "team"), {"spec": {"gpuTime": "1h"}}),
        lambda: boss.patch(f"{path(namespace, 'team')}/status", {"status": {"left": 1}}),
        lambda: boss.delete(path(namespace, "team")),
        lambda: boss.create(path(namespace), budget("mine", **MILLION_HOURS)),
        lambda: boss.get(path("default")),
    ):
        with pytest.raises(ApiError) as refused:
            attempt()
        assert refused.value.code == 403


def _may_read(api: object, namespace: str) -> bool:
    try:
        api.get(path(namespace, "team"))  # type: ignore[attr-defined]
    except ApiError:
        return False
    return True


@pytest.mark.promise("budgets-events-once", "budgets-queue", "budgets-charged-once")
def test_a_budget_is_charged_and_queues_what_is_new_over_a_restart_until_it_has_more(world: World) -> None:
    (node,) = world.nodes("spend")
    namespace, other = world.cluster.namespace("spend"), world.cluster.namespace("other")
    consumed(world, node, namespace, 500)
    world.api.create(path(namespace), budget("team", gpuSeconds=1000, whenSpent="Queue"))
    condition(world, namespace, "team", "InForce", "InForce")
    world.apply(namespace, "first", {"request": 0.5}, on="spend")
    world.phase(namespace, "first", "Running")

    # 1. The budget is spent: running SharePods continue, new SharePods wait, and other namespaces are not affected.
    consumed(world, node, namespace, 1700)
    world.api.patch(path(namespace, "team"), {"spec": {"period": "Week"}})
    spent = condition(world, namespace, "team", "WithinBudget", "BudgetSpent")
    assert "new SharePods wait" in spent["message"]
    world.event(namespace, "team", "BudgetSpent")
    world.apply(namespace, "new", {"request": 0.1}, on="spend")
    message = world.condition(namespace, "new", "Placed", status="False", reason="BudgetSpent")
    assert world.api.get(path(namespace, "team"))["status"]["refillAt"] in message
    world.apply(other, "others", {"request": 0.1}, on="spend")
    world.phase(other, "others", "Running")
    assert world.phase(namespace, "first", "Running")

    # 2. The operator is killed: no charge and no Event is repeated, and waiting SharePods still wait.
    assert world.operator is not None
    world.operator.stop(grace=0)
    world.start_operator()
    world.api.patch(path(namespace, "team"), {"spec": {"gpuSeconds": 1100}})
    wait(
        lambda: world.api.get(path(namespace, "team"))["status"]["observedGeneration"] == 3,
        what="the next operator to look",
    )
    status = world.api.get(path(namespace, "team"))["status"]
    assert (status["reserved"], status["left"], status["percent"]) == (1200, 0, 109)
    assert [reason for reason, _ in world.events(namespace, "team")] == ["BudgetSpent"]
    world.condition(namespace, "new", "Placed", status="False", reason="BudgetSpent")

    # 3. The budget is raised: the waiting SharePods run.
    world.api.patch(path(namespace, "team"), {"spec": {"gpuSeconds": 5000}})
    world.phase(namespace, "new", "Running")
    wait(lambda: world.api.get(path(namespace, "team"))["status"]["left"] == 3800, what="the rest of the budget")
    world.event(namespace, "team", "BudgetRefilled")
    assert [reason for reason, _ in world.events(namespace, "team")] == ["BudgetSpent", "BudgetRefilled"]


def _apply_example(world: World, name: str, on: str) -> None:
    """Apply a file of examples/budgets, its SharePods on nodes labelled `test=ON`."""
    for body in yaml.safe_load_all((_EXAMPLE / name).read_text(encoding="utf-8")):
        namespace = body["metadata"].get("namespace", "")
        if body["kind"] == "Namespace":
            world.cluster.kubectl("create", "namespace", body["metadata"]["name"])
            world.cluster.await_service_account(body["metadata"]["name"], "default")
        elif body["kind"] == "GPUBudget":
            world.api.create(path(namespace), body)
        else:
            body["spec"]["nodeSelector"] = {"test": on}
            world.api.create(world.path(namespace), body)


@pytest.mark.promise("budgets-two-teams")
def test_a_team_out_of_budget_gives_way_and_comes_back_once_it_is_refilled(world: World) -> None:
    (node,) = world.nodes("month")
    _apply_example(world, "01-teams.yaml", "month")
    condition(world, "team-a", "training", "InForce", "InForce")
    _apply_example(world, "02-train.yaml", "month")
    runs = ("train-0", "train-1")
    pods = {name: world.phase("team-a", name, "Running")["status"]["podUID"] for name in runs}

    # 1. Team A spends its budget. Its SharePods continue.
    consumed(world, node, "team-a", 1_900_000)
    world.api.patch(path("team-a", "training"), {"spec": {"period": "Week"}})
    condition(world, "team-a", "training", "WithinBudget", "BudgetSpent")
    requests = {row["podName"]: row["requestMilli"] for row in world.rows(node)}
    assert requests == {"train-0": 800, "train-1": 800}

    header, row = world.cluster.kubectl("get", "gpubudgets", "-n", "team-a").stdout.splitlines()
    assert header.split()[:5] == ["NAME", "HOURS", "PERIOD", "USED%", "LEFT"]
    assert row.split()[:5] == ["training", "500.0", "Week", "105", "0.0"]

    # 2. Team B needs time: one run of team A gets a lower share, and no run ends.
    _apply_example(world, "03-serve.yaml", "month")
    world.phase("team-b", "serve", "Running")
    requests = {row["podName"]: row["requestMilli"] for row in world.rows(node)}
    assert sorted(requests.values()) == [0, 600, 800]
    assert {name: world.sharepod("team-a", name)["status"]["podUID"] for name in runs} == pods

    # 3. Team B needs memory: one run of team A is evicted and waits.
    _apply_example(world, "04-index.yaml", "month")
    world.phase("team-b", "index", "Running")
    (evicted,) = set(runs) - {row["podName"] for row in world.rows(node)}
    seen = world.until("team-a", evicted, lambda seen: seen["status"]["phase"] == "Pending", what="waits")
    assert seen["status"]["lastEnd"]["cause"] == "Preempted"
    (stayed,) = set(runs) - {evicted}
    assert world.sharepod("team-a", stayed)["status"]["podUID"] == pods[stayed]

    # 4. The budget is refilled and team B's SharePods end: both runs of team A have their shares again.
    world.api.patch(path("team-a", "training"), {"spec": {"gpuTime": "1000h"}})
    condition(world, "team-a", "training", "WithinBudget", "WithinBudget")
    for name in ("index", "serve"):
        world.delete("team-b", name)
    world.phase("team-a", evicted, "Running")
    wait(
        lambda: {row["podName"]: row["requestMilli"] for row in world.rows(node)} == {"train-0": 800, "train-1": 800},
        what="the shares of both",
    )
