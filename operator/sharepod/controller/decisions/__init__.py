"""Decisions on one tenant, as pure functions over snapshots."""
