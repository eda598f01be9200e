"""The hook adds no order between streams of a program (D4): an event in the legacy stream would be a barrier."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
from doubles.gpus import QUEUE_DEPTH
from hook.conftest import Tenant
from hook.world.probe import SUCCESS, Probe
from hook.world.scripted_agent import Client, ScriptedAgent
from sharepod.protocol import Drained

NON_BLOCKING = 1
BLOCKING = 0
"""Flags of a stream that the legacy stream waits for, and that waits for the legacy stream."""


def blocked(tenant: Tenant, symbol: str, *, metered: bool = False) -> tuple[ScriptedAgent, Client, Probe]:
    """Start a process under the hook. It has launched kernels into a default stream, by the driver function `symbol`.
    Its stream X is blocked by a host function, until the test ends that function."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=metered)
    probe = tenant.probe()
    probe.start_cuda()
    for name in "XY":
        probe.ok("stream", name, BLOCKING)
    probe.ok("event", "e")
    probe.ok("launch", "noop", "", 3, symbol)  # no fence is behind the last of these launches
    probe.ok("context_sync")
    probe.ok("ungated", "function", "X")
    return agent, agent.client(), probe


def works(tenant: Tenant, probe: Probe, stream: str) -> None:
    probe.ok("event_record", "e", stream)
    tenant.until(lambda: probe.call("event_query", "e").code == SUCCESS, f"work of stream {stream}")


def beats(tenant: Tenant, client: Client) -> None:
    """Wait until the hook thread has run once more."""
    before = client.pulse().beat_at
    tenant.until(lambda: client.pulse().beat_at > before, "the hook's thread")


@pytest.mark.parametrize("metered", [False, True])
def test_an_idle_token_goes_back_and_orders_nothing_while_a_stream_waits_for_the_program(
    tenant: Tenant, metered: bool
) -> None:
    agent, client, probe = blocked(tenant, "cuLaunchKernel", metered=metered)
    assert agent.next_frame(client, Drained).idle
    works(tenant, probe, "Y")
    probe.ok("ungated_ends")
    works(tenant, probe, "X")


@pytest.mark.promise("program-stream-order")
@pytest.mark.parametrize("flags", [NON_BLOCKING, BLOCKING])
@pytest.mark.parametrize("metered", [False, True])
def test_a_capture_that_begins_orders_nothing_while_a_stream_waits_for_the_program(
    tenant: Tenant, metered: bool, flags: int
) -> None:
    """If a capture begins in any stream, the hook must not record an event in the legacy stream as a fence behind the
    launches there."""
    _, _, probe = blocked(tenant, "cuLaunchKernel", metered=metered)
    probe.ok("stream", "captured", flags)
    probe.ok("capture_begin", "captured", 2)  # relaxed
    works(tenant, probe, "Y")
    probe.ok("capture_end", "captured", "graph")
    probe.ok("ungated_ends")
    works(tenant, probe, "X")


def test_a_drain_of_a_per_thread_default_stream_orders_nothing(tenant: Tenant) -> None:
    agent, client, probe = blocked(tenant, "cuLaunchKernel_ptsz")
    before = probe.ok("live_events")
    tenant.until(lambda: probe.ok("live_events") > before, "the event of an idle look")
    works(tenant, probe, "Y")
    probe.ok("ungated_ends")
    assert agent.next_frame(client, Drained).idle


