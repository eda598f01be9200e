"""Preemption: which tenants are evicted, lowered or moved for a request of higher priority."""
