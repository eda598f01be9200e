"""Facts: the fields that the operator keeps of each object. See README.md."""
