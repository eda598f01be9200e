"""Long runs of random life: twenty minutes by `make soak-NAME`, a few seconds of the same code in the suite.

Guarantees: all randomness of a run comes from its seed, which is printed first. A slice in the suite has a fixed seed
and ends within its time.

    def soak(run: Run) -> dict[str, int]: ...        # until run.over(); the counts of what happened

    counts = soak(slice_of("hook"))                  # in the suite, marked `soak`
    main("hook", soak, wanted={"hangs": 0})          # benchmarks/soak_hook.py; SEED=7 make soak-hook repeats a run
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

FULL_SECONDS = 1200.0
SLICE_SECONDS = 8.0
SLICE_SEED = 1
SOAKS = 5  # number of soaks in the suite, among which SOAK_SECONDS is divided: hook, memory, agent, placement, frames


@dataclass
class Run:
    """One run of a soak: the source of its randomness, and its end."""

    name: str
    seed: int
    seconds: float
    random: random.Random = field(init=False)
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.begun = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def over(self) -> bool:
        return self.elapsed() >= self.seconds


def slice_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds of a slice in the suite: 8, or its part of SOAK_SECONDS (for all soaks together) if less.

    Raises ValueError if SOAK_SECONDS is no number.
    """
    given = environment.get("SOAK_SECONDS")
    if given is None:
        return SLICE_SECONDS
    try:
        return max(0.0, min(SLICE_SECONDS, float(given) / SOAKS))
    except ValueError:
        raise ValueError(f"SOAK_SECONDS is {given!r}; it is the number of seconds for all soaks of the suite") from None


def slice_of(name: str) -> Run:
    """Return the run of a slice in the suite. Print its seed, which pytest shows with a failure."""
    return _announced(Run(name, SLICE_SEED, slice_seconds()))


def main(name: str, soak: Callable[[Run], Mapping[str, int]], *, wanted: Mapping[str, int]) -> int:
    """Run a soak in full. Return exit status 1 if a count is not as expected. The last printed line has the counts."""
    parser = argparse.ArgumentParser(description=f"Random life of {name} from one seed; see make soak-{name}.")
    parser.add_argument("--seconds", type=float, default=FULL_SECONDS)
    parser.add_argument(
        "--seed", type=int, default=int(os.environ.get("SEED") or random.SystemRandom().randrange(1 << 31))
    )
    given = parser.parse_args()
    run = _announced(Run(name, given.seed, given.seconds))
    counts = dict(soak(run))
    wrong = {count: counts.get(count) for count in wanted if counts.get(count) != wanted[count]}
    for count, value in wrong.items():
        print(f"FAILED: {count} is {value}, not {wanted[count]}; repeat with SEED={run.seed} make soak-{name}")
    summary = ", ".join(f"{count} {value}" for count, value in counts.items())
    print(f"soak-{name}: seed {run.seed}, {run.elapsed():.0f} s: {summary}", flush=True)
    return 1 if wrong else 0


def _announced(run: Run) -> Run:
    print(f"soak-{run.name}: seed {run.seed}, {run.seconds:g} s", flush=True)
    return run
