"""Bursts: 16 shares of half a GPU arrive together and just fit on 8 GPUs of 4 nodes.

The shares are SharePods. With `doors` (all ways to request a share), a third each are SharePods, plain Pods with claims
and plain Pods with a resource line.

Guarantees: each round begins with empty ledgers, and ends when operator and agents have emptied them as usual. All
shares of a round are sent at the same moment, each over its own connection.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from cluster.audit import Audit
from cluster.doors import Door, ask, end, open_doors, thirds
from cluster.operator_world import World, wait

GPUS, SHAREPODS = 8, 16


@dataclass(frozen=True, slots=True)
class Round:
    """Result of one round: the number of shares with a bound Pod, and the most tenants that any GPU had at any time."""

    placed: int
    most_on_a_gpu: int
    over_committed: int


class Burst:
    """Nodes and namespace for a series of rounds."""

    def __init__(self, world: World, audit: Audit, name: str = "burst16", *, doors: bool = False) -> None:
        self._world = world
        names = [f"p{number}" for number in range(SHAREPODS)]
        self._doors = thirds(names, seed=1) if doors else dict.fromkeys(names, Door.SHAREPOD)
        self._audit = audit
        self._name = name
        self.nodes = world.nodes(name, GPUS // 2)
        self.namespace = world.cluster.namespace(name)
        if doors:
            open_doors(world, self.namespace, [500])

    def round(self) -> Round:
        """Run one round, from empty ledgers to empty ledgers."""
        self._audit.most.clear()
        start = threading.Barrier(SHAREPODS)
        failures: list[BaseException] = []

        def apply(name: str) -> None:
            try:
                self._world.api.get(self._world.path(self.namespace))  # this call opens the client's connection
                start.wait(30)
                ask(self._world, self.namespace, name, 500, self._doors[name], on=self._name)
            except BaseException as error:
                failures.append(error)
                start.abort()

        threads = [threading.Thread(target=apply, args=(name,)) for name in self._doors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        wait(lambda: self._bound() == SHAREPODS, what=f"{SHAREPODS} bound Pods")
        # Ledgers and Pods have separate watches: one may lag behind the other.
        wait(lambda: self._reserved().total() == SHAREPODS, what=f"{SHAREPODS} rows of the ledgers")
        ended = Round(self._bound(), max(self._audit.most.values()), len(self._audit.over_committed))
        for name, door in self._doors.items():
            end(self._world, self.namespace, name, door)
        wait(self._empty, what="empty ledgers")
        return ended

    def _reserved(self) -> Counter[str]:
        """Return the number of rows on each GPU."""
        return Counter(gpu for node, row in self._audit.rows() if node in self.nodes for gpu in row["gpus"])

    def _bound(self) -> int:
        mine = (pod for pod in self._audit.pods() if pod["metadata"]["namespace"] == self.namespace)
        return sum("nodeName" in pod["spec"] for pod in mine)

    def _empty(self) -> bool:
        return self._bound() == 0 and not any(node in self.nodes for node, _ in self._audit.rows())
