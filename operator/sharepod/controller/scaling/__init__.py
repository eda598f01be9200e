"""Placeholders, by which shares that no node has room for ask a cluster's autoscaler for nodes."""
