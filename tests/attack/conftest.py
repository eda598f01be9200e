"""Control planes of the attempts: an API server only, and an API server with a running operator."""

from __future__ import annotations

from cluster.conftest import alice, server, world

__all__ = ["alice", "server", "world"]
