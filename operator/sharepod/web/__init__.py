"""HTTP of operator and agent: a server that stays reachable under load, and access control for metrics."""
