"""Enforcement of the tenants' shares: who holds each GPU (the token), how much device memory each process may use (the
memory ledger), and what namespaces consumed."""
