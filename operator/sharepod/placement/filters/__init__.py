"""Filters: what a node or GPU must fulfil to take a request, and the wording of why it does not."""
