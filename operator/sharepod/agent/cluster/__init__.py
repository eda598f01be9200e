"""The agent in a cluster: follows the ledger, reports status, renews the Lease, publishes the ResourceSlice."""
