"""SharePods that all come at once and just fit: 16 of half a GPU on 8 GPUs of 4 nodes.

Guarantees: each round begins with empty ledgers and ends when they are empty again, given back by the operator and the
agents as always. All SharePods of a round are sent by connections of their own that wait for each other.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from cluster.audit import Audit
from cluster.operator_world import World, wait

GPUS, SHAREPODS = 8, 16


@dataclass(frozen=True, slots=True)
class Round:
    """Result of one round: SharePods whose Pod was bound, and the most tenants that any GPU had at any time."""

    placed: int
    most_on_a_gpu: int
    over_committed: int


class Burst:
    """The nodes and the namespace of a series of rounds."""

    def __init__(self, world: World, audit: Audit, name: str = "burst16") -> None:
        self._world = world
        self._audit = audit
        self._name = name
        self.nodes = world.nodes(name, GPUS // 2)
        self.namespace = world.cluster.namespace(name)

    def round(self) -> Round:
        """One round, from empty ledgers to empty ledgers."""
        self._audit.most.clear()
        names = [f"p{number}" for number in range(SHAREPODS)]
        start = threading.Barrier(SHAREPODS)
        failures: list[BaseException] = []

        def apply(name: str) -> None:
            try:
                self._world.api.get(self._world.path(self.namespace))  # so that its connection is there
                start.wait(30)
                self._world.apply(self.namespace, name, {"request": 0.5}, on=self._name)
            except BaseException as error:
                failures.append(error)
                start.abort()

        threads = [threading.Thread(target=apply, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        wait(lambda: self._bound() == SHAREPODS, what=f"{SHAREPODS} bound Pods", timeout=60)
        # Ledgers and Pods are followed by a watch each: what one has shown the other may still bring.
        wait(lambda: self._reserved().total() == SHAREPODS, what=f"{SHAREPODS} rows of the ledgers", timeout=60)
        ended = Round(self._bound(), max(self._audit.most.values()), len(self._audit.over_committed))
        for name in names:
            self._world.delete(self.namespace, name)
        wait(self._empty, what="empty ledgers", timeout=60)
        return ended

    def _reserved(self) -> Counter[str]:
        """Return the rows by GPU."""
        return Counter(gpu for node, row in self._audit.rows() if node in self.nodes for gpu in row["gpus"])

    def _bound(self) -> int:
        mine = (pod for pod in self._audit.pods() if pod["metadata"]["namespace"] == self.namespace)
        return sum("nodeName" in pod["spec"] for pod in mine)

    def _empty(self) -> bool:
        return self._bound() == 0 and not any(node in self.nodes for node, _ in self._audit.rows())
