"""With exclusive turns, the scheduler takes the same actions at the same moments as before tenants could co-run."""

from __future__ import annotations

from typing import Any

import pytest
from property.exclusive_turns import DIGESTS, MIXES, Mix, digest
from sharepod.timeshare import Parameters, Samples, Scheduler, Sharing


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_with_exclusive_turns_every_action_is_the_same(mix: Mix) -> None:
    assert digest(mix, Scheduler()) == DIGESTS[mix.name]


def test_tenants_that_may_not_co_run_take_the_same_turns_on_a_gpu_that_is_shared_concurrently() -> None:
    for mix in MIXES[::7]:
        assert digest(mix, Scheduler(Parameters(sharing=Sharing.CONCURRENT))) == DIGESTS[mix.name]


def test_samples_change_nothing_where_turns_are_exclusive() -> None:
    class Sampled:
        """Scheduler in which the hooks of all tenants count samples."""

        def __init__(self) -> None:
            self._scheduler = Scheduler(Parameters(sharing=Sharing.EXCLUSIVE))
            self._now = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._scheduler, name)

        def set_tenant(self, now: int, *args: Any, **kwargs: Any) -> None:
            self._scheduler.set_tenant(now, *args, **kwargs, read=self._samples)

        def _samples(self) -> Samples:
            return Samples(self._now // 500, self._now // 1000, self._now // 100)

        def want(self, now: int, tenant_id: str) -> None:
            self._now = now
            self._scheduler.set_concurrent(now, tenant_id, concurrent=True)
            self._scheduler.want(now, tenant_id)

    for mix in MIXES[::7]:
        assert digest(mix, Sampled()) == DIGESTS[mix.name]
