"""Rows of holders: the agent sees a holder before it is Held, states change in one direction, and no GPU in use is
returned (HR1 to HR3).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from sharepod.api.gpunode import Gpu, HolderState, PluginHolder
from sharepod.controller.decisions.holder_rows import holder_rows
from sharepod.controller.state.holders_seen import HolderPod

PENDING = PluginHolder(id="h1", pod_name="holder-1", state=HolderState.PENDING)
HELD = PENDING.model_copy(update={"state": HolderState.HELD, "uuid": "GPU-0"})
RELEASING = HELD.model_copy(update={"state": HolderState.RELEASING})


def pod(uid: str = "h1", **fields: Any) -> HolderPod:
    known = {"namespace": "system", "version": 1, "node": "a", "tenant": "t", "deleting": False, "bound": True}
    return HolderPod(uid=uid, name=f"holder-{uid[1:]}", **{**known, **fields})


def gpu(holder: str | None = "h1", *, taken: bool = False) -> Gpu:
    return Gpu(uuid="GPU-0", index=0, model="m", memory=1, held=holder is not None, holder=holder, taken=taken)


def rows(
    *before: PluginHolder,
    pods: Collection[HolderPod] = (),
    gpus: Collection[Gpu] = (),
    in_use: Collection[str] = (),
    giving_back: Collection[str] = (),
    ended: Collection[str] = (),
) -> list[PluginHolder]:
    return [*holder_rows(before, pods, gpus, in_use=in_use, giving_back=giving_back, ended=ended)]


def test_each_pod_gets_a_row_and_a_gpu_once_the_agent_has_seen_it() -> None:
    assert rows(pods=[pod()]) == [PENDING]
    assert rows(PENDING, pods=[pod()], gpus=[gpu(None)]) == [PENDING]
    assert rows(PENDING, pods=[pod()], gpus=[gpu("another")]) == [PENDING]
    assert rows(PENDING, pods=[pod()], gpus=[gpu()]) == [HELD]
    assert rows(HELD, pods=[pod()], gpus=[]) == [HELD], "what the agent does not see at the moment is not lost"


def test_no_gpu_is_held_twice() -> None:
    second = PENDING.model_copy(update={"id": "h2", "pod_name": "holder-2"})
    assert rows(HELD, second, pods=[pod(), pod("h2")], gpus=[gpu("h2")]) == [HELD, second]


@pytest.mark.parametrize("before", [PENDING, HELD, RELEASING])
def test_a_holder_whose_pod_ends_is_releasing_until_the_pod_is_deleted(before: PluginHolder) -> None:
    (after,) = rows(before, pods=[pod(deleting=True)], gpus=[gpu()], in_use=["GPU-0"])
    assert after.state is HolderState.RELEASING
    assert rows(after) == [after], "unconfirmed absence"
    assert rows(after, ended=["h1"]) == []


def test_the_row_of_a_lost_gpu_stays_until_its_tenants_are_gone() -> None:
    assert rows(HELD, ended=["h1"], in_use=["GPU-0"]) == [RELEASING]
    assert rows(RELEASING, ended=["h1"], in_use=["GPU-0"]) == [RELEASING]
    assert rows(RELEASING, ended=["h1"]) == []


def test_a_gpu_that_another_pod_has_is_lost() -> None:
    assert rows(HELD, pods=[pod()], gpus=[gpu(None, taken=True)], in_use=["GPU-0"]) == [RELEASING]


def test_a_holder_that_has_another_gpu_than_before_is_lost() -> None:
    other = gpu().model_copy(update={"uuid": "GPU-1"})
    assert rows(HELD, pods=[pod()], gpus=[gpu(None), other], in_use=["GPU-0"]) == [RELEASING]


def test_nothing_is_given_back_while_a_tenant_has_it_and_nothing_comes_back() -> None:
    assert rows(HELD, pods=[pod()], gpus=[gpu()], giving_back=["h1"], in_use=["GPU-0"]) == [HELD]
    assert rows(HELD, pods=[pod()], gpus=[gpu()], giving_back=["h1"]) == [RELEASING]
    assert rows(RELEASING, pods=[pod()], gpus=[gpu()]) == [RELEASING]
    (withdrawn,) = rows(PENDING, pods=[pod()], giving_back=["h1"])
    assert withdrawn.state is HolderState.RELEASING
