"""Findings about a tenant from readings of the driver: they begin after a delay, are reported once, and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepod.agent.devices.inventory import Process, Reading
from sharepod.agent.findings.attribution import attribute
from sharepod.agent.findings.beyond_turns import LENGTHS, Beyond
from sharepod.agent.findings.rules import FindingRules, FindingThresholds
from sharepod.agent.findings.sliding import SlidingRate
from sharepod.agent.findings.utilization import UtilizationMeter
from sharepod.agent.shares.memory_ledger import DeniedAllocation
from sharepod.api.gpunode import FindingReason
from unit.agent.client import GPU0, GPU1

MI = 1 << 20


def beyond(seconds: float) -> Beyond:
    return (seconds,) * len(LENGTHS)


def reasons(watch: FindingRules) -> list[str]:
    return [finding.reason for finding in watch.findings]


@pytest.mark.promise("node-unhooked", "security-unhooked")
def test_a_process_without_the_hook_is_reported_once_it_has_stayed_and_until_it_goes() -> None:
    watch = FindingRules(FindingThresholds(unhooked_after_s=3))
    for now in (0, 1, 2):
        watch.observe_unhooked(now, {7})
        assert not watch.findings
    watch.observe_unhooked(3, {7, 8})
    assert reasons(watch) == ["ProcessWithoutHook"]
    assert "process 7 " in watch.findings[0].message
    before = watch.findings
    watch.observe_unhooked(9, {7, 8})
    assert watch.findings == before, "an unchanged finding keeps its message"
    assert watch.unhooked == {7, 8}
    watch.observe_unhooked(10, {9})
    assert not watch.findings, "another process starts from zero"


def test_processes_that_connect_in_time_are_never_reported() -> None:
    watch = FindingRules(FindingThresholds(unhooked_after_s=3))
    for now in range(100):
        watch.observe_unhooked(now, {now // 3})
        assert not watch.findings


def test_a_driver_that_reports_no_processes_is_named_while_it_reports_none() -> None:
    watch = FindingRules(FindingThresholds())
    watch.observe_unread({GPU0})
    assert reasons(watch) == ["ProcessesNotTold"]
    assert GPU0 in watch.findings[0].message
    watch.observe_unread(set())
    assert not watch.findings


@pytest.mark.promise("node-memory-refused")
def test_a_refused_allocation_is_reported_with_its_figures_until_a_minute_has_passed() -> None:
    watch = FindingRules(FindingThresholds())
    watch.observe_refusals(0, {})
    assert not watch.findings
    watch.observe_refusals(1, {GPU0: (2, DeniedAllocation(asked=2048 * MI - 1, used=3072 * MI, limit=4096 * MI))})
    assert reasons(watch) == ["MemoryRefused"]
    before = watch.findings
    assert f"asked for 2048 MiB more on {GPU0} and was refused: 3072 of its 4096 MiB" in before[0].message
    again = {GPU0: (9, DeniedAllocation(asked=MI, used=4096 * MI, limit=4096 * MI))}
    watch.observe_refusals(50, again)
    assert watch.findings == before, "a program that tries again makes one finding"
    watch.observe_refusals(110, again)
    assert watch.findings == before
    watch.observe_refusals(111, again)
    assert not watch.findings
    watch.observe_refusals(200, {GPU0: (10, DeniedAllocation(asked=MI, used=4095 * MI, limit=4096 * MI))})
    assert "4095 of its" in watch.findings[0].message


@pytest.mark.promise("node-busy-beyond-held", "security-over-time")
def test_a_tenant_busy_far_beyond_what_it_held_is_reported_after_ten_seconds() -> None:
    watch = FindingRules(FindingThresholds(busy_window_s=10, busy_tolerance=0.25))
    for now in range(10):
        watch.observe_time(
            now, {GPU0: 0.9 * now, GPU1: 0.4 * now}, 0.4 * now, {GPU0: beyond(0.5 * now), GPU1: beyond(0)}
        )
        assert not watch.findings, "less than 10 s prove nothing"
    watch.observe_time(10, {GPU0: 9.0, GPU1: 4.0}, 4.0, {GPU0: beyond(5.0), GPU1: beyond(0)})
    assert reasons(watch) == ["BusyBeyondHeld"]
    assert (
        f"kept {GPU0} busy 90% of the time, while it held 40%; 50% were outside its turns" in watch.findings[0].message
    )
    for second in range(1, 12):
        busy = {GPU0: 9.0 + 0.4 * second, GPU1: 4.0 + 0.4 * second}
        watch.observe_time(10 + second, busy, 4.0 + 0.4 * second, {GPU0: beyond(5.0), GPU1: beyond(0)})
    assert not watch.findings


@pytest.mark.parametrize(("overdue", "words"), [(0.5, "does not end with its turn"), (0.0, "bypasses the hook")])
def test_a_kernel_that_outlasts_its_turn_is_not_reported_as_a_bypass_of_the_hook(overdue: float, words: str) -> None:
    watch = FindingRules(FindingThresholds(busy_window_s=10, busy_tolerance=0.25))
    for now in range(11):
        watch.observe_time(now, {GPU0: 0.5 * now}, 0.1 * now, {GPU0: beyond(0.4 * now)}, overdue * now)
    assert reasons(watch) == ["BusyBeyondHeld"]
    assert words in watch.findings[0].message


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, len(LENGTHS) - 1)), min_size=1, max_size=60))
def test_who_is_not_busy_beyond_turns_for_one_length_of_samples_is_never_reported(
    parts: list[tuple[float, int]],
) -> None:
    watch, sums = FindingRules(FindingThresholds()), [0.0] * len(LENGTHS)
    for now, (part, index) in enumerate(parts):
        sums[index] += part
        sums[3] = 0.0
        watch.observe_time(now, {GPU0: float(now)}, 0.0, {GPU0: tuple(sums)})
        assert not watch.findings


@pytest.mark.promise("memory-driver-counts")
def test_a_lasting_gap_in_memory_is_reported_until_it_is_clearly_closed() -> None:
    watch = FindingRules(FindingThresholds(gap_tolerance=512 * MI, gap_after_s=3))
    watch.observe_memory(0, {GPU0: 600 * MI, GPU1: 0})
    watch.observe_memory(2, {GPU0: 0, GPU1: 0})
    watch.observe_memory(3, {GPU0: 600 * MI, GPU1: 0})
    assert not watch.findings, "a gap that closes between two readings is a reading's"
    watch.observe_memory(6, {GPU0: 700 * MI, GPU1: 0})
    assert reasons(watch) == ["MemoryBeyondTracked"]
    assert f"700 MiB of its processes on {GPU0}" in watch.findings[0].message
    watch.observe_memory(7, {GPU0: 500 * MI, GPU1: 0})
    assert watch.findings, "no flutter around the tolerance"
    watch.observe_memory(8, {GPU0: 300 * MI, GPU1: 0})
    assert not watch.findings


@pytest.mark.promise("node-overtaken")
def test_three_overtakings_within_a_minute_are_reported_and_forgotten_after_it() -> None:
    watch = FindingRules(FindingThresholds())
    watch.observe_preemptions(0, 17)
    assert not watch.findings, "events from before the watch are not reported"
    watch.observe_preemptions(10, 18)
    watch.observe_preemptions(20, 19)
    assert not watch.findings
    watch.observe_preemptions(30, 20)
    assert reasons(watch) == ["Overtaken"]
    watch.observe_preemptions(91, 20)
    assert not watch.findings


@pytest.mark.promise("node-finding-restart")
def test_what_an_earlier_agent_found_out_stands_until_this_one_has_looked_for_as_long() -> None:
    before = FindingRules(FindingThresholds(unhooked_after_s=0, gap_after_s=0))
    before.observe_unhooked(0, {7})
    before.observe_memory(0, {GPU0: 1 << 40})
    after = FindingRules(FindingThresholds(unhooked_after_s=3, gap_after_s=3), before.findings)
    for now in (100, 101, 102, 103, 104):
        after.observe_unhooked(now, {7})
        after.observe_memory(now, {GPU0: 0})
        assert after.findings[0] == before.findings[0], "in the same words, without a break"
        assert (len(after.findings) == 2) is (now <= 103), "of memory nothing is to be seen any more"
    after.observe_unhooked(105, set())
    assert not after.findings
    restarted = FindingRules(FindingThresholds(unhooked_after_s=3), before.findings[:1])
    restarted.observe_unhooked(100, set())
    assert not restarted.findings, "where there is no such process nothing has to be waited for"


def test_the_gravest_finding_comes_first() -> None:
    watch = FindingRules(FindingThresholds(unhooked_after_s=0, gap_after_s=0))
    watch.observe_unread({GPU0})
    watch.observe_memory(0, {GPU0: 1 << 40})
    watch.observe_unhooked(0, {1})
    assert reasons(watch) == ["ProcessWithoutHook", "MemoryBeyondTracked", "ProcessesNotTold"]
    assert watch.stands(FindingReason.PROCESSES_NOT_TOLD)


@given(st.lists(st.floats(0.1, 3), min_size=2, max_size=40), st.floats(0, 1))
def test_a_window_says_the_rate_of_about_its_length(steps: list[float], rate: float) -> None:
    window, now = SlidingRate(10), 0.0
    for step in steps:
        window.add(now, now * rate)
        now += step
    assert window.rate == pytest.approx(rate, abs=1e-6)
    assert window.span <= 10 + 3


def process(pid: int, busy: float | None = None, uuid: str = GPU0, memory: int = MI) -> Process:
    return Process(pid, uuid, memory, busy)


OWNERS = {1: "a", 2: "a", 3: "b"}


def seen(*processes: Process, whole: float | None = None) -> Reading:
    return Reading((), processes, utilization={} if whole is None else {GPU0: whole})


def test_processes_are_their_tenants_and_what_is_nobodys_is_foreign() -> None:
    attribution = attribute(
        seen(process(1), process(2), process(3, uuid=GPU1), process(9)), lambda each: OWNERS.get(each.pid)
    )
    assert attribution.of("a").memory == {GPU0: {1: MI, 2: MI}}
    assert attribution.of("b").pids == {3}
    assert attribution.foreign == {GPU0: (9,)}
    assert not attribution.of("unknown").pids


def test_a_single_tenant_of_a_gpu_is_as_busy_as_the_gpu() -> None:
    assert attribute(seen(process(1), process(2), whole=0.7), lambda each: OWNERS.get(each.pid)).of(
        "a"
    ).utilization == {GPU0: 0.7}


def test_what_others_did_before_they_ended_is_not_put_down_to_who_is_alone_now() -> None:
    alone = attribute(seen(process(1, 0.0), process(2, 0.1), whole=0.9), lambda each: OWNERS.get(each.pid))
    assert alone.of("a").utilization == {GPU0: pytest.approx(0.1)}
    assert attribute(seen(process(3, 1.0), whole=0.6), lambda each: OWNERS.get(each.pid)).of("b").utilization == {
        GPU0: 0.6
    }, "a GPU is as busy as its processes are at least"


def test_who_shares_a_gpu_is_as_busy_as_the_driver_says_of_its_processes_or_nobody_knows() -> None:
    attribution = attribute(
        seen(process(1, 0.3), process(2, 0.2), process(3), whole=0.7), lambda each: OWNERS.get(each.pid)
    )
    assert attribution.of("a").utilization == {GPU0: 0.5}
    assert attribution.of("b").utilization == {}


def test_busy_time_is_summed_over_readings_and_forgotten_with_its_owner() -> None:
    clock = UtilizationMeter()
    for now in range(11):
        clock.observe(now, {("a", GPU0): 0.5, ("", GPU0): 0.75})
    assert clock.seconds(("a", GPU0)) == pytest.approx(5.0)
    assert clock.ratio(("", GPU0)) == pytest.approx(0.75)
    clock.observe(11, {("", GPU0): 0.0}, kept=[("a", GPU0)])
    assert clock.seconds(("a", GPU0)) == pytest.approx(5.0), "nothing is assumed about a tenant without figures"
    assert clock.ratio(("a", GPU0)) is None
    clock.observe(12, {("", GPU0): 0.0})
    assert clock.seconds(("a", GPU0)) is None


def test_a_long_silence_of_the_driver_does_not_count_as_busy_time() -> None:
    clock = UtilizationMeter()
    clock.observe(0, {("a", GPU0): 1.0})
    clock.observe(1000, {("a", GPU0): 1.0})
    assert (clock.seconds(("a", GPU0)) or 0) <= 15


@pytest.mark.promise("node-memory-beyond-limit", "security-over-memory")
def test_a_tenant_over_its_memory_limit_is_reported_once_that_has_lasted_and_until_it_is_within() -> None:
    watch = FindingRules(FindingThresholds(gap_after_s=3))
    for now in (0, 1, 2):
        watch.observe_limit(now, {GPU0: 5 * MI})
        assert not watch.findings
    watch.observe_limit(3, {GPU0: 5 * MI, GPU1: 900 * MI})
    assert reasons(watch) == ["MemoryBeyondLimit"]
    assert f"5 MiB more on {GPU0}" in watch.findings[0].message
    watch.observe_limit(4, {})
    assert not watch.findings
