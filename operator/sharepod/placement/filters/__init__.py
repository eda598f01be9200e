"""Filters: the conditions for a node or GPU to take a request, and the wording of refusals."""
