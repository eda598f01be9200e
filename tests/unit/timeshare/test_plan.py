"""Tenants that compete for a GPU, through gangs and groups."""

from __future__ import annotations

from collections.abc import Sequence

from sharepod.timeshare import Scheduler
from sharepod.timeshare.plan import waiting_with
from sharepod.timeshare.tenant import TokenTenant


class Counted(dict[str, Sequence[TokenTenant]]):
    """Dictionary of the tenants of each GPU that counts how often each entry is read."""

    reads = 0

    def get(self, key: str, default: object = ()) -> Sequence[TokenTenant]:
        self.reads += 1
        return self[key]


def test_the_tenants_of_each_gpu_are_read_once_however_many_members_a_group_has() -> None:
    """Otherwise each member of a group would add the GPU of each other member again, and a decision among 120 members
    would take seconds."""
    scheduler = Scheduler()
    for i in range(120):
        scheduler.set_tenant(0, f"t{i}", (f"g{i % 8}",), request_milli=60, limit_milli=1000, group="a")
        scheduler.want(0, f"t{i}")
    tenants_on = Counted(scheduler._occupancy.tenants_on)
    assert len(waiting_with({"g0"}, tenants_on, scheduler._occupancy.groups, {})) == 120
    assert tenants_on.reads <= 9
