"""Readers that turn objects of the API server into facts, the fields that the operator uses. See README.md."""
