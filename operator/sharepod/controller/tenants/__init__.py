"""Reconciliation of one tenant: takes a snapshot, performs the next step, writes the status, evicts."""
