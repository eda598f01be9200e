"""A GPU that an admin has cordoned, on a node of pool `scheduler`: the agent no longer publishes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sharepod.agent.cluster.ledger_watch import LedgerWatch
from sharepod.agent.cluster.run import attachable
from sharepod.api.gpunode import Gpu
from sharepod.api.objects import CORDONED_ANNOTATION

GPUS = tuple(Gpu(uuid=f"GPU-{index}", index=index, model="m", memory=1 << 34) for index in range(3))


@pytest.mark.promise("placement-cordon")
@pytest.mark.parametrize(
    ("annotations", "published"),
    [
        (None, [0, 1, 2]),
        ({}, [0, 1, 2]),
        ({CORDONED_ANNOTATION: "GPU-1"}, [0, 2]),
        ({CORDONED_ANNOTATION: "gpu-1"}, [0, 2]),
        ({CORDONED_ANNOTATION: " 0, GPU-2 ,7,"}, [1]),
        ({CORDONED_ANNOTATION: 5}, [0, 1, 2]),
    ],
)
async def test_its_device_is_left_out(tmp_path: Path, annotations: Any, published: list[int]) -> None:
    api: Any = None

    async def applied(_rows: object) -> None:
        return None

    ledger = LedgerWatch(api, node="n", apply=applied, checkpoint=tmp_path / "ledger", on_change=lambda: None)
    assert ledger.cordoned == frozenset()
    ledger.note(
        {"metadata": {"name": "n", "uid": "u", "resourceVersion": "1", "generation": 1, "annotations": annotations}}
    )
    agent: Any = SimpleNamespace(gpus=lambda: GPUS)
    cdi: Any = SimpleNamespace(devices=lambda uuids: dict.fromkeys(uuids, "device"))
    assert [gpu.index for gpu in attachable(agent, cdi, ledger.cordoned)] == published
