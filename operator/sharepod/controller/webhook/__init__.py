"""Webhook that gives plain Pods with a resource line their claims where the API server has no policies for that."""
