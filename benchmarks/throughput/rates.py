"""Progress of jobs that share a GPU: the time scheduler is simulated ("played") once for each mix of jobs.

The rate of a job is its progress next to the other jobs, relative to its progress without them: 1 means that they do
not disturb it. The pauses vary at random around the mean of the job, so that jobs with equal steps do not synchronize.

Guarantees:
- Equal mixes have equal rates, in every run of the same sources.
- A mix is played once. Later runs take its rates from the file in `kept_in`, as long as the sources are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from pathlib import Path

from property import timeshare_simulation
from property.timeshare_simulation import MS, US, Program, S, Simulation
from sharepod import timeshare

Tenancy = tuple[int, int, int, int]
"""A job on a GPU: request, limit and duty in thousandths, and the length of a step without neighbours in ms."""
Mix = tuple[Tenancy, ...]
"""The jobs on a GPU, sorted."""

KERNEL_MS = 2
"""Length of a kernel in ms. A long kernel makes turns end rather too late than too early. The work of a step is a whole
number of equal kernels."""
HAND_OFF_US = 700
"""Microseconds between two holders in which no job runs: 0.5 ms until the hook returns the token of a pausing job, and
0.2 ms from its DRAINED to the next grant (`make bench-handoff`)."""
PAUSE_VARIES = 0.5
"""Largest difference of a pause from its mean, as a part of the mean."""
WARM_UP_S, PLAYED_S = 1, 4
"""Simulated seconds of a play before counting starts (buckets fill within one second), and seconds that are counted."""
LONG_PLAYED_S = 20
"""Counted seconds of a repeated play (a job was below its guarantee): short plays have errors of some hundredths."""


def guaranteed(tenancy: Tenancy) -> float:
    """Return the rate that a job's request guarantees: GPU work gets the requested part of a GPU, pauses stay as
    long."""
    request, _, duty, _ = tenancy
    return 1000.0 / (duty * 1000.0 / request + 1000.0 - duty)


class _MixOfPrograms(Simulation):
    """Simulation of programs with varying pauses, which counts the time that they wait."""

    def __init__(self, mix: Mix, kernel_ms: int) -> None:
        self._pauses = {str(index): step * (1000 - duty) * US for index, (_, _, duty, step) in enumerate(mix)}
        self._chance = random.Random(repr(mix))
        super().__init__(
            [_program(str(index), tenancy, kernel_ms) for index, tenancy in enumerate(mix)], gap_ns=HAND_OFF_US * US
        )

    def rates(self, warm_up_ns: int, played_ns: int) -> tuple[float, ...]:
        """Run the simulation. Return for each program the part of the time in which it did not wait for the GPU."""
        programs, until = list(self.programs.values()), warm_up_ns + played_ns
        self.at(warm_up_ns, self._forget_waits)
        self.run(until)
        waited = [
            sum(program.waits) + (until - program.wanted_at if program.wanted_at is not None else 0)
            for program in programs
        ]
        return tuple(1.0 - wait / played_ns for wait in waited)

    def _forget_waits(self) -> None:
        for program in self.programs.values():
            program.waits.clear()
            if program.wanted_at is not None:
                program.wanted_at = self.now

    def _wake(self, program: Program) -> None:
        varied = self._chance.uniform(1 - PAUSE_VARIES, 1 + PAUSE_VARIES)
        program.pause_ns = round(self._pauses[program.id] * varied)
        super()._wake(program)


def _program(name: str, tenancy: Tenancy, kernel_ms: int) -> Program:
    request, limit, duty, step_ms = tenancy
    work = step_ms * duty * US
    kernels = max(1, round(work / (kernel_ms * MS)))
    return Program(
        name,
        request=request,
        limit=limit,
        kernel_ns=max(1, work // kernels),
        burst_ns=work // kernels * kernels if duty < 1000 else 0,
        start_ns=int(name) * 7 * MS,
    )


def play(mix: Mix, *, played_s: int = PLAYED_S, kernel_ms: int = KERNEL_MS) -> tuple[float, ...]:
    """Return the rate of each job of a mix, in the order of the mix. Together the jobs use at most one GPU."""
    rates = _MixOfPrograms(mix, kernel_ms).rates(WARM_UP_S * S, played_s * S)
    # pauses may be longer than on average during a short play: by these rates the jobs would do more work than a GPU
    # can do
    used = sum(rate * duty / 1000 for rate, (_, _, duty, _) in zip(rates, mix, strict=True))
    return tuple(rate / max(1.0, used) for rate in rates)


class Rates:
    """Rates by mix. Each mix is played when its rates are first used.

    Args:
        kept_in: Folder of the file with rates; None: no file.
        fresh: True: the file is written but not read.
    """

    def __init__(self, kept_in: Path | None = None, *, fresh: bool = False) -> None:
        self._known: dict[Mix, tuple[float, ...]] = {}
        self._file = None if kept_in is None else kept_in / f"rates-{_fingerprint()}.json"
        self.asked: set[Mix] = set()
        """Mixes whose rates have been used."""
        self._played = 0
        if self._file is not None and not fresh:
            with contextlib.suppress(OSError, ValueError):
                listed = json.loads(self._file.read_text(encoding="utf-8"))
                self._known = {tuple(tuple(one) for one in mix): tuple(found) for mix, found in listed}

    def __call__(self, mix: Mix) -> tuple[float, ...]:
        """Return the rate of each job of a sorted mix, in its order."""
        self.asked.add(mix)
        found = self._known.get(mix)
        if found is None:
            found = play(mix)
            if any(rate < guaranteed(tenancy) for rate, tenancy in zip(found, mix, strict=True)):
                found = play(mix, played_s=LONG_PLAYED_S)
            self._known[mix] = found
            self._played += 1
        return found

    def keep(self) -> None:
        """Write the file of rates."""
        if self._file is not None and self._played:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(list(self._known.items())), encoding="utf-8")
            partial.replace(self._file)


def _fingerprint() -> str:
    """Return a hash of the sources on which a rate depends."""
    folder = Path(timeshare.__file__).parent
    simulated = timeshare_simulation.__file__
    assert simulated is not None
    digest = hashlib.sha256()
    for path in (*sorted(folder.glob("*.py")), Path(simulated), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
