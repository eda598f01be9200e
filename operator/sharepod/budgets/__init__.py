"""Budgets: GPU consumption of namespaces, summed over nodes and time, and limits on it. Pure."""
