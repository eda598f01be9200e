"""Parts of the operator's benchmark: see README.md."""
