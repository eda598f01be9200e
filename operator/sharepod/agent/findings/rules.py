"""Whether a tenant is what it seems: processes that never connected, GPU time and memory beyond what was granted.

Pure: the time is passed in. A finding begins once what it says has been so for a while, says the figures of that moment
for as long as it stands, and ends only when what it says is clearly no longer so: nobody is told the same thing each
second, nor of what a restart of the agent or a slow start looks like for a moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from sharepod.api.gpunode import Finding, FindingReason

OVERTAKEN_TIMES = 3
OVERTAKEN_WITHIN_S = 60.0
_LISTED_PIDS = 4


@dataclass(frozen=True)
class FindingThresholds:
    """`unhooked_after_s`: how long a process must have been on a GPU without having connected; `busy_window_s`: over
    how long GPU time is compared; `busy_tolerance`: the part of it that a tenant may be busy beyond what it held;
    `gap_tolerance`: bytes that the driver may count beyond what was credited; `gap_after_s`: for how long."""

    unhooked_after_s: float = 3.0
    busy_window_s: float = 10.0
    busy_tolerance: float = 0.25
    gap_tolerance: int = 512 << 20
    gap_after_s: float = 3.0


class SlidingRate:
    """Of a sum that only grows: by how much it grew over the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._marks: deque[tuple[float, float]] = deque()

    def add(self, now: float, total: float) -> None:
        """The sum is this now."""
        self._marks.append((now, total))
        while len(self._marks) > 2 and now - self._marks[1][0] >= self._seconds:
            self._marks.popleft()

    @property
    def span(self) -> float:
        """How long it has been looked at, at most about the window's length."""
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0

    @property
    def growth(self) -> float:
        """Over `span`."""
        return self._marks[-1][1] - self._marks[0][1] if self._marks else 0.0

    @property
    def rate(self) -> float:
        """Growth for each second; 0 before there are two looks."""
        return self.growth / self.span if self.span > 0 else 0.0


