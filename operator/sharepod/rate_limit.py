"""Token-bucket rate limiter: `per_s` events a second, bursts of at most `burst`. Pure: callers pass the time.

Guarantees:
- In any t seconds at most `burst + per_s * t` events are admitted, less the tokens that `charge` took. An event whose
  token was returned by `give_back` does not count.
- Unused rate is saved up to `burst`, never beyond.
- A caller that sleeps for `wait_s` is admitted when it wakes, if no other caller took the token in that time.
"""

from __future__ import annotations

_ROUNDING = 1e-6
"""Part of a token that may be missing for an event. It covers the clock's rounding, so that a caller that slept for
exactly `wait_s` is admitted. A float clock at 1e6 s resolves 1e-10 s, which at 10,000 a second is 1e-6 tokens."""


class RateLimiter:
    """One token bucket, full at first.

    Args:
        now: Seconds on a clock that never goes back; the same clock at every later call.
        per_s: Tokens that flow in each second.
        burst: Tokens that the bucket holds.
    """

    __slots__ = ("_at", "_burst", "_level", "_per_s")

    def __init__(self, now: float, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at = now

    def set_rate(self, now: float, per_s: float) -> None:
        """Change the rate from `now` on. Saved tokens stay."""
        self._fill(now)
        self._per_s = per_s

    def charge(self, tokens: float) -> None:
        """Take further `tokens` for an event that was admitted and cost more than one. The level may fall below
        zero."""
        self._level -= tokens

    def take(self, now: float) -> bool:
        """Admit one event at `now` and take its token. Return False, and take nothing, if less than one token is
        left."""
        self._fill(now)
        if self._level < 1 - _ROUNDING:
            return False
        self._level -= 1
        return True

    def give_back(self, now: float, taken_at: float) -> None:
        """Return the token that was taken at `taken_at`, because its event did not happen. The inflow since then is
        subtracted: without the event it could have overflowed the bucket."""
        self._fill(now)
        unfilled = max(0.0, 1 - (now - taken_at) * self._per_s)
        self._level = min(self._burst, self._level + unfilled)

    def wait_s(self, now: float) -> float:
        """Return the seconds until `take` would admit one event; 0.0 if it would admit one at `now`."""
        self._fill(now)
        return 0.0 if self._level >= 1 - _ROUNDING else (1 - self._level) / self._per_s

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._per_s)
        self._at = now
