"""Facts: the fields that the operator keeps of each object, as typed values. See README.md."""
