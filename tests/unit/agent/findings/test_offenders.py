"""Offenders: the process to which a finding is attributed. An idle sibling process is no offender."""

from __future__ import annotations

from sharepod.agent.findings.attribution import TenantProcesses
from sharepod.agent.findings.beyond_turns import LENGTHS
from sharepod.agent.findings.offenders import offenders
from sharepod.agent.findings.rules import FindingRules, FindingThresholds
from sharepod.api.gpunode import FindingReason
from unit.agent.client import GPU0, GPU1

MI = 1 << 20
SEEN = TenantProcesses(
    memory={GPU0: {7: MI, 8: MI}, GPU1: {9: MI}},
    busy={GPU0: {7: 0.1, 8: 0.8}},
)


def rules() -> FindingRules:
    return FindingRules(FindingThresholds(unhooked_after_s=3, busy_window_s=10, gap_after_s=3))


def busy_on(uuid: str) -> FindingRules:
    made = rules()
    for now in range(11):
        made.observe_time(now, {uuid: float(now)}, 0, {uuid: (float(now),) * len(LENGTHS)})
    return made


def test_no_process_is_blamed_before_a_finding_is_confirmed() -> None:
    made = rules()
    made.observe_unhooked(0, {7})
    made.observe_limit(0, {GPU0: MI})
    made.observe_time(0, {GPU0: 9.0}, 0, {GPU0: (9.0,) * len(LENGTHS)})
    assert offenders(made, SEEN, {GPU0: {7: MI}}) == {}


def test_processes_without_the_hook_or_with_another_hook_are_blamed() -> None:
    made = rules()
    made.observe_unhooked(0, {7})
    made.observe_unhooked(3, {7, 9})
    made.observe_replaced(3, {8: "sees another file"})
    assert offenders(made, SEEN, {}) == {7: FindingReason.PROCESS_WITHOUT_HOOK, 8: FindingReason.HOOK_REPLACED}


def test_the_busiest_on_that_gpu_is_blamed_for_time_and_all_there_where_nobody_tells() -> None:
    assert offenders(busy_on(GPU0), SEEN, {}) == {8: FindingReason.BUSY_BEYOND_HELD}
    assert offenders(busy_on(GPU1), SEEN, {}) == {9: FindingReason.BUSY_BEYOND_HELD}


def test_the_process_with_most_memory_beyond_its_credits_is_blamed() -> None:
    made = rules()
    for now in (0, 3):
        made.observe_limit(now, {GPU0: 5 * MI})
    assert offenders(made, SEEN, {GPU0: {7: 6 * MI, 8: MI}}) == {7: FindingReason.MEMORY_BEYOND_LIMIT}
    assert offenders(made, SEEN, {GPU0: {7: 0, 8: -MI}}) == {}, "a limit that was lowered below the credits"


def test_a_finding_of_an_earlier_agent_blames_no_process_until_it_is_confirmed() -> None:
    resumed = FindingRules(FindingThresholds(), busy_on(GPU0).findings)
    assert resumed.stands(FindingReason.BUSY_BEYOND_HELD)
    assert offenders(resumed, SEEN, {}) == {}


def test_after_one_is_ended_its_siblings_are_blamed_only_for_what_is_seen_from_then_on() -> None:
    made = busy_on(GPU0)
    for now in (0, 3):
        made.observe_limit(now, {GPU0: 5 * MI})
    made.begin_again()
    made.observe_time(12, {GPU0: 11.5}, 0, {GPU0: (11.5,) * len(LENGTHS)})
    made.observe_limit(12, {GPU0: 5 * MI})
    assert offenders(made, SEEN, {GPU0: {7: 6 * MI}}) == {}
