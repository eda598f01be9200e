"""Decisions on one tenant: pure functions from a snapshot of its objects to the next step, status and Events."""
