"""Limits of the agent's supervisor: signals that it forwards, and killed children that end it."""

from __future__ import annotations

import signal

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MOST_KILLED = 5
WITHIN_S = 60.0
"""`MOST_KILLED` children that were killed within so many seconds end the supervisor."""