class FindingRules:
    """Of one tenant. `see_...` after each reading; `findings` whenever it is asked. `resumed`: what stood when an
    earlier agent last looked; it stands until this one has looked for long enough to find it out anew."""

    def __init__(self, config: FindingThresholds, resumed: Sequence[Finding] = ()) -> None:
        self._config = config
        self._standing = {finding.reason: finding for finding in resumed}
        self._resumed_until: dict[FindingReason, float | None] = {finding.reason: None for finding in resumed}
        self._unhooked_since: dict[int, float] = {}
        self._gap_since: dict[str, float] = {}
        self._windows: dict[str, tuple[SlidingRate, SlidingRate]] = {}
        self._overtakings: deque[float] = deque()
        self._overtaken: int | None = None
        self.unhooked: frozenset[int] = frozenset()
        """Processes that have been on its GPUs without the hook for long enough."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What stands, the gravest first."""
        return tuple(self._standing[reason] for reason in FindingReason if reason in self._standing)

    def stands(self, reason: FindingReason) -> bool:
        """Whether this is so now."""
        return reason in self._standing

    def observe_unhooked(self, now: float, unhooked: Set[int]) -> None:
        """These processes of it are on its GPUs, and no hook of theirs ever connected."""
        since = {pid: self._unhooked_since.get(pid, now) for pid in unhooked}
        self._unhooked_since = since
        self.unhooked = frozenset(pid for pid, begun in since.items() if now - begun >= self._config.unhooked_after_s)
        if not self.unhooked:
            if not unhooked:
                self._resumed_until.pop(FindingReason.PROCESS_WITHOUT_HOOK, None)
            self._end(FindingReason.PROCESS_WITHOUT_HOOK, now, self._config.unhooked_after_s)
            return
        listed = ", ".join(str(pid) for pid in sorted(self.unhooked)[:_LISTED_PIDS])
        more = f" and {len(self.unhooked) - _LISTED_PIDS} more" if len(self.unhooked) > _LISTED_PIDS else ""
        self._begin(
            FindingReason.PROCESS_WITHOUT_HOOK,
            f"process {listed}{more} (as the node numbers it) uses the GPU without the hook, so its share is not "
            "enforced; images built on musl (Alpine) and statically linked programs do not load it: use one built on "
            "glibc",
        )

    def observe_unread(self, blind: Set[str]) -> None:
        """The driver does not say which processes are on these GPUs of it."""
        if blind:
            self._begin(
                FindingReason.PROCESSES_NOT_TOLD,
                f"the driver does not tell which processes use {', '.join(sorted(blind))}, so a process without the "
                "hook would not be noticed",
            )
        else:
            self._resumed_until.pop(FindingReason.PROCESSES_NOT_TOLD, None)
            self._end(FindingReason.PROCESSES_NOT_TOLD)

    def observe_time(self, now: float, busy_s: Mapping[str, float], held_s: float) -> None:
        """By GPU, for how long its processes kept it busy since some beginning; and how long it held the token."""
        for gone in self._windows.keys() - busy_s.keys():
            del self._windows[gone]
        worst, where, span = 0.0, "", 0.0
        for uuid, busy in busy_s.items():
            used, held = self._windows.setdefault(
                uuid, (SlidingRate(self._config.busy_window_s), SlidingRate(self._config.busy_window_s))
            )
            used.add(now, busy)
            held.add(now, held_s)
            beyond = (used.growth - held.growth) / used.span if used.span else 0.0
            if used.span >= self._config.busy_window_s and beyond > worst:
                worst, where, span = beyond, uuid, used.span
        if worst > self._config.busy_tolerance:
            used, held = self._windows[where]
            self._begin(
                FindingReason.BUSY_BEYOND_HELD,
                f"over {span:.0f} s its processes kept {where} busy {used.rate:.0%} of the time, while it held "
                f"{min(1.0, held.rate):.0%}: something in the pod uses the GPU past the hook",
            )
        elif worst < self._config.busy_tolerance / 2:
            self._end(FindingReason.BUSY_BEYOND_HELD, now, self._config.busy_window_s)

    def observe_memory(self, now: float, gap: Mapping[str, int]) -> None:
        """By GPU, how many bytes the driver counts beyond what was credited."""
        tolerated = self._config.gap_tolerance
        self._gap_since = {uuid: self._gap_since.get(uuid, now) for uuid, size in gap.items() if size > tolerated}
        lasting = [uuid for uuid, begun in self._gap_since.items() if now - begun >= self._config.gap_after_s]
        if lasting:
            worst = max(lasting, key=lambda uuid: gap[uuid])
            self._begin(
                FindingReason.MEMORY_BEYOND_TRACKED,
                f"the driver counts {gap[worst] >> 20} MiB of its processes on {worst} beyond what their allocations "
                "explain (contexts, loaded modules, or allocations past the hook); they count against its limit",
            )
        elif all(size <= tolerated * 3 // 4 for size in gap.values()):
            self._end(FindingReason.MEMORY_BEYOND_TRACKED, now, self._config.gap_after_s)

    def observe_preemptions(self, now: float, total: int) -> None:
        """How often it was overtaken, ever."""
        if self._overtaken is not None:
            self._overtakings.extend([now] * min(OVERTAKEN_TIMES, total - self._overtaken))
        self._overtaken = total
        while self._overtakings and now - self._overtakings[0] > OVERTAKEN_WITHIN_S:
            self._overtakings.popleft()
        if len(self._overtakings) >= OVERTAKEN_TIMES:
            self._begin(
                FindingReason.OVERTAKEN,
                f"it was overtaken {OVERTAKEN_TIMES} times within {OVERTAKEN_WITHIN_S:.0f} s: its work does not end "
                "with its turn (long kernels, a stopped process, or processes that wait for another pod's); ranks that "
                "wait for each other belong into one SharePod with a higher count, or into mode: Exclusive",
            )
        elif not self._overtakings:
            self._end(FindingReason.OVERTAKEN, now, OVERTAKEN_WITHIN_S)

    def _begin(self, reason: FindingReason, message: str) -> None:
        self._standing.setdefault(reason, Finding(reason=reason, message=message[:1024]))
        self._resumed_until.pop(reason, None)

    def _end(self, reason: FindingReason, now: float = 0.0, resumed_s: float = 0.0) -> None:
        """It is not so. What an earlier agent found out is given the time that finding it out takes."""
        if reason in self._resumed_until:
            until = self._resumed_until[reason]
            if until is None:
                until = self._resumed_until[reason] = now + resumed_s
            if now <= until:
                return
            del self._resumed_until[reason]
        self._standing.pop(reason, None)
