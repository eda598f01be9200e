"""API server double: see README.md."""
