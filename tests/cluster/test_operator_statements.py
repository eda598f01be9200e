"""GPUStatements on a real API server: they contain the agents' counts even if an operator is killed. Also the bill."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys

import pytest
from cluster.fake_agents import GPUNODES
from cluster.operator_world import World, wait
from harness.api import Object
from harness.installation import MANIFESTS, NAMESPACE

ROOT = MANIFESTS.parent
STATEMENTS = "/apis/sharepod.dev/v1alpha1/gpustatements"


def report(world: World, node: str, held: int, *, closed: bool = False) -> None:
    """Write an agent's counts."""
    series = {
        "series": f"s-{node}",
        "namespace": "counted",
        "model": "T",
        "since": "2026-01-31T22:00:00.000Z",
        "heldMilliseconds": held,
        "borrowedMilliseconds": held // 4,
        "reservedMilliseconds": held,
        "memoryMebibyteSeconds": held,
        "closed": closed,
    }
    status = {"consumption": [series], "consumptionAt": "2026-02-01T02:00:00.000Z"}
    world.api.patch(f"{GPUNODES}/{node}/status", {"status": status})


def bill(world: World) -> None:
    """Run the bill command with the rights and prices of the example."""
    example = ROOT / "examples" / "bill" / "bill.yaml"
    world.cluster.kubectl("apply", "--server-side", "-f", str(example))
    token = world.cluster.service_account_token(NAMESPACE, "sharepod-bill")
    prices = world.api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/sharepod-prices")["data"]["prices.yaml"]
    config = world.cluster.kubeconfig_for(token, name="bill")
    (file := config.with_name("prices.yaml")).write_text(prices)
    command = [sys.executable, "-m", "sharepod.controller.bill", "--kubeconfig", str(config), "--month", "2026-02"]
    command += ["--prices", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    (row,) = csv.DictReader(io.StringIO(ran.stdout))
    assert (row["namespace"], row["gpuModel"], row["currency"]) == ("counted", "T", "EUR")
    assert float(row["totalCost"]) == pytest.approx(1.5 * float(row["gpuHours"]), abs=1e-3)
    ran = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, timeout=60, check=False)
    (allocation,) = json.loads(ran.stdout)["allocations"]
    assert allocation["gpuHours"] == float(row["gpuHours"])


def held(statement: Object | None) -> int:
    totals = (statement or {}).get("status", {}).get("totals") or [{}]
    return int(totals[0].get("heldMilliseconds", 0))


@pytest.mark.promise("operator-statement")
@pytest.mark.promise("operator-statement-metrics")
@pytest.mark.promise("operator-bill")
def test_what_agents_count_is_in_the_statement_over_operators_that_die_and_nodes_that_go(world: World) -> None:
    first, second = world.nodes("counted", 2)
    report(world, first, 3_600_000)
    report(world, second, 400)
    assert world.operator is not None
    world.operator.signal(signal.SIGKILL)
    world.operator.wait(10)
    world.start_operator("second")
    world.cluster.wait_for(f"{STATEMENTS}/counted", lambda seen: held(seen) == 3_600_400, what="the statement")
    header, row = world.cluster.kubectl("get", "gpustatements", "counted").stdout.splitlines()
    assert header.split() == ["NAME", "MONTH", "HELD", "H", "RESERVED", "H", "COST", "AGE"]
    assert row.split()[1:4] == ["2026-02", "0.5", "0.5"], "the other half was of January"
    report(world, first, 7_200_000, closed=True)
    assert world.operator is not None
    world.operator.signal(signal.SIGKILL)
    world.operator.wait(10)
    world.start_operator("third")
    statement = world.cluster.wait_for(
        f"{STATEMENTS}/counted", lambda seen: held(seen) == 7_200_400, what="the statement to go on"
    )
    assert statement is not None
    assert [month["month"] for month in statement["status"]["months"]] == ["2026-01", "2026-02"]
    taken_in = world.cluster.wait_for(
        f"{GPUNODES}/{first}",
        lambda seen: seen and (seen["metadata"].get("annotations") or {}).get("sharepod.dev/consumption-taken-in"),
        what="the agent is notified",
    )
    assert taken_in is not None
    assert taken_in["metadata"]["annotations"]["sharepod.dev/consumption-taken-in"] == f"s-{first}"
    wait(
        lambda: world.metric("sharepod_namespace_gpu_seconds_total", "third") == pytest.approx(7200.4 * 2.25),
        what="the metrics",
    )
    bill(world)

    world.agents.stop(second)
    world.api.delete(f"/api/v1/nodes/{second}")
    world.cluster.wait_for(f"{GPUNODES}/{second}", lambda seen: seen is None, what="the GPUNode to go", timeout=60)
    assert held(world.api.get(f"{STATEMENTS}/counted")) == 7_200_400
