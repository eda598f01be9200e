"""Placement's model of the cluster: accounts of nodes and GPUs, reservations, affinity groups."""
