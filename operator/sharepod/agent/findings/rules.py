"""Rules of findings: decide from readings when a finding about a tenant begins and ends, and word its message.

Pure: callers pass the time, in seconds.

Guarantees:
- A finding begins only after its cause has lasted for a while, so that a slow start of a program or a restart of the
  agent causes no finding. A replaced hook must have been seen twice.
- A finding's message never changes. It contains the values measured when the finding began.
- The threshold at which a finding ends is lower than the threshold at which it begins.
- A finding of an earlier agent stays at least until this agent has observed long enough to find it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from sharepod.agent.shares.memory_ledger import DeniedAllocation
from sharepod.api.gpunode import OFFENCES, Finding, FindingReason
from sharepod.api.objects import PRELOAD_PATH

from .beyond_turns import Beyond, SlidingBeyond
from .sliding import SlidingRate

PREEMPTIONS_MAX = 3
"""Number of preemptions within `PREEMPTIONS_WITHIN_S` that cause a finding. A correct program under load has fewer."""
PREEMPTIONS_WITHIN_S = 60.0
"""Seconds over which preemptions are counted."""
REFUSED_FOR_S = 60.0
"""Seconds from the last refused allocation to the end of the finding. A program that retries sooner causes one finding,
not many."""
_LOOKED_AT_S = 3.0
"""Seconds after which a new agent has certainly checked the hook of every process: two readings, with a check between
them."""
_LISTED_PIDS = 4
"""Most pids in a message, so that it stays short."""


@dataclass(frozen=True)
class FindingThresholds:
    """Thresholds of the rules: what a tenant may exceed, and for how long."""

    unhooked_after_s: float = 3.0
    """Seconds that a process may be on a GPU before its hook has connected."""
    busy_window_s: float = 10.0
    """Seconds over which busy time beyond turns is summed."""
    busy_tolerance: float = 0.25
    """Part of the window (0 to 1) for which a GPU may be busy beyond turns."""
    gap_tolerance: int = 512 << 20
    """Bytes that the driver may count for the tenant's processes beyond their credits."""
    gap_after_s: float = 3.0
    """Seconds after which an excess of more than `gap_tolerance` becomes a finding."""
    kill: bool = False
    """True if the agent kills processes that cause findings. The messages then mention it."""


