"""HTTP of operator and agent: a server that stays reachable, and who may read metrics."""
