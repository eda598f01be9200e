"""Budgets: limits on the GPU consumption of namespaces, summed over nodes and time. Pure."""
