"""Output of the demo: steps with their time, kubectl's own output whenever it changes, tables of asked and got."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from harness.cluster import Cluster

_WATCHED = (("sharepods", "-n", "team-a"), ("gpunodes",))
_AGE = re.compile(r"\s+(AGE|\d+[smh]\S*)$", re.MULTILINE)


class DemoError(Exception):
    """A promise of the demo does not hold; the message says which."""


class Screen:
    """Standard output, with seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown: dict[tuple[str, ...], str] = {}

    def step(self, text: str) -> None:
        print(f"\n[{time.monotonic() - self._start:5.1f} s] {text}", flush=True)

    def command(self, text: str) -> None:
        """Print a command as a user would type it."""
        print(f"$ {text}", flush=True)

    def show_changes(self, cluster: Cluster) -> None:
        """Print `kubectl get sharepods` and `get gpunodes`, each if it differs in more than its age."""
        for arguments in _WATCHED:
            printed = cluster.kubectl("get", *arguments).stdout.rstrip()
            if printed and _AGE.sub("", printed) != self._shown.get(arguments):
                self._shown[arguments] = _AGE.sub("", printed)
                self.command(f"kubectl get {' '.join(arguments)}")
                print(printed, flush=True)

    def watch_until(self, cluster: Cluster, condition: Callable[[], bool], *, what: str, timeout: float) -> None:
        """Show changes until `condition` holds. Raises `DemoError` naming `what` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise DemoError(f"{what}: not within {timeout:.0f} s")
            self.show_changes(cluster)
            time.sleep(0.3)
        self.show_changes(cluster)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        cells = [header, *rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        for row in cells:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print(flush=True)
