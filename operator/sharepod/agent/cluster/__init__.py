"""The agent in a cluster: ledger, status, Lease, and their wiring."""
