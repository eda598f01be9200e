"""The cluster as placement sees it: accounts of nodes and GPUs, reservations, affinity groups."""
