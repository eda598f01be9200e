"""Reconciliation of one tenant: snapshot, act, confirm, evict, write the status."""
