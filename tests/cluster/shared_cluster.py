"""Cluster on which test files run their worlds one after another: a start costs more than most files' tests.

Guarantees:
- Each file has its own operator, kubelets and agents, and the manifests as they are.
- A file meets no object of an earlier file, apart from Events and Leases.
- A cluster that an earlier file's objects do not leave within a minute is replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from cluster.operator_world import TIMES, World, a_world
from harness.api import ApiError
from harness.cluster import Cluster
from harness.errors import HarnessError
from harness.installation import Installation
from harness.leftovers import Leftovers


class SharedCluster:
    """Cluster that starts with its first world and ends with the `with` block."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._leftovers: Leftovers | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @contextmanager
    def world(self, *, times: Mapping[str, str] = TIMES) -> Iterator[World]:
        """Start an operator with the settings `times` on the cluster. Afterwards its objects are deleted."""
        with a_world(times=times, on=self._lent()) as running:
            yield running
            self._clear(running)

    @contextmanager
    def _lent(self) -> Iterator[Cluster]:
        if self._cluster is None:
            self._cluster = Cluster(keep_logs=bool(os.environ.get("KEEP_LOGS")))
            Installation(self._cluster)
            self._cluster.runtime_class()
            self._leftovers = Leftovers(self._cluster.api)
        yield self._cluster

    def _clear(self, world: World) -> None:
        assert self._leftovers is not None
        try:
            world.revive_operator()  # it releases the shares
            self._leftovers.delete_contents()
            world.installation.stop_operators()
            self._leftovers.delete_rest()
        except (AssertionError, HarnessError, ApiError, OSError) as error:
            print(f"the next world has another cluster: {error}", file=sys.stderr)
            self._stop()

    def _stop(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
        self._cluster = None
