"""Raises of a share above the amounts of its Pod's line: which quotas of the namespace prevent them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sharepod.controller.apiserver.client import Client
from sharepod.controller.decisions.snapshot import TenantSnapshot
from sharepod.controller.tenants.quota_gate import QuotaGate
from sharepod.kube import Json
from unit.controller.objects import pod, reserved, sharepod


class Pages(Client):
    """API server that lists one quota per page."""

    def __init__(self, *quotas: Json) -> None:
        self._quotas = quotas

    async def page(self, *_: Any, token: str = "", take: Callable[[Json], None], **__: Any) -> Json:
        at = int(token or 0)
        take(self._quotas[at])
        return {"continue": str(at + 1)} if at + 1 < len(self._quotas) else {}


class Circle(Client):
    """API server whose second page names itself as the next page, so the list never ends."""

    def __init__(self) -> None:
        self.pages = 0

    async def page(self, *_: Any, **__: Any) -> Json:
        self.pages += 1
        assert self.pages < 10, "endless pages"
        return {"continue": "second"}


def quota(name: str, *counted: str) -> Json:
    return {"metadata": {"name": name}, "spec": {"hard": dict.fromkeys(counted, "9")}}


@pytest.mark.parametrize("last", [0, 1, 2])
async def test_the_quota_that_counts_the_line_is_found_on_whatever_page_it_is(last: int) -> None:
    quotas = [quota(f"q{number}", "count/pods") for number in range(3)]
    quotas[last] = quota("line", "requests.sharepod.dev/gpu-milli")
    gate = QuotaGate(Pages(*quotas), lambda: 0.0)
    raised = sharepod(spec={"gpu": {"request": 0.9}})
    refusal = await gate.refusal(TenantSnapshot(sharepod=raised, pod=pod(node="node-a"), reserved=(reserved(),)))
    assert refusal is not None
    assert "ResourceQuota line counts" in refusal.message


async def test_a_list_of_quotas_whose_pages_come_round_again_raises_no_share_by_now() -> None:
    raised = sharepod(spec={"gpu": {"request": 0.9}})
    snapshot = TenantSnapshot(sharepod=raised, pod=pod(node="node-a"), reserved=(reserved(),))
    refusal = await QuotaGate(Circle(), lambda: 0.0).refusal(snapshot)
    assert refusal is not None
    assert "quotas cannot be read now" in refusal.message
