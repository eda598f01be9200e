"""Tenants of the node: the registry of applied rows, each tenant's runtime, and the results of readings."""
