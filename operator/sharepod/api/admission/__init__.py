"""Admission: the ValidatingAdmissionPolicies for SharePods, generated in CEL."""
