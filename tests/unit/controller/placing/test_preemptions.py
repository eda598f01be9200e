"""Preemption by the placement loop: its start, its reservations, and its end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sharepod.api.units import TenantId
from sharepod.budgets.standing import WITHOUT_BUDGET, Standing
from unit.controller.preempting_world import playing

_GIB = 1 << 30


@pytest.mark.promise("placement-preempt-keeps")
async def test_time_changes_hands_once_the_ledger_says_so_and_nobody_slips_in() -> None:
    async with playing() as world:
        await world.runs("low", 1.0, memory="1Gi")
        await world.want("high", 1.0, priority=9, memory="1Gi")
        await world.later(2)
        assert [(item.plan.lower, item.plan.evict) for item in world.begun] == [(("low",), ())]
        assert world.request_of("low") == 0
        assert "high" not in world.placed, "the ledger still promises that time to the other"
        await world.want("equal", 0.5, priority=9, memory="1Gi")
        await world.want("small", 0.1, memory="1Gi")
        await world.writes()
        assert "high" in world.placed
        assert "equal" not in world.placed
        assert "small" not in world.placed
        assert world.kept() == set()


async def test_a_share_that_was_lowered_comes_back_after_all_that_wait() -> None:
    async with playing() as world:
        await world.runs("low", 1.0, memory="1Gi")
        await world.want("high", 1.0, priority=9, memory="1Gi")
        await world.later(2)
        await world.writes()
        world.loop.want_resize("low", 1)
        await world.want("waits", 1.0, memory="1Gi")
        await world.settle()
        await world.ends("high")
        assert "waits" in world.placed
        assert world.request_of("low") == 0
        await world.ends("waits")
        assert world.request_of("low") == 1000


async def test_one_that_is_to_be_evicted_is_handed_over_once_and_its_gpu_kept_until_it_is_gone() -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="12Gi")
        await world.want("high", 0.3, priority=9, memory="12Gi")
        await world.later(2)
        assert [item.plan.evict for item in world.begun] == [("low",)]
        world.deletes("low")
        await world.want("equal", 0.1, priority=9, memory="1Gi")
        await world.later(5)
        assert "equal" not in world.placed
        assert len(world.begun) == 1
        await world.ends("low")
        assert "high" in world.placed
        await world.later(2)
        assert "equal" in world.placed, "nothing is kept any more"


@pytest.mark.promise("placement-preempt-rate")
async def test_nobody_makes_room_for_equals_nor_where_preemption_is_off() -> None:
    async with playing() as world:
        await world.runs("first", 1.0, priority=9, memory="1Gi")
        await world.want("second", 1.0, priority=9, memory="1Gi")
        await world.later(30)
        assert world.begun == []
    async with playing(per_minute=0) as world:
        await world.runs("low", 1.0, memory="1Gi")
        await world.want("high", 1.0, priority=9, memory="1Gi")
        await world.later(30)
        assert world.begun == []


@pytest.mark.promise("placement-preempt-budgets")
async def test_where_a_budget_protects_one_another_set_is_found_and_else_nobody_is_touched() -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="7Gi")
        await world.runs("other", 0.3, memory="7Gi")
        await world.want("high", 0.3, priority=9, memory="7Gi")
        await world.later(2)
        first = world.begun[0].plan.evict
        world.loop.preemptions.refused("high", f"pod-of-{first[0]}")
        await world.later(2)
        assert {item.plan.evict for item in world.begun} == {("low",), ("other",)}
        world.loop.preemptions.refused("high", f"pod-of-{world.begun[1].plan.evict[0]}")
        await world.later(20)
        assert len(world.begun) == 2
        assert world.kept() == set()
        await world.later(20)
        assert len(world.begun) == 3, "it is asked again after a while"


@pytest.mark.promise("placement-preempt-crash")
async def test_a_successor_waits_for_those_that_end_already_and_ends_nobody_else() -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="7Gi")
        await world.runs("other", 0.3, memory="7Gi")
        world.deletes("low")
        await world.want("high", 0.3, priority=9, memory="7Gi")
        await world.later(2)
        assert [(item.plan.evict, item.plan.leaving) for item in world.begun] == [((), ("low",))]
        assert world.kept() == {"high"}
        await world.ends("low")
        assert "high" in world.placed


async def test_while_the_row_of_a_pod_that_is_gone_waits_for_its_agent_nobody_else_is_taken() -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="7Gi")
        await world.runs("other", 0.3, memory="7Gi")
        await world.want("high", 0.3, priority=9, memory="7Gi")
        await world.later(2)
        (first,) = world.begun[0].plan.evict
        world.state.drop_pod(f"pod-of-{first}")
        await world.later(60)
        assert len(world.begun) == 1
        assert world.kept() == {"high"}
        await world.ends(first)
        assert "high" in world.placed


async def test_of_two_that_make_room_the_first_may_be_gone_long_before_the_second() -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="7Gi")
        await world.runs("other", 0.3, memory="7Gi")
        await world.want("high", 0.3, priority=9, memory="14Gi")
        await world.later(2)
        assert [item.plan.evict for item in world.begun] == [("low", "other")]
        world.deletes("low")
        await world.ends("low")
        await world.want("equal", 0.1, priority=9, memory="1Gi")
        await world.later(10)
        assert "equal" not in world.placed
        assert len(world.begun) == 1
        await world.ends("other")
        assert "high" in world.placed


@pytest.mark.parametrize(
    ("ends_by", "evicted"),
    [("2026-01-01T00:59:00Z", ()), ("2031-01-01T00:00:00Z", ("other",))],
    ids=["within the hour", "in five years"],
)
async def test_a_pod_whose_grace_period_lasts_for_years_is_not_counted_on(ends_by: str, evicted: tuple[str]) -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="7Gi")
        await world.runs("other", 0.3, memory="7Gi")
        world.deletes("low", ends_by=ends_by)
        await world.want("high", 0.3, priority=9, memory="7Gi")
        await world.later(2)
        assert [item.plan.evict for item in world.begun] == [evicted]


async def test_a_pod_that_never_ends_is_not_counted_on() -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="7Gi")
        await world.runs("other", 0.3, memory="7Gi")
        world.deletes("low")
        await world.later(120)
        await world.want("high", 0.3, priority=9, memory="7Gi")
        await world.later(2)
        assert [item.plan.evict for item in world.begun] == [("other",)]


@pytest.mark.parametrize("releasing", [False, True])
async def test_a_row_that_stays_after_its_pod_is_not_counted_on_for_ever(releasing: bool) -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="7Gi")
        await world.runs("other", 0.3, memory="7Gi")
        world.state.drop_pod("pod-of-low")
        if releasing:
            world.state.cluster.set_releasing(world.placed["low"], TenantId("low"))
            await world.writes()
        await world.want("high", 0.3, priority=9, memory="7Gi")
        await world.later(60)
        assert [item.plan.evict for item in world.begun] == [()], "it may end soon"
        await world.later(120)
        assert world.begun[-1].plan.evict == ("other",)
        await world.ends("other")
        assert "high" in world.placed


async def test_one_that_waits_no_longer_gives_up_what_was_kept() -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="12Gi")
        await world.want("high", 0.3, priority=9, memory="12Gi")
        await world.later(2)
        assert world.kept() == {"high"}
        world.state.drop_sharepod("high")
        world.loop.leave("high")
        assert world.kept() == set()
        assert world.loop.preemptions.of("high") is None


@pytest.mark.promise("placement-preempt-rate")
@pytest.mark.parametrize("per_minute", [1, 0.5])
async def test_preemptions_per_minute_stay_within_the_setting(per_minute: float) -> None:
    async with playing(per_minute=per_minute) as world:
        world.node("b")
        for number in range(2):
            await world.runs(f"low{number}", 0.3, memory="12Gi")
        for number in range(2):
            await world.want(f"high{number}", 0.3, priority=9, memory="12Gi")
        await world.later(50 / per_minute)
        assert len(world.begun) == 1
        await world.later(40 / per_minute)
        assert len(world.begun) == 2


@pytest.mark.promise("placement-preempt-turns")
async def test_those_that_nobody_can_make_room_for_do_not_keep_the_others_from_preempting() -> None:
    async with playing() as world:
        await world.runs("low", 0.3, memory="12Gi")
        for number in range(12):
            await world.want(f"pair{number}", 0.5, priority=9, count=2)
        await world.want("helped", 0.3, priority=5, memory="12Gi")
        for _ in range(30):
            # each second a node changes, which might make room: the loop tries all requests again
            world.node("b", gpus=0)
            await world.later(1)
        assert [item.request.tenant for item in world.begun] == ["helped"]


OUT_OF_BUDGET = Standing(lowered_to=-1000, share_milli=1200)


@pytest.mark.promise("placement-best-effort")
async def test_who_is_out_of_budget_runs_at_request_0_while_memory_lasts_and_is_raised_when_there_is_room() -> None:
    async with playing(standing=lambda _namespace: OUT_OF_BUDGET) as world:
        await world.runs("first", 0.8, memory="4Gi")
        await world.want("second", 0.5, memory="4Gi")
        assert "second" in world.placed
        assert world.request_of("second") == 0
        await world.want("third", 0.5, memory="12Gi")
        assert "third" not in world.placed, "memory is full"
        world.loop.want_resize("second", 1)
        await world.settle()
        assert world.request_of("second") == 0
        await world.ends("first")
        await world.writes()
        assert world.request_of("second") == 500


@pytest.mark.promise("budgets-borrower-told")
async def test_one_that_borrows_and_waits_is_told_until_when_others_come_first() -> None:
    spent = Standing(lowered_to=-1000, over_budget_milli=1, refill_at="2026-02-01T00:00:00Z")
    async with playing(standing=lambda _namespace: spent) as world:
        await world.runs("first", 1.0, memory="16Gi")
        await world.want("second", 0.5, memory="4Gi")
        await world.later(1)
        assert world.why("second").endswith(
            "The GPU budget of the namespace is spent: namespaces within their budgets come first until the refill at "
            "2026-02-01T00:00:00Z."
        )


@pytest.mark.promise("budgets-borrower-told")
async def test_until_when_others_come_first_is_told_anew_once_it_is_no_longer_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    standing = Standing(lowered_to=-1000, over_budget_milli=1, refill_at="2026-02-01T00:00:00Z")
    async with playing(standing=lambda _namespace: standing) as world:
        await world.runs("first", 1.0, memory="16Gi")
        await world.want("second", 0.5, memory="4Gi")
        await world.later(1)
        assert "2026-02-01T00:00:00Z" in world.why("second")
        # without a search for blocking tenants, only the changed order renews the reason
        monkeypatch.setattr(world.loop._explanations, "_next_look", float("inf"))
        standing = replace(standing, refill_at="2026-02-01T00:10:00Z")
        world.loop.order_changed()
        await world.later(6)
        assert world.why("second").endswith("until the refill at 2026-02-01T00:10:00Z.")
        standing = WITHOUT_BUDGET
        world.loop.order_changed()
        await world.later(6)
        assert world.why("second")
        assert "budget" not in world.why("second")


async def test_no_tenant_within_its_budget_runs_at_request_0() -> None:
    async with playing() as world:
        await world.runs("first", 0.8, memory="4Gi")
        await world.want("second", 0.5, memory="4Gi")
        await world.later(30)
        assert "second" not in world.placed
