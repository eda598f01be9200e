"""Request groups: their order by age and by explanation, for every order of arrivals and departures."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from sharepod.controller.placing.waiting import NEVER, RequestGroup, WaitingTenant

STEPS = st.lists(
    st.tuples(st.sampled_from(("add", "remove", "refused", "explain", "again", "oldest")), st.integers(0, 9)),
    min_size=20,
    max_size=60,
)


def first_to_explain(members: list[WaitingTenant], version: int) -> float | None:
    """Return the time at which the tenant that is explained next was last explained. None if it never was."""
    return min((each.explained_at for each in members if each.explained_version != version), default=None)


@settings(max_examples=150)
@given(STEPS)
def test_a_lot_knows_its_oldest_and_who_waits_longest_for_an_explanation(steps: list[tuple[str, int]]) -> None:
    group, now, version = RequestGroup("asks", 0), 0.0, 0
    everyone = {f"{number}": WaitingTenant(f"{number}", 0.0, refused_alone_at=0) for number in range(10)}
    for tenant, waiting in everyone.items():
        waiting.key = (0, 0, tenant, "n", "")
    for step, number in steps:
        now += 1.0
        waiting = everyone[f"{number}"]
        if step == "add" and waiting.group is None:
            some = [each for each in (waiting, everyone[f"{(number + 5) % 10}"]) if each.group is None]
            for each in some:
                each.refused_at_version = version
            group.add(some)
        elif step == "remove" and waiting.group is group:
            group.remove(waiting)
            assert waiting.refused_at_version == version
        elif step == "refused":
            version += 1
            group.refused(version)
        elif step == "explain" and (first := group.first_unexplained) is not None:
            first.explained_at, first.explained_version = now, version
            group.explained(first)
        elif step == "again" and waiting.group is group:
            waiting.explained_at, waiting.explained_version = NEVER, None
            group.not_explained(waiting)
        # as if the oldest tenant were tried and refused
        elif step == "oldest" and (oldest := group.oldest) is not None:
            group.remove(oldest)
            group.add([oldest])
        members = [each for each in everyone.values() if each.group is group]
        assert len(group) == len(members)
        assert group.oldest is min(members, key=lambda each: each.tenant, default=None)
        next_one = group.first_unexplained
        assert (None if next_one is None else next_one.explained_at) == first_to_explain(members, version)


def test_what_is_set_for_one_of_a_lot_is_its_own() -> None:
    left: list[str] = []
    some = [
        WaitingTenant(
            name, 0.0, on_changed=lambda one: left.append(one.tenant), key=(0, 0, name, "n", name), refused_alone_at=3
        )
        for name in "abc"
    ]
    group = RequestGroup("asks", 3)
    group.add(some)
    some[1].refused_at_version = None
    group.refused(4)
    assert [each.refused_at_version for each in some] == [4, None, 4]
    assert set(left) == {"b"}
