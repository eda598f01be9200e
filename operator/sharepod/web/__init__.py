"""HTTP servers of operator and agent, which stay reachable under load, and access control for metrics."""
