"""Budgets of GPU time: charging, status, and the standing (place in the queue) that they give to namespaces."""
