"""Webhook that adds claims or volumes to Pods with a resource line, where the API server has no policies for that."""
