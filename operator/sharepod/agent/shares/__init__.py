"""Enforcement of the tenants' shares: tokens for GPU time, ledgers of device memory, and metering."""
