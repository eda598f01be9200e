"""Metrics of the agent: exactly the documented families, with the same names for every kind of tenant."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sharepod.agent.agent import Agent
from sharepod.agent.devices.held_gpus import PluginPod
from sharepod.agent.devices.inventory import SimulatedInventory
from sharepod.agent.telemetry.collector import AgentCollector
from sharepod.agent.telemetry.families import FAMILIES
from sharepod.agent.tenants.served import ServedTenant
from sharepod.api.gpunode import ClaimReference, Mode, Pool
from unit.agent.client import GI, GPU0, GPU1, Client, row, settings_in

MONITORING = (Path(__file__).resolve().parents[4] / "docs" / "monitoring.md").read_text()
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def write(directory: Path, *processes: dict[str, object], **gpu0: object) -> None:
    gpus = [
        {"uuid": GPU0, "index": 0, "model": "Simulated", "memory": "16Gi", **gpu0},
        {"uuid": GPU1, "index": 1, "model": "Simulated", "memory": "16Gi", "busy": 0.5},
    ]
    fresh = directory / "inventory.new"
    fresh.write_text(yaml.safe_dump({"gpus": gpus, "processes": list(processes)}))
    fresh.rename(directory / "inventory.yaml")


@pytest_asyncio.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    write(tmp_path)
    agent = Agent(settings_in(tmp_path, unhooked_after_s=0), SimulatedInventory(tmp_path / "inventory.yaml"))
    await agent.start()
    await agent.take_stock()
    yield agent
    await agent.close()


def scrape(agent: Agent) -> Samples:
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float | None:
    found = [each for key, each in samples.get(name, {}).items() if labels.items() <= dict(key).items()]
    assert len(found) <= 1, f"{name} {labels}: {found}"
    return found[0] if found else None


async def until(agent: Agent, name: str, expected: float | None, **labels: str) -> Samples:
    async with asyncio.timeout(10):
        while value(samples := scrape(agent), name, **labels) != expected:  # noqa: ASYNC110 - until the next reading
            await asyncio.sleep(0.02)
    return samples


async def test_only_documented_families_with_documented_labels_are_served(agent: Agent, tmp_path: Path) -> None:
    await agent.tenants.apply([row("a", gpus=(GPU0, GPU1)), row("b")])
    write(tmp_path, {"pid": 4242, "uuid": GPU0, "memory": "1Gi", "busy": 0.1}, busy=0.3, xids=[13])
    samples = await until(agent, "sharepod_gpu_xids_total", 1, gpu=GPU0, xid="13")
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    allowed = {
        f"{name}{suffix}": {*family.labels, *(("le",) if suffix == "_bucket" else ())}
        for name, family in FAMILIES.items()
        for suffix in suffixes[family.kind]
    }
    for name, by_labels in samples.items():
        assert name in allowed
        assert all(set(dict(labels)) == allowed[name] for labels in by_labels), name


def test_names_follow_prometheus_conventions() -> None:
    units = ("_seconds", "_bytes", "_ratio")
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"sharepod_(tenant|gpu|agent)_[a-z_]+", name)
        assert not name.endswith("_total"), "the client library adds it"
        assert not re.search(r"milli|percent|_ms|_ns|_mib", name)
        if any(unit in name for unit in units):
            assert name.endswith(units), f"{name}: the unit comes last"
        assert family.kind != "histogram" or name.endswith("_seconds")


@pytest.mark.promise("node-series-end")
async def test_a_shared_tenant_is_reported_per_gpu_and_its_series_end_with_it(agent: Agent) -> None:
    await agent.tenants.apply([row("a", 400, 700, gpus=(GPU0, GPU1))])
    client = await Client.connect(agent.tenants.directory("a"))
    assert await client.reserve(GI, gpu=1) == GI
    assert await client.reserve(8 * GI, gpu=0, seq=2) == 0
    await client.granted()
    samples = await until(agent, "sharepod_tenant_memory_used_bytes", GI, tenant="a", gpu=GPU1)
    assert value(samples, "sharepod_tenant_memory_used_bytes", tenant="a", gpu=GPU0) == 0
    for gpu in (GPU0, GPU1):
        about = {"tenant": "a", "namespace": "default", "pod": "a", "mode": "Shared", "gpu": gpu}
        assert value(samples, "sharepod_tenant_request_ratio", **about) == 0.4
        assert value(samples, "sharepod_tenant_limit_ratio", **about) == 0.7
        assert value(samples, "sharepod_tenant_memory_limit_bytes", **about) == 4 * GI
        assert value(samples, "sharepod_tenant_grants_total", **about) == 1
        assert value(samples, "sharepod_gpu_free_ratio", gpu=gpu) == 0.6
        assert value(samples, "sharepod_gpu_free_memory_bytes", gpu=gpu) == 12 * GI
        assert value(samples, "sharepod_gpu_tenants", gpu=gpu) == 1
    assert value(samples, "sharepod_tenant_denied_allocations_total", tenant="a", gpu=GPU0) == 1
    assert value(samples, "sharepod_tenant_denied_allocations_total", tenant="a", gpu=GPU1) == 0
    assert value(samples, "sharepod_tenant_enforced", tenant="a") == 1
    client.close()
    await agent.tenants.apply([])
    samples = scrape(agent)
    assert not [labels for by_labels in samples.values() for labels in by_labels if ("tenant", "a") in labels]
    assert value(samples, "sharepod_gpu_free_ratio", gpu=GPU0) == 1


@pytest.mark.promise("node-series-bound")
async def test_a_tenant_has_a_bounded_number_of_series(agent: Agent, tmp_path: Path) -> None:
    await agent.tenants.apply([row("one", gpus=(GPU0,)), row("two", gpus=(GPU0, GPU1))])
    agent.owner_of = lambda pid: "two" if pid == 4243 else "one"
    process: dict[str, object] = {"uuid": GPU0, "memory": "1Gi", "busy": 0.1}
    write(tmp_path, {**process, "pid": 4242}, {**process, "pid": 4243})
    await until(agent, "sharepod_tenant_enforced", 0, tenant="one")
    samples = await until(agent, "sharepod_tenant_enforced", 0, tenant="two")
    series = [labels for by_labels in samples.values() for labels in by_labels]
    one, two = (sum(("tenant", name) in labels for labels in series) for name in ("one", "two"))
    assert one <= 32
    assert two - one <= 16


async def test_a_gpu_has_the_number_of_series_that_the_page_of_monitoring_states(agent: Agent) -> None:
    (stated,) = re.findall(r"A GPU has (\d+), and one for each Xid", MONITORING)
    await agent.tenants.apply([row("one", gpus=(GPU0,))])
    samples = await until(agent, "sharepod_gpu_busy_ratio", 0.5, gpu=GPU1)
    of_gpus = [by_labels for name, by_labels in samples.items() if name.startswith("sharepod_gpu_")]
    assert sum(("gpu", GPU1) in labels for by_labels in of_gpus for labels in by_labels) == int(stated)


async def test_a_process_without_the_hook_is_reported(agent: Agent, tmp_path: Path) -> None:
    await agent.tenants.apply([row("a")])
    agent.owner_of = lambda pid: "a"
    write(tmp_path, {"pid": 4242, "uuid": GPU0, "memory": "1Gi"})
    samples = await until(agent, "sharepod_tenant_enforced", 0, tenant="a")
    assert value(samples, "sharepod_tenant_memory_used_bytes", tenant="a") == GI


async def test_exclusive_tenants_and_native_pods_have_the_same_names_from_nvml(agent: Agent, tmp_path: Path) -> None:
    whole = row("whole", 1000, 1000, gpus=(GPU1,), mode=Mode.EXCLUSIVE, memory=16 * GI)
    await agent.tenants.apply([whole])
    agent.know_plugin_pods({GPU0: PluginPod("team", "trainer")}, None)
    processes = [{"pid": 4242 + i, "uuid": uuid, "memory": f"{i + 1}Gi"} for i, uuid in enumerate((GPU0, GPU1))]
    write(tmp_path, *processes, busy=0.25)
    await until(agent, "sharepod_tenant_memory_used_bytes", GI, mode="Native")
    async with asyncio.timeout(10):
        while (value(scrape(agent), "sharepod_tenant_usage_ratio", mode="Native") or 0) < 0.1:  # noqa: ASYNC110 - until the next reading
            await asyncio.sleep(0.02)
    samples = scrape(agent)
    native = {"tenant": "", "namespace": "team", "pod": "trainer", "mode": "Native", "gpu": GPU0}
    exclusive = {"tenant": "whole", "mode": "Exclusive", "gpu": GPU1}
    assert value(samples, "sharepod_tenant_memory_used_bytes", **exclusive) == 2 * GI
    for about, busy in ((native, 0.25), (exclusive, 0.5)):
        assert value(samples, "sharepod_tenant_request_ratio", **about) == 1
        assert value(samples, "sharepod_tenant_memory_limit_bytes", **about) == 16 * GI
        ratio = value(samples, "sharepod_tenant_usage_ratio", **about)
        assert ratio is not None
        assert 0 < ratio <= busy + 1e-6
        assert (value(samples, "sharepod_tenant_held_seconds_total", **about) or 0) > 0
        assert value(samples, "sharepod_tenant_grants_total", **about) is None, "nothing is granted to it"
    agent.know_plugin_pods({}, None)
    assert value(scrape(agent), "sharepod_tenant_request_ratio", mode="Native") is None


async def test_claims_of_one_namespace_have_labels_of_their_own(agent: Agent) -> None:
    claims = [ClaimReference(name=name, uid=name) for name in ("train-gpu", "eval-gpu")]
    rows = [row(claim.uid, pod_name="", pod_uid=None, claim=claim) for claim in claims]
    await agent.tenants.apply(rows)
    requests = scrape(agent)["sharepod_tenant_request_ratio"]
    assert {dict(labels)["pod"] for labels in requests} == {"claim/train-gpu", "claim/eval-gpu"}


async def test_a_gpu_that_the_device_plugin_has_given_away_cannot_be_shared(agent: Agent) -> None:
    agent.held_gpus.know_ledger(Pool.DEVICE_PLUGIN, ())
    agent.know_plugin_pods({GPU0: PluginPod("team", "trainer")}, None)
    samples = scrape(agent)
    assert [value(samples, "sharepod_gpu_shareable", gpu=gpu) for gpu in (GPU0, GPU1)] == [0, 1]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_metric_family_has_a_help_text(name: str) -> None:
    assert FAMILIES[name].help[0].isupper() or FAMILIES[name].help[0].isdigit()
    assert not FAMILIES[name].help.endswith(".")


@pytest.mark.promise("time-scrape")
async def test_a_scrape_lets_the_loop_do_other_work_after_each_tenant(agent: Agent) -> None:
    await agent.tenants.apply([row(f"t{index}") for index in range(20)])
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    families = await AgentCollector(agent).collect_in_steps()
    working.cancel()
    assert turns >= 20
    tenants = {sample.labels["tenant"] for family in families for sample in family.samples if "tenant" in sample.labels}
    assert tenants == {f"t{index}" for index in range(20)}


async def test_a_row_removed_during_a_scrape_is_skipped(agent: Agent) -> None:
    await agent.tenants.apply([row("first"), row("second")])
    scraping = asyncio.create_task(AgentCollector(agent).collect_in_steps())
    await asyncio.sleep(0)
    await agent.tenants.apply([row("first")])
    named = {sample.labels.get("tenant") for family in await scraping for sample in family.samples}
    assert "first" in named


async def test_time_accounts_are_written_a_few_at_a_time(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    await agent.tenants.apply([row(f"t{index}") for index in range(30)])
    written: list[str] = []
    monkeypatch.setattr(ServedTenant, "checkpoint", lambda served: written.append(served.tenant_id))
    agent.tenants._checkpoints_due.clear()  # the agent's own timer may have begun a round
    agent.tenants._checkpoint()
    assert len(written) <= 12
    for _ in range(2):
        agent.tenants._checkpoint()
    assert sorted(written) == sorted(f"t{index}" for index in range(30)), "each once in a round"
