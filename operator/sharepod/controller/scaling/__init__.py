"""Placeholders: Pods that make a cluster autoscaler add nodes for shares that fit on no present node."""
