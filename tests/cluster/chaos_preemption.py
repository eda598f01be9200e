"""SharePods that fill separate nodes and return after each preemption, and waves of SharePods that preempt them for a
while.

Guarantees: the sizes of the waves come from the seed. A wave is withdrawn once each of its SharePods has run. At the
end only the returning SharePods exist, and each has been in as many Pods as its status states.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from http.client import HTTPException
from typing import Any

from cluster.audit import Audit
from cluster.operator_world import World
from cluster.surely import surely
from harness.api import ApiError, Object

HIGH = "chaos-high"
"""PriorityClass of the waves. Names of their SharePods begin with it."""
_GPU = {"request": 0.5, "memory": "9Gi"}
"""Request of each SharePod. A GPU has memory for one of them."""
_WAVES = 3


class Preempting(threading.Thread):
    """`count` SharePods in a separate namespace and on separate nodes with as many GPUs, and the SharePods that preempt
    them.

    Name of the namespace and the nodes' label: PREFIX.
    """

    def __init__(self, world: World, audit: Audit, prefix: str, count: int, seed: int, over: threading.Event) -> None:
        super().__init__(name="who preempts", daemon=True)
        self._world = world
        self._audit = audit
        self._prefix = prefix
        self._low = [f"low{number}" for number in range(count)]
        self._chance = random.Random(seed)
        self._over = over
        self.ran = 0
        """Number of SharePods of the waves that have run so far."""
        self.failures: list[str] = []

    def prepare(self) -> None:
        """Create nodes, namespace and PriorityClass, while there are no faults."""
        self._audit.returning.add(self._prefix)
        self._world.nodes(self._prefix, (len(self._low) + 1) // 2)
        self._world.cluster.namespace(self._prefix)
        body = {"metadata": {"name": HIGH}, "value": 1000}
        self._world.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", body)

    def run(self) -> None:
        """Fill the nodes, then create each wave once the former one has run."""
        try:
            for name in self._low:
                self._apply(name, restartPolicy="Always")
            if not self._all_run(self._low):
                return
            for wave in range(_WAVES):
                names = [f"{HIGH}-{wave}-{number}" for number in range(self._chance.randint(1, len(self._low) // 2))]
                for name in names:
                    self._apply(name, priorityClassName=HIGH)
                if not self._all_run(names):
                    return
                self.ran += len(names)
                self.withdraw()
        except (ApiError, OSError, HTTPException) as error:
            self.failures.append(repr(error))

    def withdraw(self) -> None:
        """Delete all SharePods of waves."""
        for name in self._items():
            if name.startswith(HIGH):
                surely(partial(self._world.delete, self._prefix, name), done=404, over=self._over)

    def settled(self) -> bool:
        """Return whether exactly the SharePods of low priority have shares and run."""
        rows = [row["podName"] for _, row in self._audit.rows() if row["namespace"] == self._prefix]
        return sorted(rows) == sorted(self._low) and self._running() == set(self._low)

    def lost(self) -> list[str]:
        """Return the SharePods of low priority that do not run."""
        return sorted(set(self._low) - self._running())

    def doubled(self) -> list[str]:
        """Return the SharePods that had more Pods than their status states."""
        return [
            name
            for name, item in self._items().items()
            if len(self._audit.bound[item["metadata"]["uid"]]) > 1 + int(item.get("status", {}).get("restarts") or 0)
        ]

    def _apply(self, name: str, **spec: Any) -> None:
        surely(partial(self._world.apply, self._prefix, name, _GPU, on=self._prefix, **spec), done=409, over=self._over)

    def _all_run(self, names: Sequence[str]) -> bool:
        """Wait until each of these SharePods runs or has run. Return False if the chaos run ends first."""
        waiting = set(names)
        while waiting and not self._over.is_set():
            waiting -= self._running()
            time.sleep(0.5)
        return not waiting

    def _running(self) -> set[str]:
        return {name for name, item in self._items().items() if item.get("status", {}).get("phase") == "Running"}

    def _items(self) -> dict[str, Object]:
        """Return the SharePods by name. Empty while the API server does not answer."""
        try:
            listed = self._world.api.get(self._world.path(self._prefix))["items"]
        except (ApiError, OSError, HTTPException):
            return {}
        return {item["metadata"]["name"]: item for item in listed}
