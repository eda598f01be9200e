"""Fixtures of the attacks: a control plane with only an API server, and a control plane with a running operator."""

from __future__ import annotations

from cluster.conftest import alice, server, shared_cluster, world

__all__ = ["alice", "server", "shared_cluster", "world"]
