"""The token scheduler on the event loop, without sockets, on a clock that only the test advances."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from sharepod import protocol
from sharepod.agent.shares.tokens import Tokens
from sharepod.timeshare import Parameters
from unit.agent.client import until

MS = 1_000_000
GPU = "GPU-0"


class Clock:
    """Clock in nanoseconds, which a test advances."""

    def __init__(self) -> None:
        self.now = 1

    def __call__(self) -> int:
        return self.now


class Process:
    """Client that stores the frames that it is sent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.version = protocol.VERSION_MAX
        self.frames: list[protocol.AgentFrame] = []
        self.heartbeat: protocol.Heartbeat | None = None
        self.pulse = protocol.Pulse(0, 0, 0)

    def send(self, frame: protocol.AgentFrame) -> None:
        self.frames.append(frame)

    def beats(self, clock: Clock, *, ends_in_ns: int | None = 0, waits: bool = False) -> None:
        """Write the pulse page, as a hook does whenever it runs. The process's clock is an hour ahead. `waits`: True if
        the process reports that it waits, as after it was barred."""
        if self.heartbeat is None:
            self.heartbeat = protocol.Heartbeat(lambda: self.pulse)
        ahead = clock.now + 3600 * 1000 * MS
        grants = [] if waits else self.grants()
        self.pulse = protocol.Pulse(grants[-1] if grants else 0, 0 if ends_in_ns is None else ahead + ends_in_ns, ahead)

    def grants(self) -> list[int]:
        """Return the ids of the grants that were sent to it. A renewal repeats an id."""
        return [frame.grant_id for frame in self.frames if isinstance(frame, protocol.Grant)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(clock: Clock) -> Iterator[Tokens]:
    tokens = Tokens(Parameters(), clock)
    yield tokens
    tokens.close()


def add(tokens: Tokens, *names: str, limit_milli: int = 1000, barred: list[int] | None = None) -> None:
    bars: list[int] = [] if barred is None else barred
    for name in names:
        tokens.set_tenant(
            name,
            (GPU,),
            request_milli=min(400, limit_milli),
            limit_milli=limit_milli,
            contended=lambda _: None,
            bar=bars.append,
        )


async def test_processes_of_a_tenant_are_reported_in_the_order_of_their_arrival(tokens: Tokens) -> None:
    order: list[int] = []

    class Numbered(Process):
        def __hash__(self) -> int:
            return self.pid

        def __eq__(self, other: object) -> bool:
            return self is other

        def send(self, frame: protocol.AgentFrame) -> None:
            order.append(self.pid)

    add(tokens, "a", "b")
    holder = Process(9)
    tokens.want("b", holder)
    for pid in (3, 1, 2):
        tokens.want("a", Numbered(pid))
    [held] = holder.grants()[:1]
    tokens.drained("b", holder, protocol.Drained(held, wanting=False))
    assert order == [3, 1, 2]


async def test_a_failure_for_one_tenant_affects_no_other(tokens: Tokens, clock: Clock) -> None:
    class Broken(Process):
        def send(self, frame: protocol.AgentFrame) -> None:
            raise RuntimeError("no frame can be made of it")

    for name, gpu in (("a", "GPU-0"), ("b", "GPU-1"), ("heir", "GPU-0")):
        tokens.set_tenant(
            name, (gpu,), request_milli=500, limit_milli=1000, contended=lambda _: None, bar=lambda _: None
        )
    tokens.set_open(frozenset())
    broken, sound = Broken(1), Process(2)
    tokens.want("a", broken)
    tokens.want("b", sound)
    tokens.set_open(None)  # both processes get their grants in one turn
    assert len(sound.grants()) == 1
    # The grant that could not be sent to `a` ends by preemption, as if it were never drained.
    heir = Process(3)
    tokens.want("heir", heir)
    for _ in range(200):
        clock.now += 10 * MS
        tokens.set_open(None)
    assert len(heir.grants()) == 1


async def test_drained_of_an_earlier_grant_does_not_end_the_present_one(tokens: Tokens, clock: Clock) -> None:
    add(tokens, "a", "b")
    one, other = Process(1), Process(2)
    tokens.want("a", one)
    [first] = one.grants()
    clock.now += MS
    tokens.drained("a", one, protocol.Drained(first))
    tokens.want("a", one)
    second = one.grants()[-1]
    assert second != first
    tokens.want("b", other)
    tokens.drained("a", one, protocol.Drained(first))
    assert other.grants() == [], "the frame crossed with the grant: a holds the token"
    tokens.drained("a", one, protocol.Drained(second))
    assert len(other.grants()) == 1


async def test_a_tenant_has_drained_once_all_its_processes_have(tokens: Tokens, clock: Clock) -> None:
    add(tokens, "a", "b")
    one, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("a", one)
    tokens.want("a", sibling)
    tokens.want("b", other)
    [grant] = set(one.grants())
    clock.now += MS
    tokens.drained("a", one, protocol.Drained(grant))
    assert other.grants() == []
    tokens.connection_lost("a", sibling, alive=True)
    assert other.grants() == [], "its work may be on the GPU still"
    tokens.exited("a", sibling.pid)
    assert len(other.grants()) == 1


async def test_the_next_tenant_is_granted_once_every_process_has_announced_its_last_work(
    tokens: Tokens, clock: Clock
) -> None:
    add(tokens, "a", "b")
    one, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("a", one)
    tokens.want("a", sibling)
    tokens.want("b", other)
    [grant] = set(one.grants())
    clock.now += 50 * MS
    tokens.draining("a", one, protocol.Draining(grant, expected_ns=0))
    assert other.grants() == [], "the sibling may launch still"
    tokens.draining("a", sibling, protocol.Draining(grant, expected_ns=0))
    assert len(other.grants()) == 1


@pytest.mark.promise("time-one-token")
async def test_a_process_that_drains_and_wants_more_joins_the_grant_without_end_of_its_sibling(
    tokens: Tokens, clock: Clock
) -> None:
    """The process was idle, and one of its threads launched while its gate closed. The sibling still holds the grant,
    so the process joins it again.
    """
    add(tokens, "a")
    one, sibling = Process(1), Process(2)
    tokens.want("a", one)
    tokens.want("a", sibling)
    [grant] = one.grants()
    clock.now += MS
    tokens.drained("a", one, protocol.Drained(grant, wanting=True))
    assert one.grants() == [grant, grant], "the sibling may wait for it, and never drain"
    tokens.drained("a", sibling, protocol.Drained(grant))
    assert tokens.usage("a").grants == 1, "it holds"


@pytest.mark.promise("time-one-token")
async def test_a_process_that_drains_and_wants_more_joins_its_siblings_grant_when_that_is_renewed(
    tokens: Tokens, clock: Clock
) -> None:
    add(tokens, "a", "b")
    one, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("b", other)
    tokens.drained("b", other, protocol.Drained(other.grants()[0]))
    tokens.want("a", one)
    tokens.want("a", sibling)
    [grant] = one.grants()
    clock.now += 50 * MS
    tokens.drained("a", one, protocol.Drained(grant, wanting=True))
    assert one.grants() == [grant], "the rest of the quantum may be too short for it"
    clock.now += 48 * MS
    tokens.set_connected("b", connected=True)
    assert sibling.grants() == [grant, grant]
    assert one.grants() == [grant, grant]


@pytest.mark.promise("time-one-token")
async def test_a_process_that_asks_again_after_an_earlier_grant_joins_its_siblings_present_one(
    tokens: Tokens, clock: Clock
) -> None:
    """The unfinished work of the preempted process waits for its next launches. Its sibling holds a later grant, which
    the process must join."""
    add(tokens, "a", "b")
    one, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("a", one)
    [first] = one.grants()
    tokens.want("b", other)
    for late in (0, 20 * MS, Parameters().grace_ns):
        clock.now = 1 + Parameters().quantum_max_ns + late
        tokens.set_connected("b", connected=True)  # this call makes the scheduler carry out all due actions
    [second] = other.grants()
    tokens.want("a", sibling)
    clock.now += 10 * MS
    tokens.drained("b", other, protocol.Drained(second))
    [third] = sibling.grants()
    tokens.want("a", one)
    assert one.grants()[-1] == third > first


async def test_a_renewal_is_not_sent_to_a_process_that_has_not_drained_an_earlier_grant(
    tokens: Tokens, clock: Clock
) -> None:
    """The process would ignore the renewal of another grant, and the agent its frames about the earlier one."""
    stopped, waiter, _ = await holder_and_waiter(tokens, clock)
    sibling = Process(3)
    sibling.beats(clock)
    clock.now += 6 * MS
    await looks(tokens)
    [first] = waiter.grants()
    tokens.want("a", sibling)
    tokens.drained("b", waiter, protocol.Drained(first))
    [second] = sibling.grants()
    clock.now += 98 * MS
    sibling.beats(clock)
    tokens.set_connected("b", connected=True)
    assert sibling.grants() == [second, second], "it is renewed"
    tokens.drained("a", stopped, protocol.Drained(stopped.grants()[0], wanting=True))
    tokens.want("b", waiter)
    tokens.drained("a", sibling, protocol.Drained(second, wanting=True))
    assert waiter.grants()[-1] > second, "nothing of a is left on the GPU"


async def test_an_announced_end_brings_the_timer_forward_and_the_next_turn_leaves_it(
    tokens: Tokens, clock: Clock
) -> None:
    add(tokens, "a", "b")
    one, other = Process(1), Process(2)
    tokens.want("a", one)
    tokens.want("b", other)
    before = tokens._deadline._timer_at
    tokens.draining("a", one, protocol.Draining(one.grants()[0], expected_ns=5 * MS))
    announced = tokens._deadline._timer_at
    assert announced == tokens._due
    assert announced < before
    tokens.drained("a", one, protocol.Drained(one.grants()[0], wanting=True))
    assert tokens._due is not None
    assert tokens._deadline._timer_at == announced < tokens._due, "it is set again when it fires"


async def preempt(tokens: Tokens, clock: Clock, processes: Sequence[Process], heir: Process) -> int:
    """Let tenant `a` be preempted while all its processes hold, because `heir`, a process of tenant `b`, waits. Return
    the id of the grant of `a`.
    """
    add(tokens, "a", "b")
    other = Process(99)
    tokens.want("b", other)
    for process in processes:
        tokens.want("a", process)
    tokens.drained("b", other, protocol.Drained(other.grants()[0]))
    tokens.want("b", heir)
    for pause_ns in (Parameters().quantum_max_ns, 20 * MS, Parameters().grace_ns - 20 * MS):
        clock.now += pause_ns
        tokens.set_connected("b", connected=True)
    assert heir.grants()
    return processes[0].grants()[0]


async def test_a_process_that_drains_after_its_tenant_was_preempted_waits_for_the_next_turn(
    tokens: Tokens, clock: Clock
) -> None:
    first, hangs, heir = Process(1), Process(2), Process(3)
    held = await preempt(tokens, clock, [first, hangs], heir)
    tokens.drained("a", first, protocol.Drained(held, wanting=True))
    tokens.drained("b", heir, protocol.Drained(heir.grants()[-1]))
    assert len(set(first.grants())) == 2


async def test_a_preempted_tenant_stops_waiting_once_its_process_that_wanted_a_turn_exits(
    tokens: Tokens, clock: Clock
) -> None:
    first, hangs, heir = Process(1), Process(2), Process(3)
    await preempt(tokens, clock, [first, hangs], heir)
    tokens.want("a", first)
    tokens.connection_lost("a", first)
    tokens.drained("b", heir, protocol.Drained(heir.grants()[-1]))
    assert tokens.usage("a").grants == 1


async def test_announced_last_work_hands_nothing_off_while_a_sibling_is_disconnected(
    tokens: Tokens, clock: Clock
) -> None:
    add(tokens, "a", "b")
    one, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("a", one)
    tokens.want("a", sibling)
    tokens.want("b", other)
    [grant] = set(one.grants())
    tokens.connection_lost("a", sibling, alive=True)
    clock.now += 50 * MS
    tokens.draining("a", one, protocol.Draining(grant, expected_ns=0))
    assert other.grants() == [], "the end of the sibling's work is unknown"
    tokens.exited("a", sibling.pid)
    tokens.drained("a", one, protocol.Drained(grant))
    assert len(other.grants()) == 1


async def test_a_preempted_tenant_waits_no_longer_for_its_disconnected_processes(tokens: Tokens, clock: Clock) -> None:
    add(tokens, "a", "b")
    lost, sibling, other = Process(1), Process(2), Process(3)
    tokens.want("a", lost)
    tokens.want("b", other)
    tokens.connection_lost("a", lost, alive=True)
    for pause_ns in (Parameters().quantum_max_ns, 20 * MS, Parameters().grace_ns - 20 * MS):
        clock.now += pause_ns
        tokens.set_connected("b", connected=True)
    [first] = other.grants()
    tokens.want("a", sibling)
    tokens.drained("b", other, protocol.Drained(first))
    [again] = sibling.grants()
    tokens.want("b", other)
    tokens.drained("a", sibling, protocol.Drained(again))
    assert other.grants()[-1] != first, "every process that received a's second grant has drained"


async def test_a_lowered_limit_bounds_the_turn_of_the_holder_at_once(tokens: Tokens) -> None:
    add(tokens, "a")
    one = Process(1)
    tokens.want("a", one)
    [unlimited] = one.frames
    assert isinstance(unlimited, protocol.Grant)
    assert unlimited.quantum_ns == 0
    add(tokens, "a", limit_milli=500)
    bounded = one.frames[-1]
    assert isinstance(bounded, protocol.Grant)
    assert bounded.grant_id == unlimited.grant_id
    assert 0 < bounded.quantum_ns <= Parameters().quantum_max_ns


async def test_a_raised_limit_grants_to_a_tenant_that_waits_at_once(tokens: Tokens) -> None:
    add(tokens, "a", limit_milli=0)
    one = Process(1)
    tokens.want("a", one)
    assert one.grants() == [], "its limit leaves it no time"
    add(tokens, "a", limit_milli=1000)
    assert len(one.grants()) == 1


async def test_a_timer_that_comes_early_comes_again(clock: Clock) -> None:
    tokens = Tokens(Parameters(quantum_max_ns=10 * MS, grace_ns=5 * MS), clock)
    add(tokens, "a", "b")
    one, other = Process(1), Process(2)
    tokens.want("a", one)
    tokens.want("b", other)
    await asyncio.sleep(0.03)
    assert other.grants() == [], "by the tokens' clock no time has passed"

    def granted() -> bool:
        clock.now += MS
        return bool(other.grants())

    await until(granted)
    tokens.close()


@pytest.mark.promise("time-stall")
async def test_an_agent_that_was_stopped_charges_no_tenant_for_it(tokens: Tokens, clock: Clock) -> None:
    add(tokens, "a", "b")
    one, other = Process(1), Process(2)
    tokens.want("a", one)
    tokens.want("b", other)
    clock.now += 10_000 * MS
    tokens.drained("a", one, protocol.Drained(one.grants()[0], wanting=True))
    assert tokens.usage("a").held_ns == Parameters().quantum_max_ns, "its hook closed the gate by its own clock"
    assert tokens.usage("a").preemptions == 0
    assert len(other.grants()) == 1
    clock.now += 50 * MS
    time = tokens.gpu_time("GPU-0")
    assert time is not None
    assert time.held_ns == Parameters().quantum_max_ns + 50 * MS
    assert time.stalled_ns == 10_000 * MS - Parameters().quantum_max_ns
    assert tokens.gpu_time("GPU-1") is None


# ---- processes without processor time


async def looks(tokens: Tokens) -> None:
    """Wait until the event loop has run the next check of the heartbeats, at the clock's present moment."""
    before = tokens._looks._timer
    await until(lambda: tokens._looks._timer is not before)


async def holder_and_waiter(
    tokens: Tokens, clock: Clock, *, ends_in_ns: int | None = 0
) -> tuple[Process, Process, list[int]]:
    """Return a process of `a` that holds, a process of `b` that waits, and the ids of barred grants. The holder's
    launched work ends `ends_in_ns` after its last heartbeat."""
    barred: list[int] = []
    add(tokens, "a", "b", barred=barred)
    for name in ("a", "b"):
        tokens.set_connected(name, connected=True)
    holder, waiter = Process(1), Process(2)
    holder.beats(clock)
    waiter.beats(clock)
    tokens.want("a", holder)
    tokens.want("b", waiter)
    clock.now += MS
    holder.beats(clock, ends_in_ns=ends_in_ns)
    return holder, waiter, barred


@pytest.mark.promise("time-starved")
async def test_a_holder_without_processor_time_is_barred_and_passes_the_gpu_on_when_its_work_ends(
    tokens: Tokens, clock: Clock
) -> None:
    holder, waiter, barred = await holder_and_waiter(tokens, clock, ends_in_ns=20 * MS)
    clock.now += 4 * MS
    await looks(tokens)
    assert barred == [], "a busy machine may do that to a thread"
    clock.now += 2 * MS
    await looks(tokens)
    assert barred == [], "it may come back and go on: its work runs still"
    held = tokens.usage("a").held_ns
    clock.now += 12 * MS
    await looks(tokens)
    assert set(barred) == {holder.grants()[0]}, "each look bars it again"
    assert waiter.grants() == []
    clock.now += 3 * MS
    await until(lambda: len(waiter.grants()) == 1)
    assert tokens.usage("a").held_ns - held <= 20 * MS
    clock.now += 30 * MS
    assert tokens.usage("b").held_ns == 30 * MS
    assert tokens.usage("a").held_ns - held <= 20 * MS, "it is charged what its work takes"
    assert tokens.usage("a").suspensions == 1
    assert tokens.usage("a").preemptions == 0


async def test_a_holder_that_has_not_taken_note_of_its_grant_passes_the_gpu_on(tokens: Tokens, clock: Clock) -> None:
    barred: list[int] = []
    add(tokens, "a", "b", barred=barred)
    tokens.set_connected("b", connected=True)
    holder, waiter = Process(1), Process(2)
    holder.beats(clock)
    waiter.beats(clock)
    tokens.want("a", holder)
    tokens.want("b", waiter)
    clock.now += 6 * MS
    await looks(tokens)
    assert set(barred) == {holder.grants()[0]}, "each look bars it again"
    assert len(waiter.grants()) == 1


@pytest.mark.promise("time-starved")
async def test_a_tenant_that_is_stopped_again_and_again_is_found_sooner(tokens: Tokens, clock: Clock) -> None:
    """After three stops the tenant is found silent 1 ms after its grant, before any heartbeat under that grant."""
    stopped, busy, barred = await holder_and_waiter(tokens, clock)
    for _ in range(3):
        clock.now += 6 * MS
        await looks(tokens)
        [grant] = set(barred[-1:])
        clock.now += 10 * MS
        tokens.draining("a", stopped, protocol.Draining(grant, expected_ns=0))
        clock.now += MS
        tokens.drained("a", stopped, protocol.Drained(grant, wanting=True))
        stopped.beats(clock)
        busy.beats(clock)
        await looks(tokens)
        tokens.drained("b", busy, protocol.Drained(busy.grants()[-1], wanting=True))
        assert stopped.grants()[-1] > grant
    assert tokens._looks._at == clock.now + MS
    clock.now += MS
    await looks(tokens)
    assert barred[-1] == stopped.grants()[-1]


@pytest.mark.promise("time-starved")
@pytest.mark.parametrize("stands_still", [True, False])
async def test_a_tenant_that_stands_still_while_it_waits_is_passed_over_when_its_turn_comes(
    tokens: Tokens, clock: Clock, stands_still: bool
) -> None:
    """A tenant that was found silent gets its next turn only if it writes heartbeats while it waits."""
    stopped, busy, barred = await holder_and_waiter(tokens, clock)
    clock.now += 6 * MS
    await looks(tokens)
    [grant] = set(barred)
    clock.now += 10 * MS
    tokens.draining("a", stopped, protocol.Draining(grant, expected_ns=0))
    tokens.drained("a", stopped, protocol.Drained(grant, wanting=True))
    stopped.beats(clock, waits=True)
    if not stands_still:
        clock.now += 4 * MS
        stopped.beats(clock, waits=True)
    busy.beats(clock)
    clock.now += 4 * MS if stands_still else 0
    tokens.drained("b", busy, protocol.Drained(busy.grants()[-1], wanting=True))
    turns = len(busy.grants())
    await looks(tokens)
    if stands_still:
        assert barred[-1] == stopped.grants()[-1] > grant
        assert len(busy.grants()) == turns + 1
    else:
        assert barred[-1] == grant
        assert len(busy.grants()) == turns


@pytest.mark.promise("time-starved")
async def test_a_tenant_that_plays_dead_with_endless_work_keeps_no_other_from_being_found(
    tokens: Tokens, clock: Clock
) -> None:
    """Tenant `a` is silent and has reported work for an hour, which may be false. Its watch must not delay that of
    tenant `c` on another GPU."""
    _, _, barred = await holder_and_waiter(tokens, clock, ends_in_ns=3600 * 1000 * MS)
    clock.now += 6 * MS
    await looks(tokens)
    assert barred == []
    for name in ("c", "d"):
        tokens.set_tenant(
            name, ("GPU-1",), request_milli=400, limit_milli=1000, contended=lambda _: None, bar=barred.append
        )
        tokens.set_connected(name, connected=True)
    stopped, waiter = Process(3), Process(4)
    stopped.beats(clock)
    waiter.beats(clock)
    tokens.want("c", stopped)
    tokens.want("d", waiter)
    clock.now += 6 * MS
    await looks(tokens)
    assert set(barred) == {stopped.grants()[0]}
    assert len(waiter.grants()) == 1


@pytest.mark.parametrize("case", ["gives signs", "end unknown", "old hook", "sibling runs", "sibling disconnected"])
async def test_a_holder_that_may_run_is_not_barred(tokens: Tokens, clock: Clock, case: str) -> None:
    holder, waiter, barred = await holder_and_waiter(tokens, clock, ends_in_ns=None if case == "end unknown" else 0)
    sibling = Process(3)
    if case.startswith("sibling"):
        sibling.beats(clock)
        tokens.want("a", sibling)
        assert set(sibling.grants()) == set(holder.grants())
    if case == "sibling disconnected":
        tokens.connection_lost("a", sibling, alive=True)
    if case == "old hook":
        holder.heartbeat = None
    for _ in range(5):
        clock.now += 6 * MS
        if case == "gives signs":
            holder.beats(clock)
        elif case == "sibling runs":
            sibling.beats(clock)
        await looks(tokens)
    assert barred == []
    assert waiter.grants() == []


async def test_no_tenant_is_barred_while_no_tenant_waits(tokens: Tokens, clock: Clock) -> None:
    barred: list[int] = []
    add(tokens, "a", limit_milli=500, barred=barred)
    holder = Process(1)
    holder.beats(clock)
    tokens.want("a", holder)
    for _ in range(3):
        clock.now += 6 * MS
        tokens.set_connected("a", connected=True)
        await asyncio.sleep(0.01)
    assert barred == []


async def test_a_suspended_tenant_owes_from_the_moment_at_which_it_runs_again_until_it_has_drained(
    tokens: Tokens, clock: Clock
) -> None:
    holder, waiter, _ = await holder_and_waiter(tokens, clock)
    clock.now += 6 * MS
    await looks(tokens)
    [grant] = set(holder.grants())
    assert len(waiter.grants()) == 1
    clock.now += 10 * MS
    tokens.draining("a", holder, protocol.Draining(grant, expected_ns=0))
    assert tokens.usage("a").overdue_ns == 0
    clock.now += 3 * MS
    tokens.drained("a", holder, protocol.Drained(grant, wanting=True))
    assert tokens.usage("a").overdue_ns == 3 * MS
    assert tokens.usage("b").held_ns == 13 * MS
    tokens.drained("b", waiter, protocol.Drained(waiter.grants()[0]))
    assert len(set(holder.grants())) == 2, "it has its next turn"


async def test_a_process_that_stands_still_costs_its_siblings_a_moment_of_each_turn(
    tokens: Tokens, clock: Clock
) -> None:
    stopped, waiter, barred = await holder_and_waiter(tokens, clock)
    sibling = Process(3)
    sibling.beats(clock)
    clock.now += 6 * MS
    await looks(tokens)
    [first] = waiter.grants()
    tokens.want("a", sibling)
    tokens.drained("b", waiter, protocol.Drained(first))
    [second] = sibling.grants()
    assert barred[-1] < second, "its gate opens"
    clock.now += 20 * MS
    tokens.want("b", waiter)
    sibling.beats(clock)
    tokens.drained("a", sibling, protocol.Drained(second, wanting=True))
    assert waiter.grants()[-1] > second, "all that ran has drained, and the rest has no processor time"
    assert barred[-1] == second
    tokens.drained("a", stopped, protocol.Drained(stopped.grants()[-1]))
    assert set(sibling.grants()) == {second}, "it is b's turn"


async def test_an_agent_that_was_stopped_reads_again_before_it_judges(tokens: Tokens, clock: Clock) -> None:
    _, _, barred = await holder_and_waiter(tokens, clock)
    clock.now += 60 * MS
    await looks(tokens)
    assert barred == []
    clock.now += 6 * MS
    await looks(tokens)
    assert len(barred) == 1


@pytest.mark.promise("node-held-lost")
async def test_a_tenant_of_a_closed_gpu_loses_the_token_at_once_and_gets_none(tokens: Tokens, clock: Clock) -> None:
    barred: list[int] = []
    add(tokens, "a", barred=barred)
    tokens.set_open(frozenset({GPU}))
    one, other = Process(1), Process(2)
    tokens.want("a", one)
    (first,) = one.grants()
    tokens.set_open(frozenset())
    assert barred == [first]
    assert one.frames[-1] == protocol.Revoke(first)
    tokens.want("a", other)
    clock.now += 500 * MS
    tokens.drained("a", one, protocol.Drained(first, wanting=True))
    clock.now += 500 * MS
    await until(lambda: True)
    assert (one.grants(), other.grants()) == ([first], [])
    tokens.set_open(frozenset({GPU}))
    assert len(one.grants()) == 2
    assert len(other.grants()) == 1


async def test_no_process_joins_a_grant_that_was_taken_when_a_gpu_was_closed(tokens: Tokens) -> None:
    """The gate of the revoked grant is barred, so a process that joined the grant would return the token at once, again
    and again.
    """
    add(tokens, "a")
    one, sibling, late = Process(1), Process(2), Process(3)
    tokens.want("a", one)
    tokens.want("a", sibling)
    [first] = one.grants()
    tokens.set_open(frozenset())
    tokens.set_open(frozenset({GPU}))
    tokens.want("a", late)
    tokens.drained("a", one, protocol.Drained(first, wanting=True))
    assert (one.grants(), late.grants()) == ([first], [])
    tokens.drained("a", sibling, protocol.Drained(first))
    assert (len(one.grants()), len(late.grants())) == (2, 1)


async def test_a_tenant_that_comes_to_a_closed_gpu_gets_no_token(tokens: Tokens) -> None:
    tokens.set_open(frozenset())
    add(tokens, "a")
    one = Process(1)
    tokens.want("a", one)
    assert one.grants() == []
    tokens.set_open(None)
    assert len(one.grants()) == 1


async def test_a_grant_that_a_closed_gpu_has_ended_is_not_given_on_new_terms(tokens: Tokens) -> None:
    add(tokens, "a", "b")
    one = Process(1)
    tokens.want("a", one)
    tokens.set_open(frozenset())
    frames = list(one.frames)
    tokens.set_connected("b", connected=True)
    assert one.frames == frames


async def test_a_closed_gpu_closes_only_its_own_tenants(tokens: Tokens) -> None:
    add(tokens, "a")
    tokens.set_tenant(
        "b", (GPU, "GPU-1"), request_milli=100, limit_milli=1000, contended=lambda _: None, bar=lambda _: None
    )
    tokens.set_open(frozenset({GPU}))
    one, other = Process(1), Process(2)
    tokens.want("b", other)
    tokens.want("a", one)
    assert len(one.grants()) == 1
    assert other.grants() == []
    tokens.connection_lost("b", other)
    tokens.set_open(None)
    assert other.grants() == []
