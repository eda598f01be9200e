"""Digests of all actions of the scheduler for mixes of tenants of `benchmarks/policies.py`, with exclusive turns.

After a change of the scheduler that is meant to change actions, `python tests/property/exclusive_turns.py` prints the
new table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from property.timeshare_simulation import MS, US, Program, S, Simulation, pauses
from sharepod.timeshare import Action, Scheduler, TokenGrant

_SECONDS = 5


@dataclass(frozen=True)
class Mix:
    """Tenants of one GPU. If `pause_ms` is set, the first tenant alternates between `work_ms` of work and `pause_ms` of
    pause. The other tenants are always busy."""

    name: str
    requests: tuple[int, ...]
    kernel_ms: int
    work_ms: int = 0
    pause_ms: int = 0
    kind: str = "regular"


_PAUSING = (("70:30", (700, 300), 20, 5), ("90:0", (900, 0), 5, 2), ("50:50", (500, 500), 20, 10))
_BUSY = (
    ("2:98", (20, 980)),
    ("10:90", (100, 900)),
    ("30:70", (300, 700)),
    ("20:30:50", (200, 300, 500)),
    ("50 x 2", (20,) * 50),
)

MIXES = [
    *(
        Mix(f"{name}, {work}/{pause} ms {kind}, kernels {kernel} ms", requests, kernel, work, pause, kind)
        for name, requests, work, pause in _PAUSING
        for kind in ("regular", "exponential", "bimodal")
        for kernel in (1, 40, 900)
    ),
    *(Mix(f"{name}, kernels {kernel} ms", requests, kernel) for name, requests in _BUSY for kernel in (1, 50)),
]

DIGESTS: dict[str, str] = {
    "70:30, 20/5 ms regular, kernels 1 ms": "50f14035966df25e",
    "70:30, 20/5 ms regular, kernels 40 ms": "89f83857e2bd233d",
    "70:30, 20/5 ms regular, kernels 900 ms": "8d3813f99daab8ab",
    "70:30, 20/5 ms exponential, kernels 1 ms": "dcc8e037b381ff28",
    "70:30, 20/5 ms exponential, kernels 40 ms": "e188c53f5489c2ff",
    "70:30, 20/5 ms exponential, kernels 900 ms": "215c1356db027a48",
    "70:30, 20/5 ms bimodal, kernels 1 ms": "e252a46b0019429e",
    "70:30, 20/5 ms bimodal, kernels 40 ms": "0637a800e2793d83",
    "70:30, 20/5 ms bimodal, kernels 900 ms": "176904851fe4cbee",
    "90:0, 5/2 ms regular, kernels 1 ms": "d5d69b3cf6f84a58",
    "90:0, 5/2 ms regular, kernels 40 ms": "29ea2dee09c8bad5",
    "90:0, 5/2 ms regular, kernels 900 ms": "8c3dfd942cc78824",
    "90:0, 5/2 ms exponential, kernels 1 ms": "785cfabd38108f0b",
    "90:0, 5/2 ms exponential, kernels 40 ms": "be61fffd9ce6176c",
    "90:0, 5/2 ms exponential, kernels 900 ms": "4bbcde090246767a",
    "90:0, 5/2 ms bimodal, kernels 1 ms": "3df1d802e9dd7f33",
    "90:0, 5/2 ms bimodal, kernels 40 ms": "a15a91e9fd770dd1",
    "90:0, 5/2 ms bimodal, kernels 900 ms": "24fdfe030b1efd70",
    "50:50, 20/10 ms regular, kernels 1 ms": "9df16c4f6d2ac8d1",
    "50:50, 20/10 ms regular, kernels 40 ms": "470b6fd0a43ac8b6",
    "50:50, 20/10 ms regular, kernels 900 ms": "fa3494a490c7e882",
    "50:50, 20/10 ms exponential, kernels 1 ms": "d97379a60dfa8fc8",
    "50:50, 20/10 ms exponential, kernels 40 ms": "7544e6450aeb6c3f",
    "50:50, 20/10 ms exponential, kernels 900 ms": "237385e403226de4",
    "50:50, 20/10 ms bimodal, kernels 1 ms": "483e4532c0860668",
    "50:50, 20/10 ms bimodal, kernels 40 ms": "dd53e1c690bc5dbd",
    "50:50, 20/10 ms bimodal, kernels 900 ms": "84ded607a8f04a9c",
    "2:98, kernels 1 ms": "dd45819bae46bb95",
    "2:98, kernels 50 ms": "82de1d9a2d8035f5",
    "10:90, kernels 1 ms": "d860242f400b2e10",
    "10:90, kernels 50 ms": "96a0488a280f4abe",
    "30:70, kernels 1 ms": "4f5191c931d4281b",
    "30:70, kernels 50 ms": "4824ab5b030450b0",
    "20:30:50, kernels 1 ms": "5e2d3ca5983884bf",
    "20:30:50, kernels 50 ms": "a85632bc73c1afb9",
    "50 x 2, kernels 1 ms": "3a09d64a6e62fe5b",
    "50 x 2, kernels 50 ms": "bc985b44f86291eb",
}
"""Digest of all actions, by name of the mix."""


class _Recorder:
    """Scheduler that adds each action to a digest."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.digest = hashlib.sha256()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def tick(self, now: int) -> list[Action]:
        """Return the actions that are due, and add them to the digest."""
        actions: list[Action] = self._scheduler.tick(now)
        for action in actions:
            terms: tuple[object, ...] = ()
            if isinstance(action, TokenGrant):
                terms = (action.quantum_ns, action.metered, action.short, action.prompt)
            self.digest.update(repr((now, type(action).__name__, action.tenant, action.grant_id, *terms)).encode())
        return actions


def digest(mix: Mix, scheduler: Any) -> str:
    """Simulate one mix for five seconds, as `benchmarks/policies.py` does. Return the digest of all actions."""
    programs = [
        Program(f"t{i}", request=request, kernel_ns=mix.kernel_ms * MS) for i, request in enumerate(mix.requests)
    ]
    if mix.pause_ms:
        programs[0] = Program(
            "t0",
            request=mix.requests[0],
            kernel_ns=1 * MS,
            burst_ns=mix.work_ms * MS,
            look_ns=500 * US,
            pauses=pauses(mix.kind, mix.pause_ms * MS),
        )
    recorder = _Recorder(scheduler)
    Simulation(programs, gap_ns=200 * US, announces=True, scheduler=recorder).run(_SECONDS * S)
    return recorder.digest.hexdigest()[:16]


if __name__ == "__main__":
    for each in MIXES:
        print(f'    "{each.name}": "{digest(each, Scheduler())}",')
