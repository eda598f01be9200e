"""Facts: what the operator keeps of each object. See README.md."""
