"""The control planes of the attempts: of those that only the API server sees, and with an operator that acts."""

from __future__ import annotations

from cluster.conftest import alice, server, world

__all__ = ["alice", "server", "world"]