def test_a_drain_waits_for_launches_into_the_legacy_stream_that_are_behind_no_fence(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    for _ in range(3):
        probe.ok("launch", "spin_us_100000")
    client = agent.client()
    agent.revoke(client, agent.last_grant)
    agent.next_frame(client, Drained)
    [usage] = [usage for usage in tenant.read().client("tenant").usage.values() if usage.submitted]
    assert usage.kernels == usage.submitted == 3
    assert usage.last_end <= agent.times(client, Drained)[0]


def test_a_drain_that_asks_the_legacy_stream_waits_for_per_thread_default_streams_too(tenant: Tenant) -> None:
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    probe.ok("launch", "noop", "", 3)  # no fence is behind the last of these launches
    probe.ok("launch", "spin_us_300000", "", 1, "cuLaunchKernel_ptsz")
    client = agent.client()
    agent.revoke(client, agent.last_grant)
    agent.next_frame(client, Drained)
    [usage] = [usage for usage in tenant.read().client("tenant").usage.values() if usage.submitted]
    assert usage.kernels == usage.submitted == 4
    assert usage.last_end <= agent.times(client, Drained)[0]


def test_an_idle_look_waits_for_no_room_in_a_full_stream(tenant: Tenant) -> None:
    """A thread sleeps in the driver, because its stream is full of ungated work behind a launch. The hook thread's
    check whether the GPU is idle must put no event into that stream, because it would sleep too.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("full", "other"):
        probe.ok("stream", name)
    probe.ok("event", "e")
    probe.ok("context_use", thread="sleeper")
    probe.ok("launch", "noop", "full", 3)  # no fence is behind the last of these launches
    probe.ok("ungated", "function", "full")
    sleeps = probe.post("event_record", "e", "full", 2 * QUEUE_DEPTH, thread="sleeper")
    client = agent.client()
    for _ in range(4):
        beats(tenant, client)
    assert not sleeps.done()
    probe.ok("launch", "noop", "other")
    probe.ok("ungated_ends")
    assert sleeps.result(20).code == SUCCESS


@pytest.mark.promise("program-full-stream")
@pytest.mark.parametrize("metered", [False, True])
def test_a_full_stream_is_destroyed_at_once(tenant: Tenant, metered: bool) -> None:
    """The program ends the wait that fills the stream only after it has destroyed the stream, so that call must not
    wait.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=metered)
    probe = tenant.probe()
    probe.start_cuda()
    for name in ("full", "other"):
        probe.ok("stream", name)
    probe.ok("event", "e")
    probe.ok("launch", "noop", "full", 3)
    probe.ok("context_sync")
    probe.ok("ungated", "value", "full")
    probe.ok("event_record", "e", "full", QUEUE_DEPTH - 1)
    probe.ok("stream_destroy", "full")
    probe.ok("launch", "noop", "other")
    probe.ok("ungated_ends")
    works(tenant, probe, "other")


CALLS: dict[str, list[Any]] = {
    "copy": ["copy_nowhere"],
    "function": ["do_nothing", "other"],
    "launch": ["launch", "noop", "other"],
    "capture": ["capture_begin", "other", 2],
    "second capture": ["capture_begin", "third", 2],
}
"""Calls that put no work into the full stream: a copy into the legacy stream, and calls with another stream."""


