"""Random sequences of all events of placement, checked against a second implementation of its rules.

test_placement_promises.py has the checks after each step, and placement_life.py the events. A failure prints the
shortest sequence that shows it.
"""

from __future__ import annotations

import traceback

from harness.soak import Run
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from property.test_placement_promises import Placement

WANTED = {"broken": 0}
_SETTINGS = settings(
    max_examples=10,
    stateful_step_count=60,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def soak(run: Run) -> dict[str, int]:
    Placement.asked = Placement.runs = 0
    broken = 0
    while not run.over() and not broken:
        machine = seed(run.random.randrange(1 << 31))(type("Placement", (Placement,), {}))
        try:
            run_state_machine_as_test(machine, settings=_SETTINGS)
        except Exception as failure:  # an exception of any kind is a fault that the run has found
            broken += 1
            traceback.print_exception(failure)
    return {"sequences": Placement.runs, "requests": Placement.asked, "broken": broken}
