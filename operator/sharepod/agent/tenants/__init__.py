"""Tenants of the node: the registry of applied rows, the runtime of each tenant, and what readings of the GPUs show
about each."""
