"""Bad weather from a seed: successive faults between the operator and the API server, while load runs.

Guarantees: the kinds, targets and durations of faults are drawn only from the seed, in one thread. Each kind of fault
comes once before any comes a second time.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from harness.proxy import Call, ErrorEvent, Hold, LoseAnswer, Mute, Refuse, Reset, Rule, Slow, expired

from .world import KINDS, Weather, kinds

_PAUSE_S = (1.0, 4.0)
"""Seconds between two faults."""
_STRIKE_S = (1.0, 4.0)
"""Seconds for which a rule lasts."""
_OUTAGE_S = (2.0, 8.0)
_DOWN_S = (0.0, 2.0)
"""Seconds for which the API server's process is stopped."""


class Storm(threading.Thread):
    """Storm of `faults` faults. `backup`: True: halfway etcd's data is copied, for which the control plane stops
    briefly."""

    def __init__(self, weather: Weather, *, seed: int, faults: int, backup: bool = False) -> None:
        super().__init__(name="storm", daemon=True)
        self._weather = weather
        self._proxy = weather.proxy
        self._chance = random.Random(seed)
        self._faults = faults
        self._wants_backup = backup
        self.played: Counter[str] = Counter()
        """How often each kind of fault came."""
        self.backup: Path | None = None
        self.failures: list[str] = []
        self._over = threading.Event()

    def stop(self) -> None:
        """Begin no further faults."""
        self._over.set()

    def run(self) -> None:
        """Play all faults."""
        deck: list[Callable[[], None]] = []
        try:
            for number in range(self._faults):
                if self._over.is_set():
                    return
                if not deck:
                    deck = [self.cut, self.silent, self.error, self.expired, self.outage, self.throttled, self.lost]
                    deck += [self.reset, self.late, self.slow, self.mute, self.restarted]
                    self._chance.shuffle(deck)
                if self._wants_backup and number == self._faults // 2:
                    self.backup = self._weather.world.cluster.back_up()
                fault = deck.pop()
                print(f"storm: {fault.__name__}", file=sys.stderr, flush=True)
                fault()
                self.played[fault.__name__] += 1
                self._last(_PAUSE_S)
        except Exception as error:
            self.failures.append(repr(error))
        finally:
            self._proxy.clear()

    def _last(self, bounds: tuple[float, float]) -> None:
        time.sleep(self._chance.uniform(*bounds))

    def _some(self) -> Callable[[Call], bool]:
        return kinds(*self._chance.sample(KINDS, self._chance.randint(1, len(KINDS))))

    def _stand(self, rule: Rule) -> None:
        with self._proxy.weather(rule):
            self._last(_STRIKE_S)

    # The faults

    def cut(self) -> None:
        """Reset watches of some kinds."""
        self._proxy.cut(self._some())

    def silent(self) -> None:
        """Let watches of some kinds go silent."""
        self._proxy.silence(self._some())

    def error(self) -> None:
        """Send watches of some kinds an internal error."""
        self._proxy.send(ErrorEvent(500, "InternalError"), self._some())

    def expired(self) -> None:
        """Send watches of some kinds the error that their version is too old."""
        self._proxy.send(expired(), self._some())

    def outage(self) -> None:
        """Answer 503 to everything for a while."""
        with self._proxy.weather(Rule(Refuse(503, "ServiceUnavailable"))):
            self._proxy.cut()
            self._last(_OUTAGE_S)

    def throttled(self) -> None:
        """Answer 429 to some calls."""
        self._stand(Rule(Refuse(429, "TooManyRequests", retry_after=1), times=self._chance.randint(1, 30)))

    def lost(self) -> None:
        """Lose the answers of some writes."""
        times = self._chance.randint(1, 30)
        self._stand(Rule(LoseAnswer(), times=times, where=lambda call: call.writes and call.resource != "leases"))

    def reset(self) -> None:
        """Reset the connections of some calls."""
        self._stand(Rule(Reset(), times=self._chance.randint(1, 30)))

    def late(self) -> None:
        """Hold back the answers of GETs."""
        hold = Hold()
        try:
            self._stand(Rule(hold, verbs=("get",), resources=("pods", "gpunodes", "nodes", "sharepods")))
        finally:
            hold.release()

    def slow(self) -> None:
        """Slow some answers down."""
        self._stand(Rule(Slow(20_000), times=self._chance.randint(1, 30)))

    def mute(self) -> None:
        """Let some lists and watches have no answer."""
        self._stand(Rule(Mute(), verbs=("list", "watch"), times=self._chance.randint(1, 3)))

    def restarted(self) -> None:
        """Restart the API server."""
        self._weather.world.cluster.restart_apiserver(down=self._chance.uniform(*_DOWN_S))
