"""Preemptions and moves: tenants that free capacity for waiting requests, by lower time, by a move or by an
eviction."""