@pytest.mark.promise("program-full-stream")
@pytest.mark.parametrize("way", ["without the hook", "revoked", "revoked, CUDA 11.8"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("full", ["blocking", "other thread's", "own"])
def test_no_call_waits_for_room_in_a_full_stream_that_it_puts_nothing_into(
    tenant: Tenant, full: str, call: str, way: str
) -> None:
    """The full stream waits for the program, behind launches without a fence. The program ends that wait after the
    call, so the hook must record no fence there.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant()
    version = "libcuda-11.8" if way.endswith("11.8") else "libcuda"
    bare = {"LD_PRELOAD": ""} if way == "without the hook" else {}
    probe = tenant.probe(double=tenant.double.with_name(version), more=bare)
    probe.start_cuda()
    probe.ok("context_use", thread="sleeper")
    probe.ok("stream", "blocking", BLOCKING)
    for name in ("other thread's", "other", "third"):
        probe.ok("stream", name, NON_BLOCKING)
    probe.ok("event", "e")
    if call == "second capture":
        probe.ok("capture_begin", "other", 2)
    probe.ok("launch", "noop", full, 3)  # no fence is behind the last of these launches
    probe.ok("ungated", "function", full)
    probe.ok("event_record", "e", full, QUEUE_DEPTH - 1)
    if way.startswith("revoked"):
        client = agent.client()
        agent.revoke(client, agent.last_grant)
        beats(tenant, client)
    if full == "other thread's":
        probe.post("do_nothing", full, thread="sleeper")  # sleeps in the driver
    probe.ok(*CALLS[call])
    for name in {"capture": ["other"], "second capture": ["third", "other"]}.get(call, []):
        probe.ok("capture_end", name)
    probe.ok("ungated_ends")
    works(tenant, probe, full)


def finishing_order(tenant: Tenant, probe: Probe, chance: Random) -> tuple[list[set[str]], list[set[str]]]:
    """Let streams of all kinds and of several threads wait, each for a word of the program and some for other streams.
    Release them one after another.

    Returns:
        Two lists, each with one set of streams per release: finished by the program's waits, finished by the events.

    AssertionError: a stream does not continue after the release of all that it waits for.
    """
    places = {f"own{index}": (f"thread{index}", "own") for index in range(3)}
    for name, flags in (("x", BLOCKING), ("y", BLOCKING), ("z", NON_BLOCKING)):
        probe.ok("stream", name, flags)
        places[name] = (f"thread{chance.randrange(3)}", name)
    for thread in ("thread0", "thread1", "thread2"):
        probe.ok("context_use", thread=thread)
    probe.ok("launch", "noop", "", 3)  # into the legacy stream
    probe.ok("context_sync")
    some = [("launch", "noop"), ("launch", "spin_us_100"), ("do_nothing",)]
    waits: dict[str, set[str]] = {}
    for key in chance.sample(sorted(places), len(places)):
        thread, stream = places[key]
        probe.ok("event", f"{key} done")
        others = chance.sample(sorted(waits), min(len(waits), chance.choice([0, 0, 1, 2])))
        held = [*chance.choices(some, k=chance.randrange(3)), ("hold", key), *chance.choices(some, k=3)]
        for other in others:
            held.insert(chance.randrange(len(held) + 1), ("stream_wait", f"{other} done"))
        for op, *arguments in held:
            order = [stream, *arguments] if op == "stream_wait" else [*arguments, stream]
            probe.ok(op, *order, thread=thread, timeout=60)
        probe.ok("event_record", f"{key} done", stream, thread=thread)
        waits[key] = {key}.union(*(waits[other] for other in others))
    released: set[str] = set()
    due: list[set[str]] = []
    over: list[set[str]] = []

    def done(key: str) -> bool:
        return probe.call("event_query", f"{key} done").code == SUCCESS

    for key in chance.sample(sorted(places), len(places)):
        probe.ok("release", key)
        released.add(key)
        due.append({other for other in places if waits[other] <= released})
        for other in sorted(due[-1]):
            tenant.until(partial(done, other), f"{other} of {released}, waits {waits}", 60)
        over.append({other for other in places if done(other)})
    return due, over


@pytest.mark.promise("program-stream-order")
@pytest.mark.parametrize("version", ["libcuda", "libcuda-11.8"])
@pytest.mark.parametrize("way", ["without the hook", "alone", "metered"])
@pytest.mark.parametrize("seed", range(4))
def test_streams_finish_when_all_that_they_wait_for_is_released(
    tenant: Tenant, seed: int, way: str, version: str
) -> None:
    """Per-thread default streams, blocking streams and others wait for each other only by the program's events."""
    agent, chance = tenant.agent(grace_ms=100), Random(seed)
    agent.on_want = lambda client: agent.next_grant(20 if way == "metered" else 0, metered=way == "metered")
    bare = {"LD_PRELOAD": ""} if way == "without the hook" else {}
    probe = tenant.probe(double=tenant.double.with_name(version), more=bare)
    probe.start_cuda()
    due, over = finishing_order(tenant, probe, chance)
    assert over == due
