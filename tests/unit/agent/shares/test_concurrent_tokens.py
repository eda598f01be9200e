"""Tokens of tenants that co-run: the agent's readings of their progress, and the frames that it sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from sharepod import protocol
from sharepod.agent.shares.tokens import Tokens
from sharepod.timeshare import Parameters, Sharing

MS = 1_000_000
GPU = "GPU-0"


class Clock:
    """Clock in nanoseconds, which a test advances."""

    def __init__(self) -> None:
        self.now = 1

    def __call__(self) -> int:
        return self.now


class EagerProcess:
    """Process that has work in flight for 0.3 of the time while it holds, always wants more time, and drains at
    once."""

    def __init__(self, tokens: Tokens, tenant: str, *, version: int = protocol.VERSION_MAX) -> None:
        self.pid, self.tenant, self.version = ord(tenant), tenant, version
        self.grant: protocol.Grant | None = None
        self.concurrent: set[bool] = set()
        """Values of the flag `concurrent` in all grants that the process has received."""
        self.heartbeat: protocol.Heartbeat | None = protocol.Heartbeat(self._pulse)
        self._tokens = tokens
        self._ends_at: int | None = None
        self._revoked = False
        self._now = 0
        self._samples = self.launches = 0

    def send(self, frame: protocol.AgentFrame) -> None:
        if isinstance(frame, protocol.Grant):
            self.grant, self._revoked = frame, False
            self.concurrent.add(frame.concurrent)
            self._ends_at = self._now + frame.quantum_ns if frame.quantum_ns else None
        elif isinstance(frame, protocol.Revoke) and self.grant is not None and frame.grant_id == self.grant.grant_id:
            self._revoked = True

    def step(self, now: int) -> None:
        """Run for the millisecond that ends at `now`."""
        self._now = now
        if self.grant is None:
            return
        self._samples += 2
        self.launches += 9
        if self._revoked or (self._ends_at is not None and now >= self._ends_at):
            ended, self.grant = self.grant, None
            self._tokens.drained(self.tenant, self, protocol.Drained(ended.grant_id, wanting=True))

    def _pulse(self) -> protocol.Pulse:
        held = 0 if self.grant is None else self.grant.grant_id
        return protocol.Pulse(held, self._now, self._now, self._samples, self._samples * 3 // 10, self.launches)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Tokens]:
    tokens = Tokens(Parameters(sharing=getattr(request, "param", Sharing.CONCURRENT)), clock)
    yield tokens
    tokens.close()


def begin(
    tokens: Tokens, versions: dict[str, int], together: dict[str, list[bool]] | None = None
) -> list[EagerProcess]:
    """Let a process of each tenant connect and request the token. `versions`: each tenant's protocol version.
    `together`: receives, by tenant, whether other tenants begin (True) or cease to hold its GPU."""
    processes = []
    for name, version in versions.items():
        tokens.set_tenant(
            name,
            (GPU,),
            request_milli=400,
            limit_milli=1000,
            contended=lambda _: None,
            bar=lambda _: None,
            together=(together or {}).setdefault(name, []).append,
        )
        processes.append(EagerProcess(tokens, name, version=version))
        tokens.set_connected(name, connected=True, concurrent=version >= protocol.CONCURRENT_VERSION)
    for process in processes:
        tokens.want(process.tenant, process)
    return processes


def together_ms(tokens: Tokens, clock: Clock, processes: Sequence[EagerProcess], milliseconds: int) -> int:
    """Run the processes for `milliseconds`. Return for how many of these milliseconds more than one process held."""
    together = 0
    for _ in range(milliseconds):
        clock.now += MS
        together += sum(process.grant is not None for process in processes) > 1
        for process in processes:
            process.step(clock.now)
        tokens.set_open(None)  # this call makes the scheduler carry out all due actions
    return together


async def test_tenants_with_gaps_run_at_the_same_time_once_both_are_measured(tokens: Tokens, clock: Clock) -> None:
    processes = begin(tokens, {"a": protocol.VERSION_MAX, "b": protocol.VERSION_MAX})
    together_ms(tokens, clock, processes, 1000)
    assert together_ms(tokens, clock, processes, 1000) > 800
    assert all(True in process.concurrent for process in processes)
    usages = [tokens.usage(process.tenant) for process in processes]
    assert all(usage.co_run_ns > 0 for usage in usages)
    assert all(usage.progress_milli > usage.held_milli for usage in usages), "both fill the other's gaps"
    time = tokens.gpu_time(GPU)
    assert time is not None
    assert time.gap_ns > 0, "0.4 of the time none of them has work in flight"
    assert time.held_ns == sum(usage.held_ns for usage in usages)


@pytest.mark.parametrize("tokens", [Sharing.EXCLUSIVE], indirect=True)
async def test_with_exclusive_turns_no_two_tenants_hold(tokens: Tokens, clock: Clock) -> None:
    processes = begin(tokens, {"a": protocol.VERSION_MAX, "b": protocol.VERSION_MAX})
    assert together_ms(tokens, clock, processes, 2000) == 0
    assert all(process.concurrent == {False} for process in processes)


async def test_hooks_are_notified_while_others_hold_their_gpu_too(tokens: Tokens, clock: Clock) -> None:
    shown: dict[str, list[bool]] = {"": []}
    processes = begin(tokens, {"a": protocol.VERSION_MAX, "b": protocol.VERSION_MAX}, shown)
    for _ in range(2000):
        before = all(process.grant is not None for process in processes)
        together_ms(tokens, clock, processes, 1)
        if before and all(process.grant is not None for process in processes):
            assert [shown[name][-1] for name in "ab"] == [True, True]
    tokens.remove("b")
    assert shown["a"][-1] is False
    assert len(shown["a"]) > 2


async def test_a_hook_of_version_2_takes_exclusive_turns(tokens: Tokens, clock: Clock) -> None:
    processes = begin(tokens, {"a": protocol.VERSION_MAX, "b": protocol.CONCURRENT_VERSION - 1})
    assert together_ms(tokens, clock, processes, 2000) == 0


async def test_a_tenant_that_takes_in_an_older_hook_ceases_to_run_concurrently(tokens: Tokens, clock: Clock) -> None:
    processes = begin(tokens, {"a": protocol.VERSION_MAX, "b": protocol.VERSION_MAX})
    assert together_ms(tokens, clock, processes, 2000) > 800
    tokens.set_connected("b", connected=True, concurrent=False)
    together_ms(tokens, clock, processes, 5)
    assert together_ms(tokens, clock, processes, 1000) == 0


async def test_counters_of_a_process_that_has_exited_are_not_lost_or_counted_twice(
    tokens: Tokens, clock: Clock
) -> None:
    processes = begin(tokens, {"a": protocol.VERSION_MAX, "b": protocol.VERSION_MAX})
    together_ms(tokens, clock, processes, 1500)
    tokens.connection_lost("b", processes[1])
    heir = EagerProcess(tokens, "b")
    tokens.want("b", heir)
    together_ms(tokens, clock, [processes[0], heir], 500)
    assert together_ms(tokens, clock, [processes[0], heir], 1000) > 700


async def test_launches_count_to_the_span_in_which_they_were_made(tokens: Tokens, clock: Clock) -> None:
    """A span of time ends when a process drains or the accounts are read. At each end all launches so far must be
    counted.
    """
    processes = begin(tokens, {"a": protocol.VERSION_MAX, "b": protocol.VERSION_MAX})
    for _ in range(1000):
        for process in processes:
            clock.now += MS // 2
            process.step(clock.now)
            tokens.gpu_time(GPU)
            assert tokens._scheduler._tenants[process.tenant].progress.launches == process.launches
        tokens.set_open(None)  # this call makes the scheduler carry out all due actions
