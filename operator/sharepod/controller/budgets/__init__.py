"""Budgets of GPU time: charged, shown, and turned into the standing of namespaces."""
