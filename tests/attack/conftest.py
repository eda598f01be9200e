"""The control plane of the attempts that only the API server sees."""

from __future__ import annotations

from cluster.conftest import alice, server

__all__ = ["alice", "server"]
