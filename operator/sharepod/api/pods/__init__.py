"""Pods: of SharePods, of holders, and plain Pods with a resource line."""
