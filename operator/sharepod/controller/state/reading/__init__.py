"""Readers and compact forms by which objects of the API server become facts. See README.md."""
