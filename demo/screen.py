"""Output of the demo: phases with their duration and the remaining time, the output of kubectl when it changes, and
tables.

On a terminal, the progress within a phase is one line that is overwritten. Elsewhere each line is added to the output.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from harness.cluster import Cluster

_GROUP = "/apis/sharepod.dev/v1alpha1"
_WATCHED = {
    ("sharepods", "-n", "team-a"): f"{_GROUP}/namespaces/team-a/sharepods",
    ("gpunodes",): f"{_GROUP}/gpunodes",
}
"""For each watched kind, by the arguments of `kubectl get`: the path of its list at the API server."""
_AGE = re.compile(r"\s+(AGE|\d+[smh]\S*)$", re.MULTILINE)
_POLL_S = 0.1
"""Seconds between two reads of the cluster."""
_ERASE = "\r\x1b[K"


class DemoError(Exception):
    """Failure to keep a promise of the demo. The message names the promise."""


@dataclass(frozen=True)
class Phase:
    """One phase of the demo. `usual_s`: its usual duration on two cores, in seconds."""

    title: str
    usual_s: float = field(compare=False)


class Screen:
    """Standard output, with the seconds since the start and the remaining seconds of the plan.

    Args:
        plan: All phases, in their order.
    """

    def __init__(
        self, plan: Sequence[Phase], *, clock: Callable[[], float] = time.monotonic, out: TextIO | None = None
    ) -> None:
        self._plan = list(plan)
        self._clock = clock
        self._out = sys.stdout if out is None else out
        self._start = self._began = clock()
        self._current: Phase | None = None
        self._took: list[tuple[str, float]] = []
        self._passing = False
        self._shown: dict[tuple[str, ...], str] = {}
        self._versions: dict[tuple[str, ...], list[str]] = {}

    def follow(self, plan: Sequence[Phase]) -> None:
        """Replace the plan. None of its phases may have begun."""
        self._end_phase()
        self._plan = list(plan)

    def begin(self, phase: Phase, title: str = "") -> None:
        """End the current phase. Print the title of this phase (`title`: another title) and the remaining time."""
        self._end_phase()
        self._current, self._began = phase, self._clock()
        self.write(f"\n[{self._clock() - self._start:5.1f} s, {self.left()}] {title or phase.title}")

    def end(self) -> None:
        """End the last phase, and print the duration of each phase."""
        self._end_phase()
        total = sum(seconds for _, seconds in self._took)
        self.write(f"\n[{total:5.1f} s] done")
        rows = [[title, f"{seconds:.1f} s"] for title, seconds in self._took]
        self.table(["PHASE", "TOOK"], [*rows, ["all", f"{total:.1f} s"]])

    def left(self) -> str:
        """Return the remaining time by the usual durations, such as "about 34 s left"."""
        seconds = 0.0
        if self._current is not None:
            index = self._plan.index(self._current)
            spent = self._clock() - self._began
            seconds = max(0.0, self._plan[index].usual_s - spent) + sum(
                phase.usual_s for phase in self._plan[index + 1 :]
            )
        return f"about {seconds:.0f} s left"

    def write(self, text: str) -> None:
        """Print a line. On a terminal it replaces the line with the progress."""
        if self._passing:
            self._passing = False
            print(_ERASE, end="", file=self._out)
        print(text, file=self._out, flush=True)

    def progress(self, text: str, *, plain: bool = False) -> None:
        """Show the progress within the phase. `plain`: also print it as a separate line if there is no terminal."""
        if self._out.isatty():
            print(f"{_ERASE}  {text}; {self.left()}", end="", file=self._out, flush=True)
            self._passing = True
        elif plain:
            self.write(f"  {text}; {self.left()}")

    def command(self, text: str) -> None:
        """Print a command as a user would type it."""
        self.write(f"$ {text}")

    def show_changes(self, cluster: Cluster) -> None:
        """Print `kubectl get sharepods` and `kubectl get gpunodes`, each if anything but an age has changed.

        kubectl takes 0.1 s of processor time, so it is called only if an object has changed.
        """
        for arguments, path in _WATCHED.items():
            versions = [each["metadata"]["resourceVersion"] for each in cluster.api.get(path)["items"]]
            if versions == self._versions.get(arguments):
                continue
            self._versions[arguments] = versions
            printed = cluster.kubectl("get", *arguments).stdout.rstrip()
            if printed and _AGE.sub("", printed) != self._shown.get(arguments):
                self._shown[arguments] = _AGE.sub("", printed)
                self.command(f"kubectl get {' '.join(arguments)}")
                self.write(printed)

    def watch_until(self, cluster: Cluster, condition: Callable[[], bool], *, what: str, timeout: float) -> None:
        """Print changes until `condition` holds. After `timeout` seconds, raise `DemoError` with the text `what`."""
        begin = self._clock()
        while not condition():
            waited = self._clock() - begin
            if waited > timeout:
                raise DemoError(f"{what}: not within {timeout:.0f} s")
            self.progress(f"waiting for {what}, {waited:.0f} s")
            self.show_changes(cluster)
            time.sleep(_POLL_S)
        self.show_changes(cluster)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        cells = [header, *rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        for row in cells:
            self.write("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def _end_phase(self) -> None:
        if self._current is not None:
            self._took.append((self._current.title, self._clock() - self._began))
            self._current = None
