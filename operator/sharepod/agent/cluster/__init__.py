"""The agent in a cluster: ledger, status, Lease, and the wiring of all of them."""
