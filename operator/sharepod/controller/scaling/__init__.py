"""Placeholders: Pods by which shares without room on any node request nodes from a cluster autoscaler."""
