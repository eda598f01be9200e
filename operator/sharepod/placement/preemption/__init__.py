"""Preemption: who makes room for a request of higher priority."""
