"""Shares in operation: the token of GPU time on the event loop, and the ledger of device memory, per tenant."""