class FindingRules:
    """Rules of one tenant's findings. Each `observe_...` is called after each reading of the driver."""

    def __init__(self, config: FindingThresholds, resumed: Sequence[Finding] = ()) -> None:
        """Args:
        config: the thresholds.
        resumed: findings of an earlier agent. Each stays until this agent has observed long enough to find it again."""
        self._config = config
        known = {FindingReason(item.reason): item for item in resumed if item.reason in tuple(FindingReason)}
        self._standing = known
        self._resumed_until: dict[FindingReason, float | None] = dict.fromkeys(known)
        self._unhooked_since: dict[int, float] = {}
        self._gap_since: dict[str, float] = {}
        self._over_since: dict[str, float] = {}
        self._windows: dict[str, tuple[SlidingRate, SlidingRate, SlidingBeyond]] = {}
        self._overdue = SlidingRate(config.busy_window_s)
        self._refused: dict[str, int] = {}
        self._refused_at: float | None = None
        self._preempted_at: deque[float] = deque()
        self._preemptions: int | None = None
        self.unhooked: frozenset[int] = frozenset()
        """Pids of processes that have used the tenant's GPUs without the hook for longer than `unhooked_after_s`."""
        self.replaced: frozenset[int] = frozenset()
        """Pids of processes on the tenant's GPUs in which the hook was replaced."""
        self.busy_on: str | None = None
        """UUID of the GPU that the tenant now keeps busy beyond its turns; None if there is none."""
        self.over_limit_on: str | None = None
        """UUID of the GPU on which the tenant now has more memory than its limit; None if there is none."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The present findings, the gravest first."""
        return tuple(self._standing[reason] for reason in FindingReason if reason in self._standing)

    def begin_again(self) -> None:
        """Drop the evidence so far. Call this after an offender was killed, so that its evidence does not count against
        the tenant's other processes."""
        self._windows.clear()
        self._over_since.clear()
        self.busy_on = self.over_limit_on = None

    def stands(self, reason: FindingReason) -> bool:
        """Return whether a finding with this reason is present."""
        return reason in self._standing

    def observe_unhooked(self, now: float, unhooked: Set[int]) -> None:
        """Record the processes on the tenant's GPUs whose hook never connected, by pid."""
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
            f"process {listed}{more} (pid on the node) uses the GPU without the hook, so its share is not enforced; "
            "images built on musl (Alpine) and statically linked programs do not load the hook: use an image built on "
            "glibc",
        )

    def observe_replaced(self, now: float, replaced: Mapping[int, str]) -> None:
        """Record the processes on the tenant's GPUs whose hook was replaced, by pid, with the evidence."""
        self.replaced = frozenset(replaced)
        if not replaced:
            self._end(FindingReason.HOOK_REPLACED, now, _LOOKED_AT_S)
            return
        pid, seen = min(replaced.items())
        more = f" (and {len(replaced) - 1} more)" if len(replaced) > 1 else ""
        self._begin(
            FindingReason.HOOK_REPLACED,
            f"process {pid}{more} (pid on the node) {seen}, so its share is not enforced; start the program without "
            f"mounting over {PRELOAD_PATH}, and without a client of the agent's socket other than the hook",
        )

    def observe_unread(self, unread: Set[str]) -> None:
        """Record the tenant's GPUs whose processes the driver does not report, by UUID."""
        if unread:
            self._begin(
                FindingReason.PROCESSES_NOT_TOLD,
                f"the driver does not report the processes on {', '.join(sorted(unread))}, so a process without the "
                "hook would not be detected",
            )
        else:
            self._resumed_until.pop(FindingReason.PROCESSES_NOT_TOLD, None)
            self._end(FindingReason.PROCESSES_NOT_TOLD)

    def observe_time(
        self,
        now: float,
        busy_s: Mapping[str, float],
        held_s: float,
        beyond_s: Mapping[str, Beyond],
        overdue_s: float = 0.0,
    ) -> None:
        """Record the tenant's GPU time and token time.

        Args:
            now: time of the reading.
            busy_s: by GPU UUID, seconds in which the tenant's kernels ran, since a fixed moment.
            held_s: seconds for which the tenant held the token, since a fixed moment.
            beyond_s: by UUID of the GPUs in `busy_s`, seconds in which its kernels ran beyond its turns, since a fixed
            moment.
            overdue_s: seconds for which the tenant had not drained while others held the GPU, since a fixed moment.
        """
        self._overdue.add(now, overdue_s)
        for absent in self._windows.keys() - busy_s.keys():
            del self._windows[absent]
        worst, where, span = 0.0, "", 0.0
        for uuid, busy in busy_s.items():
            window_s = self._config.busy_window_s
            used, held, beyond = self._windows.setdefault(
                uuid, (SlidingRate(window_s), SlidingRate(window_s), SlidingBeyond(window_s))
            )
            used.add(now, busy)
            held.add(now, held_s)
            beyond.add(now, beyond_s[uuid])
            if used.span >= window_s and beyond.rate > worst:
                worst, where, span = beyond.rate, uuid, used.span
        self.busy_on = where if worst > self._config.busy_tolerance else None
        if worst > self._config.busy_tolerance:
            used, held, _ = self._windows[where]
            if worst - self._overdue.rate > self._config.busy_tolerance:
                why = "something in the pod bypasses the hook"
            else:
                why = "its work does not end with its turn; split kernels that run for seconds, or use mode: Exclusive"
            self._begin(
                FindingReason.BUSY_BEYOND_HELD,
                f"over {span:.0f} s its processes kept {where} busy {used.rate:.0%} of the time, while it held "
                f"{min(1.0, held.rate):.0%}; {worst:.0%} were outside its turns: {why}",
            )
        elif worst < self._config.busy_tolerance / 2:
            self._end(FindingReason.BUSY_BEYOND_HELD, now, self._config.busy_window_s)

    def observe_memory(self, now: float, gap: Mapping[str, int]) -> None:
        """Record the bytes that the driver counts for the tenant beyond its credits, by GPU UUID."""
        tolerated = self._config.gap_tolerance
        self._gap_since = {uuid: self._gap_since.get(uuid, now) for uuid, size in gap.items() if size > tolerated}
        lasting = [uuid for uuid, begun in self._gap_since.items() if now - begun >= self._config.gap_after_s]
        if lasting:
            worst = max(lasting, key=lambda uuid: gap[uuid])
            self._begin(
                FindingReason.MEMORY_BEYOND_TRACKED,
                f"the driver counts {gap[worst] >> 20} MiB of its processes on {worst} beyond what their allocations "
                "explain (contexts, loaded modules, or allocations that bypass the hook); they count against its limit",
            )
        elif all(size <= tolerated * 3 // 4 for size in gap.values()):
            self._end(FindingReason.MEMORY_BEYOND_TRACKED, now, self._config.gap_after_s)

    def observe_limit(self, now: float, beyond: Mapping[str, int]) -> None:
        """Record by how many bytes the tenant exceeds its limit, by GPU UUID. GPUs within the limit are left out."""
        self._over_since = {uuid: self._over_since.get(uuid, now) for uuid in beyond}
        lasting = [uuid for uuid, begun in self._over_since.items() if now - begun >= self._config.gap_after_s]
        self.over_limit_on = None
        if lasting:
            worst = self.over_limit_on = max(lasting, key=lambda uuid: beyond[uuid])
            self._begin(
                FindingReason.MEMORY_BEYOND_LIMIT,
                f"it has {beyond[worst] >> 20} MiB more on {worst} than its memory limit: memory that the driver takes "
                "without being asked (contexts, loaded modules, local memory), or that a process in the pod claims; "
                "nothing more is allocated for it, and a higher spec.gpu.memory leaves room",
            )
        elif not beyond:
            self._end(FindingReason.MEMORY_BEYOND_LIMIT, now, self._config.gap_after_s)

    def observe_refusals(self, now: float, refusals: Mapping[str, tuple[int, DeniedAllocation]]) -> None:
        """Record, by GPU UUID, the number of refused allocations since the agent serves the tenant, and the last
        one."""
        for uuid, (count, last) in refusals.items():
            if count > self._refused.get(uuid, 0):
                self._refused_at = now
                self._begin(
                    FindingReason.MEMORY_REFUSED,
                    f"it asked for {-(-last.asked >> 20)} MiB more on {uuid} and was refused: {last.used >> 20} of its "
                    f"{last.limit >> 20} MiB are in use; let the program use less, or raise spec.gpu.memory",
                )
        self._refused = {uuid: count for uuid, (count, _) in refusals.items()}
        if self._refused_at is None or now - self._refused_at > REFUSED_FOR_S:
            self._end(FindingReason.MEMORY_REFUSED, now, REFUSED_FOR_S)

    def observe_preemptions(self, now: float, total: int) -> None:
        """Record the number of preemptions since the agent serves the tenant."""
        if self._preemptions is not None:
            self._preempted_at.extend([now] * min(PREEMPTIONS_MAX, total - self._preemptions))
        self._preemptions = total
        while self._preempted_at and now - self._preempted_at[0] > PREEMPTIONS_WITHIN_S:
            self._preempted_at.popleft()
        if len(self._preempted_at) >= PREEMPTIONS_MAX:
            self._begin(
                FindingReason.OVERTAKEN,
                f"it was overtaken {PREEMPTIONS_MAX} times within {PREEMPTIONS_WITHIN_S:.0f} s: its work does not end "
                "with its turn (long kernels, a stopped process, or processes that wait for another pod's); put ranks "
                "that wait for each other into one SharePod with a higher count, or use mode: Exclusive",
            )
        elif not self._preempted_at:
            self._end(FindingReason.OVERTAKEN, now, PREEMPTIONS_WITHIN_S)

    def _begin(self, reason: FindingReason, message: str) -> None:
        if self._config.kill and reason in OFFENCES:
            message = f"{message}; the node's agent ends the process (unenforced_policy: Kill)"
        self._standing.setdefault(reason, Finding(reason=reason, message=message[:1024]))
        self._resumed_until.pop(reason, None)

    def _end(self, reason: FindingReason, now: float = 0.0, resumed_s: float = 0.0) -> None:
        """End a finding. A finding of an earlier agent stays for `resumed_s` seconds after its cause was first
        absent."""
        if reason in self._resumed_until:
            until = self._resumed_until[reason]
            if until is None:
                until = self._resumed_until[reason] = now + resumed_s
            if now <= until:
                return
            del self._resumed_until[reason]
        self._standing.pop(reason, None)
