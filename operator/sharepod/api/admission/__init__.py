"""Admission: generates the admission policies on SharePods, claims and Pods, whose rules are in CEL."""
