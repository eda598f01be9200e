"""Shares at work: the token of GPU time on the event loop, and the ledger of device memory, per tenant."""
