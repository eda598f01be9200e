"""Cluster state: everything that the operator knows about the cluster, in memory."""
