"""Pods: that of a SharePod, that of a holder, and plain Pods with a resource line."""
