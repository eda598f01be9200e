"""Filters: the conditions under which a node or GPU takes a request, and the wording of refusals."""
