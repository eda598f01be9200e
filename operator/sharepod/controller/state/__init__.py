"""Everything the operator knows of the cluster, in memory."""
